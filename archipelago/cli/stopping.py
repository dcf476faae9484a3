"""How a run that came to no end is answered: an exit code, and the command that resumes it."""

from __future__ import annotations

import json
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archipelago.core.errors import RunFailure, UserError
from archipelago.core.program import program


class Stopped(Exception):
    """A run that came to no end, and the exit code that says so; the message is the last line printed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def resumable(address: str) -> Iterator[None]:
    """Whatever stops the run or sweep at `address`, say how to resume it."""
    from archipelago.runs.lease import LeaseLost

    try:
        yield
    except UserError:
        raise
    except RunFailure as error:  # to resume it would give the same
        raise Stopped(1, f"Failed: {error} The run is in {address}.") from error
    except LeaseLost as error:
        after = f"Once that one is done or gone: {how_to_resume(address)}"
        raise Stopped(1, f"Failed: {error} {after}") from error
    except KeyboardInterrupt as stop:
        raise Stopped(130, f"Stopped. {how_to_resume(address)}") from stop
    except SystemExit as stop:  # what actors/cluster.py turns SIGTERM (`ray job stop`) into
        raise Stopped(143, f"Ended from outside. {how_to_resume(address)}") from stop
    except Exception as error:
        if isinstance(getattr(error, "cause", None), UserError):  # a mistake that only an actor could see
            raise error.cause from error  # type: ignore[attr-defined]  # RayTaskError's, seen the line before
        traceback.print_exc()
        raise Stopped(1, f"Failed: {type(error).__name__}. {how_to_resume(address)}") from error


def how_to_resume(address: str) -> str:
    """Where the run or sweep at `address` is, and the command that continues it."""
    from archipelago.runs.status import is_run
    from archipelago.runs.storage import is_address, join, read_text
    from archipelago.runs.sweeps import is_sweep

    swept = is_sweep(address)
    known = (
        read_text(join(address, "status.json")) is not None if is_address(address) else is_run(Path(address))
    )
    if not swept and not known:
        return "Nothing was written."
    if not swept and json.loads(read_text(join(address, "status.json")) or "{}").get("state") == "finished":
        return f"The run is finished, in {address}; its report: {program()} report {shlex.quote(address)}"
    kind = "sweep" if swept else "run"
    return f"The {kind} is in {address}; resume it with: {program()} resume {shlex.quote(address)}"
