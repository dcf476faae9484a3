"""What a run shows while it runs: a live line on a terminal or in a notebook, plain lines in a log."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from archipelago.core.notebooks import CellOutput, in_notebook
from archipelago.core.vocabulary import registered

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from actors.reports import RoundReport

_EVERY_ROUND = 10  # the first rounds are all shown in a log
_SHARE = 0.05  # then one line for every twentieth of the rounds ...
_QUIET = (5.0, 60.0)  # ... or after this many seconds without one: at first, and in a long job
_RECENT = 15  # rounds that the time left is worked out from


class Progress:
    """A context manager with `update(report)` and `note(text)`; decides by itself how to show them.

    `first_round` is the number of rounds that were done before (a resume starts there). A stream that is no
    terminal gets plain lines without control characters, few enough for a job of a thousand rounds. `quiet`
    shows nothing at all. `clock` and `stream` are arguments for the sake of tests.
    """

    def __init__(
        self,
        rounds: int,
        first_round: int = 0,
        title: str = "",
        *,
        columns: Mapping[str, str] | None = None,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rounds, self.first_round, self.title = rounds, first_round, title
        self._columns = dict(shown_columns() if columns is None else columns)
        self._quiet = quiet
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._shown: dict[str, Any] = {}  # the last known value of every column: not every round evaluates
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._live: RichProgress | None = None
        self._cell: CellOutput | None = None  # of a notebook, which shows what `_live` has
        self._started = self._last_update = self._last_line = clock()
        self._last_line_round = self._last_round = first_round
        self._lines = 0

    def __enter__(self) -> Progress:
        self._started = self._last_update = self._last_line = self._clock()
        if self._quiet:
            return self
        if in_notebook(self._stream):
            self._cell = CellOutput()
        if self._cell is not None or is_terminal(self._stream):
            self._live = _live_display(self._stream)
            self._live.add_task("", total=self.rounds, completed=self.first_round, metrics="", left="")
            if self._cell is None:
                self._live.start()
            self.note(self.title)
        elif self.title:
            resumed = f", from round {self.first_round + 1}" if self.first_round else ""
            self._print(f"{self.title}: {self.rounds} rounds{resumed}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None and self._cell is not None:
            self._cell.show(self._live.get_renderable(), last=True)
        elif self._live is not None:
            self._live.stop()
        self._live = None

    def update(self, report: RoundReport) -> None:
        """Show a finished round, and its events."""
        now = self._clock()
        seconds = now - self._last_update
        if not self._durations:  # actors start in this time: it says nothing about the rounds to come
            seconds = min(seconds, report.timings.get("round", seconds))
        self._durations.append(seconds)
        self._last_update = now
        for name in self._columns:
            if report.metrics.get(name) is not None:
                self._shown[name] = report.metrics[name]
        if self._quiet:
            return
        for event in report.events:
            self.note(f"round {report.round}: {event}")
        if self._live is not None:
            task = self._live.tasks[0].id
            left = self.time_left(report.round)
            self._live.update(task, completed=report.round, metrics=self._metrics("  "), left=left)
            if self._cell is not None:
                self._cell.show(self._live.get_renderable())
        elif self._is_due(report.round, now):
            self._last_line, self._last_line_round = now, report.round
            self._lines += 1
            self._print(self._line(report.round))
        self._last_round = report.round

    def note(self, text: str) -> None:
        """Show a sentence among the rounds."""
        if self._quiet:
            return
        text = "".join(c if c.isprintable() else " " for c in text)
        if self._live is not None and self._cell is None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def time_left(self, round: int) -> str:
        """How long the rounds after `round` will take, from the median of the recent ones.

        The median because one slow round (a checkpoint, a lost actor) says nothing about the next.
        """
        if not self._durations:
            return ""
        return f"{duration(statistics.median(self._durations) * max(self.rounds - round, 0))} left"

    def _is_due(self, round: int, now: float) -> bool:
        again = round <= self._last_round  # actors were lost, and rounds are run again
        if self._lines < _EVERY_ROUND or round >= self.rounds or again:
            return True
        # A log that was followed for an hour needs fewer lines than one of a minute.
        silence = min(max(_QUIET[0], (now - self._started) / 50), _QUIET[1])
        return round - self._last_line_round >= _SHARE * self.rounds or now - self._last_line >= silence

    def _line(self, round: int) -> str:
        width = len(str(self.rounds))
        parts = [f"round {round:>{width}}/{self.rounds}", self._metrics("  ")]
        seconds = statistics.median(self._durations)
        parts.append(f"{seconds:.2g} s/round" if seconds < 10 else f"{seconds:.0f} s/round")
        if round < self.rounds:
            parts.append(self.time_left(round))
        return "  ".join(part for part in parts if part)

    def _metrics(self, separator: str) -> str:
        known = [(label, self._shown[name]) for name, label in self._columns.items() if name in self._shown]
        return separator.join(f"{label} {_number(value)}" for label, value in known)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def shown_columns() -> dict[str, str]:
    """{column: label} of what is shown of a round's metrics, in this order, where it exists."""
    known = registered()
    return {**known.progress(), "cluster_sizes": "clusters", **known.progress(over="clusters")}


def duration(seconds: float) -> str:
    """A span of time for people.

    >>> duration(7.4), duration(75), duration(3 * 3600 + 125), duration(50 * 3600)
    ('7 s', '1:15', '3:02:05', '2 d 2:00:00')
    """
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{days} d {clock}" if days else clock


def _number(value: Any) -> str:
    if isinstance(value, list):
        shown = [str(item) for item in value[:10]]
        return "/".join(shown) + (f"/... ({len(value)})" if len(value) > 10 else "")
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _live_display(stream: TextIO) -> RichProgress:
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    class Display(Progress):
        """The bar, and under it the metrics, which would not fit beside it in a narrow window."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                yield Text(task.fields["metrics"], style="cyan", no_wrap=True, overflow="ellipsis")

    return Display(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=40),
        TextColumn("{task.fields[left]}", markup=False),
        console=Console(file=stream),
        refresh_per_second=8,
    )
