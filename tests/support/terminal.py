"""A shell in a terminal of its own, to type into."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START = "__typed__"
SECONDS = 60.0


def typed_line(shell: Sequence[str], line: str, folder: Path, env: Mapping[str, str]) -> str:
    """What stands in the command line of an interactive shell after these keys, TAB among them."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(shell[0], list(shell), dict(env))
    try:
        _read(terminal, quiet=1.0)
        for part in re.split(r"(?<=\t)", line):
            os.write(terminal, part.encode())
            _read(terminal, quiet=3.0 if part.endswith("\t") else 0.3)
        # The line is printed rather than executed: Ctrl-A goes to its beginning, Ctrl-E to its end.
        os.write(terminal, f"\x01printf '%s\\n' '{START}[\x05]'\r".encode())
        printed = rf"(?<!'){START}\[(.*)\]\r?\n"  # what is typed has a quote in front
        shown = _read(terminal, until=printed)
        found = re.findall(printed, shown)
        assert found, shown
        return str(found[-1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def _read(terminal: int, quiet: float = SECONDS, until: str = "") -> str:
    """What is shown until nothing came for `quiet` seconds, or until a line matches."""
    text, last, end = "", time.monotonic(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if ready:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the shell has ended
                break
            last = time.monotonic()
            if until and re.search(until, text):
                break
        elif time.monotonic() - last > quiet:
            break
    return text
