"""Weights & Biases: a sweep is one group. `wandb.offline=true` needs no account; `wandb sync` sends it later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.core.settings import setting
from archipelago.experiments.callbacks.base import LiveRun
from archipelago.experiments.loggers.base import LOGGERS


@dataclass
class WandbOptions:
    """`wandb.project=NAME`."""

    project: str = setting("archipelago", "project")
    entity: str | None = setting(None, "team or user (default: your own)")
    offline: bool = setting(False, "write into the run directory instead of sending")


def _log_artifact(logger: Any, file: Path) -> None:
    from wandb import Artifact

    artifact = Artifact(f"{logger.experiment.id}-{file.stem}", type="report")
    artifact.add_file(str(file))
    logger.experiment.log_artifact(artifact)


def _close(logger: Any) -> None:
    logger.experiment.finish()


@LOGGERS.register("wandb", "Weights & Biases: a sweep is one group", label="W&B", options=WandbOptions,
                  needs="wandb", artifact=_log_artifact, close=_close)  # fmt: skip
def wandb(run: LiveRun, name: str, version: str | None, group: str | None, options: WandbOptions) -> Any:
    """`version` is W&B's id of the run."""
    import wandb as package
    from lightning.pytorch.loggers import WandbLogger

    if package.run is not None:  # Lightning would write into it
        raise RuntimeError(
            "this process has a W&B run of its own: finish it (wandb.finish()) before this one"
        )
    # Its console lines would tear the progress display; what it captures of the terminal is not the run's.
    settings = package.Settings(console="off", silent=True)
    offline: dict[str, Any] = {"mode": "offline", "resume": None} if options.offline else {}
    logger = WandbLogger(
        name=name,
        save_dir=str(run.path),
        version=version,
        project=options.project,
        entity=options.entity,
        group=group,
        settings=settings,
        **offline,
    )
    assert logger.experiment  # connects now: what is wrong is said before the first round
    return logger
