"""Callbacks for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from actors.reports import RoundReport
from archipelago import Callback


class Stop(Exception):
    """What a test's callback raises to end a run."""


class OnRound(Callback):
    """Calls a function with every round's report."""

    def __init__(self, function: Callable[[RoundReport], Any]) -> None:
        self._function = function

    def on_round(self, run: Any, report: RoundReport) -> None:
        self._function(report)


class StopAfter(Callback):
    """Raises after a round, as a callback with a mistake would: before or after its checkpoint is submitted."""

    def __init__(self, round: int, hook: str = "on_round") -> None:
        self._round, self._hook = round, hook

    def on_round(self, run: Any, report: RoundReport) -> None:
        if (report.round, "on_round") == (self._round, self._hook):
            raise Stop

    def on_checkpoint(self, run: Any, round: int) -> None:
        if (round, "on_checkpoint") == (self._round, self._hook):
            raise Stop


class UntilTold(Callback):
    """Takes its time after every round until there is a file `continue` in the run's folder."""

    def on_round(self, run: Any, report: RoundReport) -> None:
        if not (run.path / "continue").exists():
            time.sleep(0.4)
