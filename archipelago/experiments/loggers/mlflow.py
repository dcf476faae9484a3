"""MLflow: a sweep is one experiment, a trial one run of it, and so is the sweep's own report.

Without `mlflow.tracking_uri` or MLFLOW_TRACKING_URI everything goes into a local file store, `mlruns` beside the run
directory or in the sweep's: `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER` shows it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.core.settings import setting
from archipelago.experiments.callbacks.base import LiveRun
from archipelago.experiments.loggers.base import LOGGERS

FOLDER = "mlruns"


@dataclass
class MlflowOptions:
    """`mlflow.tracking_uri=http://...`."""

    tracking_uri: str | None = setting(
        None, "server or store (default: MLFLOW_TRACKING_URI, else local files)"
    )
    experiment: str | None = setting(None, "experiment (default: the sweep's name, else archipelago)")


def _log_artifact(logger: Any, file: Path) -> None:
    logger.experiment.log_artifact(logger.run_id, str(file))


@LOGGERS.register("mlflow", "MLflow: a sweep is one experiment", label="MLflow", options=MlflowOptions,
                  needs="mlflow", artifact=_log_artifact)  # fmt: skip
def mlflow(run: LiveRun, name: str, version: str | None, group: str | None, options: MlflowOptions) -> Any:
    """`version` is MLflow's id of the run."""
    from lightning.pytorch.loggers import MLFlowLogger

    address = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    folder = None if address else run.shared / FOLDER
    if folder is not None:
        # MLflow's sanctioned way to say that a store of plain files is meant; its databases are another address.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        folder.mkdir(parents=True, exist_ok=True)
        address = folder.as_uri()
    logger = MLFlowLogger(
        experiment_name=options.experiment or group or "archipelago",
        run_name=name,
        tracking_uri=address,
        tags={"sweep": group} if group else None,
        run_id=version,
    )
    with contextlib.ExitStack() as stack:
        if (
            folder is not None
        ):  # it has no lock of its own, and trials of a sweep make its experiment at the same time
            fcntl.flock(stack.enter_context((folder / ".lock").open("a")), fcntl.LOCK_EX)
        logger.experiment.update_run(logger.run_id, status="RUNNING")  # also one that failed and is resumed
    return logger
