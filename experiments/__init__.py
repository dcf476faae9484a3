"""What an experiment is: its config, its round loop, and the run directory it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.newcomers import Newcomer, adopt
    from experiments.run_reader import Run

__all__ = ["Newcomer", "adopt", "open_run"]


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading: data frames, models, config (imports neither Ray nor Lightning).

    One in an object store is copied to this machine first.
    """
    from experiments.run_reader import Run
    from experiments.storage import local_copy

    return Run(local_copy(path))


def __getattr__(name: str) -> object:
    if name in ("Newcomer", "adopt"):  # they need torch and Lightning, which reading a run does not
        from experiments import newcomers

        return getattr(newcomers, name)
    raise AttributeError(f"module 'experiments' has no attribute '{name}'")
