"""The right to write at an address in an object store: held by one process at a time, and gone soon after it is.

A lease is a small JSON object beside the files: who holds it, and until when. Its holder renews it in the background;
others may take it once it has expired, or at once if its holder was a process of this machine that is gone. Where
nobody has one it is created, which files, S3 and stores that fsspec opens grant to one process alone; on S3 it is
replaced only as long as it is the one that was read (`conditional.py`). For stores without conditions, whoever takes
it writes it, waits for a moment, and reads back whether it is still its own (DECISIONS.md, C3).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from archipelago.core.errors import UserError
from archipelago.runs.conditional import create_text, replace_text, version_of
from archipelago.runs.storage import LEASE, join, read_text, remove_file, write_text

SECONDS = 60.0  # how long a lease is good for; clocks of nodes must agree to a fraction of it
RENEWAL = 15.0  # how often it is renewed
TRIES = 50  # that others may be faster
SETTLE = 1.0  # between writing one and reading back whether somebody else wrote one in the same moment


class LeaseLost(RuntimeError):
    """Another process writes what this one was writing; what it had sent before stays, and it sends nothing more."""


class Lease:
    """The right to write at `address` until `release`; a `UserError` if others still have it after `wait` seconds."""

    def __init__(self, address: str, wait: float = 0.0) -> None:
        self._address, self._object = address, join(address, LEASE)
        self._id = uuid.uuid4().hex
        self._until = 0.0
        self._version = ""  # of what was read last
        self._taken_by: str | None = None
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        try:
            self._acquire(wait)
        except BaseException as error:
            self._remove()
            if isinstance(error, OSError):
                text = " ".join(str(error).split())
                raise UserError(
                    f"Expected storage that can be written, got '{address}': {text}.",
                    code="unwritable", path=address,
                ) from error  # fmt: skip
            raise
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LeaseLost` if it is known that another process has it; asks nobody."""
        if self._taken_by is not None:
            raise LeaseLost(
                f"{self._address} is written by {self._taken_by} now: this process was out of reach for more than "
                f"{SECONDS:.0f} seconds, and has stopped writing there."
            )

    def hold(self) -> None:
        """Make sure that it is still held before something is written: renews it if it has expired."""
        self.check()
        if time.time() > self._until:
            self.renew()

    def renew(self) -> None:
        """Hold it for another while, or raise `LeaseLost`."""
        with self._mutex:
            self.check()
            if self._stop.is_set():
                return
            found = self._read()
            if found is None or self._is_ours(found):
                began, late = time.monotonic(), found is None or time.time() > self._until
                if not self._put(found):
                    found = self._read()  # taken between our look and our write
                elif late:
                    found = self._settled(began)  # others may be taking it in this moment
            if not self._is_ours(found):
                self._taken_by = _who(found or {})
            self.check()

    def release(self) -> None:
        """Let go of it; never raises: what cannot be removed now expires."""
        self._stop.set()
        self._thread.join()
        self._remove()

    def _acquire(self, wait: float) -> None:
        deadline = time.monotonic() + wait
        said, tries = False, 0
        while True:
            found = self._read()
            if found is None or self._is_ours(found) or not _is_alive(found):
                began = time.monotonic()
                if self._put(found) and self._is_ours(self._settled(began)):
                    return
                tries += 1  # somebody else was faster
                if tries > TRIES:
                    raise OSError(f"{LEASE} cannot be written, though nobody holds it")
                continue
            left = max(float(found["expires"]) - time.time(), 1.0)
            if time.monotonic() > deadline:
                raise UserError(
                    f"Expected nobody else to write {self._address}, got {_who(found)}, which holds it for {left:.0f} "
                    "more seconds and may renew that: wait until it is done or gone, stop it, or choose another name "
                    "with name=...",
                    code="busy",
                    holder=_who(found),
                )
            if not said:
                print(f"Waiting until {_who(found)} is done with {self._address}, or gone.", file=sys.stderr)
                said = True
            time.sleep(min(left, 1.0))

    def _settled(self, began: float) -> dict[str, Any] | None:
        """What is there a moment after this process wrote its own, which it began to do then."""
        # Somebody may have taken it between our look and a slow write: it gets the time to see ours, and to stop.
        slow = time.monotonic() - began > SETTLE
        time.sleep(RENEWAL + SETTLE if slow else SETTLE)
        return self._read()

    def _put(self, found: dict[str, Any] | None) -> bool:
        """Write ours in place of what was read; False if that is not there any more, where the store can say so."""
        until, text = self._content()
        put = (
            create_text(self._object, text)
            if found is None
            else replace_text(self._object, text, self._version)
        )
        if put is None:
            write_text(self._object, text)
        if put is not False:
            self._until = until
        return put is not False

    def _content(self) -> tuple[float, str]:
        until = time.time() + SECONDS
        return until, json.dumps({"id": self._id, "expires": until, **_this_process()}) + "\n"

    def _read(self) -> dict[str, Any] | None:
        """What is there: None for nothing, and {} for what cannot be read, which is nobody's."""
        try:
            self._version = version_of(self._object)
            text = read_text(self._object)
        except UserError as error:  # a store out of reach is no mistake of somebody whose run is under way
            raise OSError(str(error)) from error
        if text is None:
            return None
        try:
            content = json.loads(text)
            return content if isinstance(content, dict) and float(content["expires"]) > 0 else {}
        except (ValueError, KeyError, TypeError):
            return {}

    def _is_ours(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found.get("id") == self._id

    def _remove(self) -> None:
        with contextlib.suppress(Exception), self._mutex:  # whatever the store raises: it expires
            if self._is_ours(self._read()):
                remove_file(self._object)

    def _keep(self) -> None:
        while not self._stop.wait(RENEWAL):
            try:
                self.renew()
            except LeaseLost:
                return
            except Exception:  # of the store: the next one may come through, and `hold` looks before a write
                continue


def _who(found: dict[str, Any]) -> str:
    return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


def _is_alive(found: dict[str, Any]) -> bool:
    """Whether the holder of a lease may still be writing."""
    if not found or float(found["expires"]) < time.time():
        return False
    if found.get("where") != _where():
        return True
    try:
        process = psutil.Process(int(found["pid"]))
        started = (
            abs(process.create_time() - float(found["started"])) < 2.0
        )  # or it has the number of the holder
        return started and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError, ValueError):
        return False


def _this_process() -> dict[str, Any]:
    return {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "where": _where(),
    }


def _where() -> str:
    """What processes have in common whose ids are of one numbering: a boot of a machine, and a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.uname().nodename} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return os.uname().nodename
