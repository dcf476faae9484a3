"""How a run that came to no end is answered: an exit code, the reason, and how to resume it if that helps."""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from archipelago.core.causes import behind, may_pass, sentence_of
from archipelago.core.errors import RunFailure, UserError
from archipelago.core.program import program
from archipelago.core.signals import EndedFromOutside, ended_in_order, on_second_interrupt


class Stopped(Exception):
    """A run that came to no end, and the exit code that says so; the message is the last line printed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def resumable(address: str) -> Iterator[None]:
    """Whatever stops the run or sweep at `address`, say why, and how to resume it where that helps."""
    resume = f"resume it with: {program()} resume {shlex.quote(address)}"
    on_second_interrupt(f"Stopped at once. If the run is in {address}, {resume}")
    try:
        with ended_in_order():
            yield
    except UserError:
        raise
    except KeyboardInterrupt as stop:
        raise Stopped(130, f"Stopped. {how_to_resume(address)}") from stop
    except EndedFromOutside as stop:  # `ray job stop`, a time limit
        raise Stopped(143, f"Ended from outside. {how_to_resume(address)}") from stop
    except (Exception, SystemExit) as error:
        mistake = getattr(error, "cause", None)
        if isinstance(mistake, UserError):  # one that only an actor could see
            raise mistake from error
        raise Stopped(1, _failed(error, address)) from error


def _failed(error: BaseException, address: str) -> str:
    """The last line about a run that failed: the sentence of its `status.json`, and what to do."""
    from archipelago.runs.lease import LeaseLost

    sentence = sentence_of(error)
    sentence = sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
    if any(isinstance(each, LeaseLost) for each in behind(error)):
        return f"Failed: {sentence} Once that one is done or gone: {how_to_resume(address)}"
    if may_pass(error):
        return f"Failed: {sentence} Once that is mended: {how_to_resume(address)}"
    return f"Failed: {sentence} {_where(error, address)}"


def _where(error: BaseException, address: str) -> str:
    """Where a run is that would fail again, and where its traceback."""
    from archipelago.runs.directory import TRACEBACK
    from archipelago.runs.storage import is_address

    if any(isinstance(each, RunFailure) for each in behind(error)):
        return how_to_find(address)  # nothing is wrong with any code
    if is_address(address):
        return f"The run is in {address}, its traceback in {TRACEBACK} there."
    if (Path(address) / TRACEBACK).is_file():
        return f"The run is in {address}, its traceback in {Path(address) / TRACEBACK}."
    kept = _kept_traceback(error)
    return f"{how_to_find(address)} The traceback is in {kept}." if kept else how_to_find(address)


def _kept_traceback(error: BaseException) -> Path | None:
    """A file of this user's own with the traceback of an error that no run has."""
    from archipelago.runs.storage import private_folder

    with suppress(OSError, UserError):
        path = private_folder() / f"traceback-{os.getpid()}.txt"
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        return path
    return None


def how_to_find(address: str) -> str:
    """Where the run or sweep at `address` is."""
    kind = _kind(address)
    return f"The {kind} is in {address}." if kind else "Nothing was written."


def _kind(address: str) -> str:
    """run or sweep; empty where neither is."""
    from archipelago.runs.status import is_run_at
    from archipelago.runs.sweeps import is_sweep

    if is_sweep(address):
        return "sweep"
    return "run" if is_run_at(address) else ""


def how_to_resume(address: str) -> str:
    """Where the run or sweep at `address` is, and the command that continues it."""
    from archipelago.runs.status import state_at

    kind = _kind(address)
    if not kind:
        return "Nothing was written."
    if kind == "run" and state_at(address) == "finished":
        return f"The run is finished, in {address}; its report: {program()} report {shlex.quote(address)}"
    return f"The {kind} is in {address}; resume it with: {program()} resume {shlex.quote(address)}"
