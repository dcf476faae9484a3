"""What an experiment is: its config, its round loop, and the run directory it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.run_reader import Run

__all__ = ["open_run"]


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading: data frames, models, config (imports neither Ray nor Lightning)."""
    from experiments.run_reader import Run

    return Run(path)
