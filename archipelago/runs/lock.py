"""Who writes into a folder: a lock for as long as a process does."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from archipelago.core.errors import UserError


class FolderLock:
    """An exclusive file lock for as long as a process writes into a run; it dies with the process."""

    def __init__(self, folder: Path, shown: str | Path, wait: float = 0.5) -> None:
        flags = (
            os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        )  # it is emptied: never somebody else's file
        self._file = os.fdopen(os.open(folder / ".lock", flags, 0o666), "a+")
        # A reader that looks whether the run is alive holds the lock for microseconds: try for a moment.
        deadline = time.monotonic() + wait
        while not _try_lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "another process"
                self._file.close()
                raise UserError(
                    f"Run {shown} is being written by {holder}; wait until it is done, stop it, or choose "
                    "another name with name=...",
                    code="busy",
                    holder=holder,
                )
            time.sleep(0.02)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._file.flush()

    def release(self) -> None:
        """Let go of it; the file stays, empty."""
        if not self._file.closed:
            self._file.truncate(0)
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def _try_lock(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks (some network folders): nothing to wait for
    return True


def writer_is_gone(folder: Path) -> bool:
    """Whether nobody writes into `folder` any more, as far as its lock file tells.

    A process puts its name into the file and removes it when it ends by itself. Without the file (a copy, an object
    store), or with the name of a process of another machine in it, nothing is known.
    """
    try:
        with (folder / ".lock").open(encoding="utf-8") as file:
            holder = file.read().strip()
            here = not holder or holder.endswith(f" on {os.uname().nodename}")
            return here and _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False
