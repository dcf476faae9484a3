"""Ends from outside that leave through `finally`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class EndedFromOutside(SystemExit):
    """SIGTERM: `ray job stop`, a scheduler's time limit. Not the `SystemExit` that code of a user's may raise."""

    def __str__(self) -> str:
        return f"ended from outside (signal {int(self.code or 128) - 128})"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM (`ray job stop`, a scheduler's time limit) raises `EndedFromOutside`, and cleans up as Ctrl-C does.

    Signals reach the main thread alone; in any other nothing is changed. Compiled code that is interrupted (Ray's) may
    leave by a `SystemExit` of its own: after a SIGTERM that is the same end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = _Terminations.count
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    except SystemExit as error:
        if _Terminations.count > told and not isinstance(error, EndedFromOutside):
            raise EndedFromOutside(128 + signal.SIGTERM) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminations:
    """How many SIGTERM this process was sent."""

    count = 0


def _end(number: int, frame: object) -> None:
    _Terminations.count += 1
    raise EndedFromOutside(128 + number)


class _Interrupts:
    """How often Ctrl-C was pressed, and what to say if it is pressed again."""

    count = 0
    last_words = ""


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt the first time, so that everything is put in order; the second ends it at once.

    Files are written all or nothing, so an end at once loses no more than what was not written yet.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    _Interrupts.count, _Interrupts.last_words = 0, ""
    try:
        yield
    finally:
        if (
            not _Interrupts.count
        ):  # or the interpreter, which still ends threads, would answer with a traceback
            signal.signal(signal.SIGINT, before)


def on_second_interrupt(sentence: str) -> None:
    """What is said if Ctrl-C is pressed again before the process has ended."""
    _Interrupts.last_words = sentence


def _interrupt(number: int, frame: object) -> None:
    _Interrupts.count += 1
    if _Interrupts.count == 1:
        raise KeyboardInterrupt
    words = _Interrupts.last_words or "Stopped at once."
    os.write(2, f"{words}\n".encode())
    os._exit(130)
