"""The report of a sweep for loggers that take files: one more run of the sweep's group, with files and no rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.callbacks.base import LiveRun
from archipelago.experiments.loggers.base import (
    LOGGERS,
    LoggerCallback,
    hyperparameters,
    logger_names,
    report_files,
)
from archipelago.runs.format import DOCUMENT, TRIALS


def takes_files(config: ExperimentSettings) -> list[str]:
    """The loggers of a sweep that take files."""
    return [name for name in logger_names(config) if "artifact" in LOGGERS.entry(name).capabilities]


def log_sweep(folder: Path, live: LiveSweep) -> None:
    """Hand the report of the sweep in `folder` to its loggers; one that fails is a warning."""
    for name in takes_files(live.config):
        logger = SweepLogger(LOGGERS.entry(name), folder)
        logger.on_start(live)
        logger.on_end(live)


class LiveSweep(LiveRun):
    """A sweep as loggers see it: `path` is where they may write, `note` reports their warnings."""

    def __init__(
        self,
        config: ExperimentSettings,
        document: Mapping[str, Any],
        path: Path,
        name: str,
        note: Callable[[str], None],
    ) -> None:
        self.config, self.document, self.sweep = config, document, name
        self.round, self.resumed, self.in_working_copy = (
            0,
            False,
            True,
        )  # all it writes belongs into its own folder
        self._path, self._note = path, note

    @property
    def path(self) -> Path:
        """The folder of the sweep, or of a copy of its report."""
        return self._path

    @property
    def name(self) -> str:
        """The sweep's own name, among those of its trials."""
        return str(self.sweep)

    def note(self, text: str) -> None:
        """On the terminal: a sweep has no events."""
        self._note(text)


class SweepLogger(LoggerCallback):
    """Logs what was asked for, the list of trials and the report."""

    def __init__(self, entry: Any, folder: Path) -> None:
        super().__init__(entry)
        self._folder = folder

    def _parameters(self, run: LiveRun) -> dict[str, Any]:
        assert isinstance(run, LiveSweep)
        return hyperparameters(run.document)

    def _files(self, run: LiveRun) -> list[Path]:
        kept = (DOCUMENT, TRIALS)
        return [*(self._folder / name for name in kept), *report_files(self._folder)]
