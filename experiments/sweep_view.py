"""What a sweep shows while it runs: one line a group on a terminal, a line for each trial that is over in a log."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from experiments.progress import duration, is_terminal
from experiments.sweep_directory import FAILED, OVER, RUNNING, Row, SweepDirectory

if TYPE_CHECKING:
    from rich.console import RenderableType

FIGURES = {"micro_accuracy": "accuracy", "micro_macro_f1": "macro-F1", "micro_mse": "mse"}
_EVERY = 5.0  # seconds between two lines of a log, at least, once there are many
_FEW = 40  # trials of a sweep that gets a line for each


class SweepView:
    """A context manager that is told what trials do; a live table on a terminal, plain lines elsewhere."""

    def __init__(
        self,
        directory: SweepDirectory,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = directory.rows
        self._planned = directory.sweep.planned
        self._quiet, self._clock = quiet, clock
        self._stream = sys.stdout if stream is None else stream
        self._live: Any = None
        self._figures: dict[str, dict[str, float]] = {}  # trial -> last figures
        self._share: dict[str, float] = {}  # trial -> part of its rounds that is done
        self._before = 0.0  # what was done when this process began, in trials
        self._began = self._last_line = clock()

    def __enter__(self) -> SweepView:
        self._share = {name: 1.0 for name, row in self._rows.items() if row.status in OVER}
        self._before = sum(self._share.values())
        self._began = self._last_line = self._clock()
        if not self._quiet and is_terminal(self._stream):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._stream), refresh_per_second=2, get_renderable=self._table
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # What it is told --------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A sentence among the figures."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)

    def started(self, trial: str) -> None:
        """A trial is under way."""
        self._share.setdefault(trial, 0.0)

    def update(self, trial: str, result: Mapping[str, Any]) -> None:
        """A trial has come further."""
        self._share[trial] = result.get("round", 0) / max(result.get("rounds", 1), 1)
        if result.get("shown"):
            self._figures[trial] = dict(result["shown"])
        if result.get("done"):
            self.over(trial)

    def over(self, trial: str) -> None:
        """A trial is done with."""
        if self._share.get(trial) == -1.0:
            return
        self._share[trial] = -1.0  # counts as whole, and is told once
        row = self._rows[trial]
        if row.status == FAILED:
            self.note(f"{trial} failed: {row.reason}")
        now = self._clock()
        if self._live is None and (
            self._planned <= _FEW or now - self._last_line >= _EVERY or not self._left()
        ):
            self._last_line = now
            self.note(self._line(row))

    # What it shows ----------------------------------------------------------------------------------------------

    def _left(self) -> int:
        return self._planned - sum(row.status in OVER for row in self._rows.values())

    def time_left(self) -> str:
        """How long the rest takes at the pace so far; empty before anything is done."""
        done = sum(abs(share) for share in self._share.values())
        gained = done - self._before
        if gained <= 0:
            return ""
        return f"{duration((self._clock() - self._began) * max(self._planned - done, 0.0) / gained)} left"

    def group_line(self, group: str) -> tuple[str, str]:
        """(how many of a group's trials are over, its figures so far)."""
        members = [row for row in self._rows.values() if row.group == group]
        over = sum(row.status in OVER for row in members)
        figures = []
        for name, label in FIGURES.items():
            values = [
                self._figures[row.trial][name] for row in members if name in self._figures.get(row.trial, {})
            ]
            if values:
                figures.append(f"{label} {mean_and_std(values)}")
        return f"{over}/{len(members)}", "  ".join(figures)

    def _line(self, row: Row) -> str:
        seeds, figures = self.group_line(row.group)
        done = sum(each.status in OVER for each in self._rows.values())
        width = len(str(self._planned))
        parts = [f"{done:>{width}}/{self._planned}", row.group, f"({seeds} seeds)", figures, self.time_left()]
        return "  ".join(part for part in parts if part)

    def _table(self) -> RenderableType:
        from rich.table import Table

        done = sum(row.status in OVER for row in self._rows.values())
        table = Table(box=None, pad_edge=False, title=f"{done}/{self._planned} trials  {self.time_left()}")
        table.title_justify = "left"
        for name in ("group", "done", "so far"):
            table.add_column(name, no_wrap=name != "group")
        groups = list(dict.fromkeys(row.group for row in self._rows.values()))
        busy = [g for g in groups if any(r.status == RUNNING for r in self._rows.values() if r.group == g)]
        room = 40  # groups; the rest is counted
        for group in groups if len(groups) <= room else busy[:room]:
            table.add_row(group, *self.group_line(group))
        if len(groups) > room:
            table.caption = f"and {len(groups) - len(busy[:room])} more groups"
        return table


def mean_and_std(values: list[float]) -> str:
    """`0.9531 ± 0.0101`; a single value has no spread.

    >>> mean_and_std([0.25, 0.75]), mean_and_std([0.5])
    ('0.5000 ± 0.3536', '0.5000')
    """
    mean = statistics.fmean(values)
    return f"{mean:.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"
