"""What went wrong in somebody's code, in one line; and what may go well if it is tried again."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archipelago.core.errors import ClientFailure, RunFailure, UserError
from archipelago.core.signals import EndedFromOutside

# What code of a user's own may raise to end itself: `sys.exit` in a module is a failure of it, and no end of ours.
USERS = (Exception, SystemExit)
_LIBRARIES = [
    *{Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(
        Path(__file__).parents[2] / name
        for name in ("archipelago", "actors", "lightning_modules", "platform")
    ),
]
_TOLD = (UserError, ClientFailure, RunFailure)  # errors whose text is a sentence for people
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def said(error: BaseException) -> str:
    """Kind and text of an error in one line, whatever its text is.

    >>> said(ValueError("two\\nlines")), said(ValueError()), said(SystemExit(3))
    ('ValueError: two lines', 'ValueError', 'it called sys.exit(3)')
    """
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)})"
    try:
        text = " ".join(str(error).split())
    except Exception:  # an error of the user's own, whose text cannot be made
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cause_of(error: BaseException) -> str:
    """`said`, with the place in the file that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}, line {error.lineno})"
    where = where_in_users_code(error)
    if not where and (frames := traceback.extract_tb(error.__traceback__)):
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return said(error) + where


def where_in_users_code(error: BaseException) -> str:
    """The last place in a file that is neither a library's nor the platform's, as ` (file, line N)`; or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        of_library = "site-packages" in path.parts or any(path.is_relative_to(each) for each in _LIBRARIES)
        if path.is_file() and not of_library:
            return f" ({path.name}, line {frame.lineno})"
    return ""


def sentence_of(error: BaseException) -> str:
    """Why a run came to no end, in one line: what `status.json` and the last line on the terminal say."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by the user"
    if full := no_space(error):
        return f"no space is left on the disk{f' for {full.filename}' if full.filename else ''}"
    told: BaseException | None = next((each for each in _raised(error) if isinstance(each, _TOLD)), None)
    if told is None and isinstance(getattr(error, "cause", None), Exception):  # Ray's, of an actor
        return sentence_of(error.cause)  # type: ignore[attr-defined]  # seen the line before
    if told is None and out_of_memory(error):
        return f"memory ran out ({said(error)})"
    if told is None and not isinstance(error, EndedFromOutside) and _is_own(error):
        told = error
    if told is None:
        return str(error) if isinstance(error, EndedFromOutside) else _first_line(error)
    lines = str(told).strip().splitlines()
    return lines[0] if lines else type(told).__name__


def _first_line(error: BaseException) -> str:
    """`cause_of` without the lines after the first, which are mostly a trace from elsewhere."""
    whole, place = said(error), cause_of(error)[len(said(error)) :]
    lines = str(error).strip().splitlines() if whole != type(error).__name__ else []
    return f"{type(error).__name__}: {lines[0].strip()}{place}" if len(lines) > 1 else whole + place


def may_pass(error: BaseException) -> bool:
    """Whether the same run may come to its end if it is tried again: what it met was outside of it."""
    if no_space(error) is not None or out_of_memory(error):
        return True
    if any(isinstance(each, _TOLD) for each in _raised(error)):
        return False
    passing = (OSError, EndedFromOutside, KeyboardInterrupt)
    return isinstance(error, passing) or type(error).__name__ == "ActorsLost" or _of_ray(error)


def _is_own(error: BaseException) -> bool:
    """Whether the platform raised it, with a text for people."""
    return type(error).__module__.partition(".")[0] in ("archipelago", "actors", "lightning_modules")


def _of_ray(error: BaseException) -> bool:
    """Whether Ray says it of itself, and not of code that ran in an actor."""
    return type(error).__module__.partition(".")[0] == "ray" and getattr(error, "cause", None) is None


def refuse_end(error: BaseException) -> None:
    """Raise again what is no failure of a user's code: an end from outside is a `SystemExit` too."""
    if isinstance(error, EndedFromOutside):
        raise error


@contextmanager
def exits_are_failures(what: str) -> Iterator[None]:
    """Code of a user's own that calls `sys.exit` fails; it ends neither this process nor, in silence, an actor."""
    try:
        yield
    except SystemExit as error:
        refuse_end(error)
        raise RunFailure(f"The code of {what} ended the run: {cause_of(error)}.") from error


def behind(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from, Ray's `cause` among them."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [getattr(each, "cause", None), each.__cause__, each.__context__]


def _raised(error: BaseException) -> Iterator[BaseException]:
    """An error, and what Ray wrapped in it: not what it was raised in answer to."""
    found: BaseException | None = error
    while isinstance(found, BaseException):
        yield found
        found = getattr(found, "cause", None)


def no_space(error: BaseException) -> OSError | None:
    """The error that says that the disk, or the user's share of it, is full; None if none does."""
    found = (each for each in behind(error) if isinstance(each, OSError) and each.errno in _FULL)
    return next(found, None)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, as Python, NumPy or torch say it."""
    return any(
        isinstance(each, MemoryError)
        or (
            isinstance(each, RuntimeError)
            and ("can't allocate memory" in str(each) or "out of memory" in str(each))
        )
        for each in behind(error)
    )
