"""TensorBoard logs of a run, through Lightning's own logger (`tensorboard=true`)."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from actors.reports import RoundReport
from archipelago.core.own_files import remove_own_files

FOLDER = "tensorboard"


class RoundLog:
    """Writes every number of a round to `RUN/tensorboard`; `done` rounds were logged before."""

    def __init__(self, run: Path, done: int) -> None:
        from lightning.pytorch.loggers import TensorBoardLogger

        import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)

        if done == 0:
            remove_own_files(run, FOLDER)
        # What an interrupted run logged after its last checkpoint is purged: those rounds are run again.
        # The name of its file has the second in it: one that goes on within the same second must not write over it.
        self._logger: Any = TensorBoardLogger(
            run,
            name="",
            version=FOLDER,
            purge_step=done + 1 if done else None,
            filename_suffix=f".after-{done}",
        )

    def __enter__(self) -> RoundLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logger.save()
        self._logger.experiment.close()

    def update(self, report: RoundReport) -> None:
        """Log a finished round."""
        numbers = {name: value for name, value in report.metrics.items() if isinstance(value, int | float)}
        sizes = report.metrics.get("cluster_sizes")
        for cluster, size in enumerate(sizes if isinstance(sizes, list) else []):
            numbers[f"cluster_size/{cluster}"] = size
        for stage, seconds in report.timings.items():
            numbers[f"seconds/{stage}"] = seconds
        self._logger.log_metrics(numbers, step=report.round)
