"""Ends from outside that leave through `finally`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM (`ray job stop`, a scheduler's time limit) raises SystemExit(143), so that it cleans up as Ctrl-C does.

    Signals reach the main thread alone; in any other nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
