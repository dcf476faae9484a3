"""Lightning's CSV files, into the folder `csv` of the run directory: for tools that know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archipelago.experiments.callbacks.base import LiveRun
from archipelago.experiments.loggers.base import LOGGERS

FOLDER = "csv"


@LOGGERS.register(
    "csv",
    "metrics.csv and hparams.yaml as Lightning writes them",
    label="CSV",
    starts_over=True,
    files=r"(metrics\.csv|hparams\.yaml)",
)
def csv(run: LiveRun) -> Any:
    """The logger deletes what it finds, with a warning: earlier rounds are written again."""
    from lightning.pytorch.loggers import CSVLogger

    for name in ("metrics.csv", "hparams.yaml"):
        Path(run.path / FOLDER / name).unlink(missing_ok=True)
    return CSVLogger(run.path, name="", version=FOLDER, flush_logs_every_n_steps=1)
