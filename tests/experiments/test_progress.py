"""The display of a run: few plain lines in a log, a live one on a terminal."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pty
import re
from typing import Any

import pytest

from actors.reports import RoundReport
from archipelago.experiments.progress import Progress


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_of(rounds: int, seconds: float, *, first_round: int = 0, **changes: Any) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Progress(rounds, first_round, "ifca on digits", stream=stream, clock=clock, **changes) as progress:
        for number in range(first_round + 1, rounds + 1):
            clock.now += seconds
            progress.update(RoundReport(number, {"micro_accuracy": number / rounds}))
    text = stream.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text), "a log holds no control characters"
    return text.splitlines()


def shown_rounds(lines: list[str]) -> list[int]:
    return [int(found.group(1)) for line in lines if (found := re.match(r"round +(\d+)/", line))]


def test_short_run_shows_every_round() -> None:
    lines = log_of(8, 0.01)
    assert lines[0] == "ifca on digits: 8 rounds"
    assert shown_rounds(lines) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lines[2] == "round 2/8  accuracy 0.2500  0.01 s/round  0 s left"
    assert lines[-1] == "round 8/8  accuracy 1.0000  0.01 s/round"


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 32), (0.5, 110), (30.0, 620)])
def test_thousand_rounds_stay_readable(seconds: float, most: int) -> None:
    rounds = shown_rounds(log_of(1000, seconds))
    assert 25 <= len(rounds) <= most
    assert rounds[:3] == [1, 2, 3]
    assert rounds[-1] == 1000
    # Never silent for more than a twentieth of the rounds, nor for much more than a minute.
    gaps = [after - before for before, after in itertools.pairwise(rounds)]
    assert max(gaps) <= 50
    assert max(gaps) * seconds <= 60 + seconds


def test_resumed_run_starts_where_it_left_off() -> None:
    lines = log_of(100, 2.0, first_round=90)
    assert lines[0] == "ifca on digits: 100 rounds, from round 91"
    assert shown_rounds(lines)[0] == 91
    assert "18 s left" in lines[1]


def test_time_left_is_not_moved_by_one_slow_round() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(110, stream=stream, clock=clock) as progress:
        for number in range(1, 11):
            clock.now += 300 if number == 7 else 2
            progress.update(RoundReport(number))
    assert progress.time_left(10) == "3:20 left"


def test_starting_the_actors_is_not_taken_for_a_round() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(10, stream=stream, clock=clock) as progress:
        clock.now += 40
        progress.update(RoundReport(1, timings={"round": 1.0}))
    assert progress.time_left(1) == "9 s left"


def test_columns_events_and_the_last_known_evaluation() -> None:
    stream, clock = io.StringIO(), Clock()
    metrics = {"micro_accuracy": 0.5, "micro_macro_f1": 0.25, "cluster_sizes": [3, 0, 2], "ari": 1.0, "x": 3}
    with Progress(3, title="x", stream=stream, clock=clock) as progress:
        progress.note("5 clients on\x1b[31m 2 actors")
        progress.update(RoundReport(1, metrics))
        sizes = {"cluster_sizes": list(range(12)), "ari": None}
        progress.update(RoundReport(2, sizes, events=["Client 3 left."]))
        progress.update(RoundReport(3, {"micro_mse": 12345.678}))
    lines = stream.getvalue().splitlines()
    assert lines[1] == "5 clients on [31m 2 actors"
    assert "accuracy 0.5000  macro-F1 0.2500  clusters 3/0/2  ARI 1.0000" in lines[2]
    assert lines[3] == "round 2: Client 3 left."
    assert "accuracy 0.5000" in lines[4]
    assert "clusters 0/1/2/3/4/5/6/7/8/9/... (12)" in lines[4]
    assert "mse 1.235e+04" in lines[5]


def test_rounds_that_are_run_again_are_shown_again() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(1000, stream=stream, clock=clock) as progress:
        for number in [*range(1, 31), 21, 22]:
            progress.update(RoundReport(number))
    assert shown_rounds(stream.getvalue().splitlines())[-1] == 21


def test_quiet_shows_nothing() -> None:
    stream = io.StringIO()
    with Progress(2, title="x", quiet=True, stream=stream) as progress:
        progress.note("hello")
        progress.update(RoundReport(1, events=["something"]))
    assert stream.getvalue() == ""


def _on_a_terminal(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "80")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream, Progress(4, title="ifca [on] digits", stream=stream) as progress:
        for number in range(1, 5):
            events = ["Client 3 left."] if number == 2 else []
            progress.update(RoundReport(number, {"micro_accuracy": number / 8}, events=events))
    return _everything(reader)


def _everything(reader: int) -> str:
    """All that was written to a terminal whose other end is closed (which Linux reports as an error)."""
    data = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(reader, 1 << 16):
            data += chunk
    os.close(reader)
    return data.decode()


def test_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _on_a_terminal("xterm-256color", monkeypatch)
    assert "\x1b[" in text
    assert "ifca [on] digits" in text
    assert "round 2: Client 3 left." in text
    assert "4/4" in text
    assert "accuracy 0.5000" in text
    assert "\x1b[?25h" in text, "the cursor is given back"


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _on_a_terminal("dumb", monkeypatch)
    assert "\x1b" not in text
    assert "round 4/4  accuracy 0.5000" in text
