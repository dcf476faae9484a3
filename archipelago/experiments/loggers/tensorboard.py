"""TensorBoard, into the folder `tensorboard` of the run directory (`tensorboard=true` is short for it)."""

from __future__ import annotations

from typing import Any

from archipelago.core.own_files import remove_own_files
from archipelago.experiments.callbacks.base import LiveRun
from archipelago.experiments.loggers.base import LOGGERS

FOLDER = "tensorboard"


def _close(logger: Any) -> None:
    logger.experiment.close()


@LOGGERS.register("tensorboard", "TensorBoard event files in the run directory", label="TensorBoard",
                  keeps_rounds=True, close=_close, files=r"(events\.out\.tfevents\..+|hparams\.yaml)")  # fmt: skip
def tensorboard(run: LiveRun, version: str | None) -> Any:
    """What an interrupted run logged after its last checkpoint is purged: those rounds are run again."""
    from lightning.pytorch.loggers import TensorBoardLogger

    if run.round == 0:
        remove_own_files(run.path, FOLDER)
    if version is None:  # rounds that were taken over bring the settings of another run along
        (run.path / FOLDER / "hparams.yaml").unlink(missing_ok=True)
    # The name of its file has the second in it: a resume within the same second must not write over it.
    return TensorBoardLogger(
        run.path,
        name="",
        version=FOLDER,
        default_hp_metric=False,
        purge_step=run.round + 1 if run.round else None,
        filename_suffix=f".after-{run.round}",
    )
