"""What a sweep shows while it runs: one line a group on a terminal, a line for each trial that is over in a log."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from archipelago.core.notebooks import CellOutput, in_notebook
from archipelago.core.vocabulary import registered
from archipelago.experiments.progress import duration, is_terminal
from archipelago.runs.files import numbers_in
from archipelago.runs.storage import join, read_text
from archipelago.runs.sweeps import FAILED, OVER, RUNNING, Row
from archipelago.sweeps.directory import SweepDirectory
from archipelago.sweeps.shared_prefix import shared_rounds

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY = 5.0  # seconds between two lines of a log, at least, once there are many
_STILL = 60.0  # seconds without a line, after which a log says how far the trials under way are
_SHOWN = 6  # trials under way that such a line names
_FEW = 40  # trials of a sweep that gets a line for each


class SweepView:
    """A context manager that hears what trials do; a live table on a terminal, plain lines elsewhere."""

    def __init__(
        self,
        directory: SweepDirectory,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._rows = directory, directory.rows
        self._planned = directory.sweep.planned
        self._quiet, self._clock = quiet, clock
        self._stream = sys.stdout if stream is None else stream
        self._live: Any = None
        self._cell: CellOutput | None = None  # of a notebook
        self._metrics: dict[str, dict[str, float]] = {}  # trial -> last metrics
        self._share: dict[str, float] = {}  # trial -> part of its rounds that is done
        self._earlier: dict[str, float] = {}  # trial -> the part that was not done by this process
        self._shared = shared_rounds(directory.sweep)  # trial -> the part that it takes over from another one
        self._begun: dict[str, float] = {}  # group -> when this process began with it
        self._began = self._last_line = clock()

    def __enter__(self) -> SweepView:
        self._earlier = {name: 1.0 for name, row in self._rows.items() if row.status in OVER}
        self._share = dict(self._earlier)
        for name in self._earlier:
            if metrics := last_metrics(self._directory.run_address(name)):
                self._metrics[name] = metrics
        self._began = self._last_line = self._clock()
        if not self._quiet and in_notebook(self._stream):
            self._cell = CellOutput()
            self._cell.show(self._table())
        elif not self._quiet and is_terminal(self._stream):
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
        if self._cell is not None:
            self._cell.show(self._table(), last=True)

    # What it hears --------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A sentence among the metrics."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)

    def started(self, trial: str) -> None:
        """A trial is under way."""
        self._share.setdefault(trial, 0.0)
        self._begun.setdefault(self._rows[trial].group, self._clock())

    def update(self, trial: str, result: Mapping[str, Any]) -> None:
        """A trial has come further."""
        rounds = max(result.get("rounds", 1), 1)
        self._share[trial] = result.get("round", 0) / rounds
        self._earlier.setdefault(trial, result.get("taken", 0) / rounds)
        if result.get("shown"):
            self._metrics[trial] = dict(result["shown"])
        if result.get("done"):
            self.over(trial)
        elif self._cell is not None:
            self._cell.show(self._table())
        elif self._live is None and self._clock() - self._last_line >= _STILL:
            self._last_line = self._clock()
            self.note(self._under_way())

    def over(self, trial: str) -> None:
        """A trial is done with."""
        if self._share.get(trial) == -1.0:
            return
        self._share[trial] = -1.0  # counts as whole, and is shown once
        self._earlier.setdefault(trial, 0.0)
        row = self._rows[trial]
        if row.status == FAILED:
            self.note(f"{trial} failed: {row.reason}")
        now = self._clock()
        if self._cell is not None:
            self._cell.show(self._table())
        elif self._live is None and (
            self._planned <= _FEW or now - self._last_line >= _EVERY or not self._left()
        ):
            self._last_line = now
            self.note(self._line(row))

    # What it shows ----------------------------------------------------------------------------------------------

    def _left(self) -> int:
        return self._planned - sum(row.status in OVER for row in self._rows.values())

    def time_left(self, group: str | None = None) -> str:
        """How long the rest of the sweep, or of a group, takes at its pace so far; empty before anything is done."""
        members = [name for name, row in self._rows.items() if group is None or row.group == group]
        began = self._began if group is None else self._begun.get(group, self._began)
        unnamed = max(self._planned - len(members), 0) if group is None else 0  # points of a sampler to come
        heard = [name for name in members if name in self._earlier]
        rest = sum(1 - abs(self._share[name]) for name in heard)
        rest += sum(1 - self._shared.get(name, 0.0) for name in members if name not in self._earlier)
        gained = sum(abs(self._share[name]) - self._earlier[name] for name in heard)
        if gained <= 0:
            return ""
        return f"{duration((self._clock() - began) * (rest + unnamed) / gained)} left"

    def group_line(self, group: str) -> tuple[str, str, str]:
        """(how many of a group's trials are over, how much of all their rounds is done, its metrics so far)."""
        members = [row for row in self._rows.values() if row.group == group]
        over = sum(row.status in OVER for row in members)
        done = sum(abs(self._share.get(row.trial, 0.0)) for row in members) / len(members)
        metrics = []
        for name, label in registered().progress().items():
            values = [
                self._metrics[row.trial][name]
                for row in members
                if row.status != FAILED and name in self._metrics.get(row.trial, {})
            ]
            if values:
                metrics.append(f"{label} {mean_and_std(values)}")
        return f"{over}/{len(members)}", f"{math.floor(100 * done)}%", "  ".join(metrics)

    def _line(self, row: Row) -> str:
        seeds, _, metrics = self.group_line(row.group)
        done = sum(each.status in OVER for each in self._rows.values())
        width = len(str(self._planned))
        parts = [f"{done:>{width}}/{self._planned}", row.group, f"({seeds} seeds)", metrics, self.time_left()]
        return "  ".join(part for part in parts if part)

    def _under_way(self) -> str:
        """How far every trial is that runs, and how long all of it takes."""
        done = sum(row.status in OVER for row in self._rows.values())
        running = [
            f"{row.trial} {math.floor(100 * self._share.get(row.trial, 0.0))}%"
            for row in self._rows.values()
            if row.status == RUNNING
        ]
        shown = running[:_SHOWN] + ([f"{len(running) - _SHOWN} more"] if len(running) > _SHOWN else [])
        width = len(str(self._planned))
        parts = [f"{done:>{width}}/{self._planned}", f"running: {', '.join(shown)}", self.time_left()]
        return "  ".join(part for part in parts if part)

    def _table(self) -> RenderableType:
        from rich.table import Table

        done = sum(row.status in OVER for row in self._rows.values())
        table = Table(box=None, pad_edge=False, title=f"{done}/{self._planned} trials  {self.time_left()}")
        table.title_justify = "left"
        for name in ("group", "seeds", "rounds", "so far", ""):
            table.add_column(name, no_wrap=name != "group")
        groups = list(dict.fromkeys(row.group for row in self._rows.values()))
        busy = [g for g in groups if any(r.status == RUNNING for r in self._rows.values() if r.group == g)]
        most = 40  # groups; the rest is counted
        for group in groups if len(groups) <= most else busy[:most]:
            over = all(row.status in OVER for row in self._rows.values() if row.group == group)
            table.add_row(group, *self.group_line(group), "" if over else self.time_left(group))
        if len(groups) > most:
            table.caption = f"and {len(groups) - len(busy[:most])} more groups"
        return table


def last_metrics(address: str) -> dict[str, float]:
    """The metrics of the last evaluation of a run, wherever it is kept; empty if there was none."""
    file = join(address, "metrics.csv")
    for row in reversed(numbers_in(read_text(file) or "", Path(file))):
        if found := {name: float(row[name]) for name in registered().progress() if name in row}:
            return found
    return {}


def mean_and_std(values: list[float]) -> str:
    """`0.9531 ± 0.0101` with ddof 0, as in the report's tables; a single value has no spread.

    >>> mean_and_std([0.25, 0.75]), mean_and_std([0.5])
    ('0.5000 ± 0.2500', '0.5000')
    """
    mean = statistics.fmean(values)
    return f"{mean:.4f} ± {statistics.pstdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"
