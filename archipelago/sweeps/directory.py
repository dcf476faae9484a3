"""The directory of a sweep: `sweep.yaml`, `trials.csv` and one run directory for each trial under `runs/`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from archipelago.core.errors import UserError
from archipelago.core.own_files import refuse_link
from archipelago.core.program import program
from archipelago.experiments.given import code_of
from archipelago.runs.format import DOCUMENT, TRIALS
from archipelago.runs.lease import Lease
from archipelago.runs.lock import FolderLock
from archipelago.runs.storage import is_address, join, read_text, remove_file
from archipelago.runs.sweep_identity import FILE as IDENTITY
from archipelago.runs.sweep_identity import check_sweep_identity, is_identity
from archipelago.runs.sweeps import (
    WAITING,
    Row,
    identity_of_sweep,
    is_begun,
    is_sweep,
    read_rows,
    read_sweep,
    write_rows,
    write_sweep,
)
from archipelago.runs.trust import remember
from archipelago.sweeps.config import Sweep, Trial, sweep_from


def sweep_address(sweep: Sweep) -> str:
    """Where a new sweep goes: `storage/name`, with a made-up name if none was given."""
    name = sweep.base.name or f"sweep-{sweep.base.data.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return absolute(join(sweep.base.storage, name))


def absolute(address: str) -> str:
    """The same address for a process in another folder or on another node."""
    return address if is_address(address) else str(Path(address).expanduser().resolve())


def _is_begun(path: Path) -> bool:
    """Whether `trials.csv` and `identity.json`, if they are there, are those of a sweep."""
    return is_begun(path) and is_identity(read_text(str(path / IDENTITY)))


def _refuse_sweep(address: str) -> None:
    if is_sweep(address):
        raise UserError(
            f"Sweep {address} exists already; resume it with `{program()} resume {address}`, or "
            "choose another name with name=...",
            code="exists",
            path=address,
        )


def _lock(address: str) -> FolderLock | Lease:
    return Lease(address) if is_address(address) else FolderLock(Path(address), address)


class SweepDirectory:
    """A sweep's directory that this process writes; `create` and `open` lock it, or take its lease at an address."""

    def __init__(self, address: str, sweep: Sweep, rows: list[Row], lock: FolderLock | Lease) -> None:
        """For `create` and `open` only."""
        self.address, self.sweep = address, sweep
        self.rows = {row.trial: row for row in rows}
        self._lock = lock

    @classmethod
    def create(cls, address: str, sweep: Sweep) -> SweepDirectory:
        """A new sweep; anything that already lives under that name is a `UserError`."""
        _refuse_sweep(address)
        if not is_address(address):
            path = Path(address)
            # A kill in the middle of this leaves these, which hold nothing.
            begun = {TRIALS, IDENTITY, ".lock"}
            others = path.is_dir() and ({each.name for each in path.iterdir()} - begun or not _is_begun(path))
            if path.exists() and (not path.is_dir() or others):
                raise UserError(
                    f"{address} is taken by something that is no sweep; choose another with name=...",
                    code="exists",
                    path=address,
                )
            path.mkdir(parents=True, exist_ok=True)
        made = cls(address, sweep, [], _lock(address))
        try:
            _refuse_sweep(address)  # another process was faster
            made.add(sweep.trials(), write=False)
            made.write()
            declares = {"population": sweep.scheduler.exchanges}
            document = write_sweep(address, {**sweep.document, "declares": declares})
            remember(identity_of_sweep(document), code_of(document))
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open(cls, address: str) -> SweepDirectory:
        """A sweep that an earlier process created."""
        content = read_sweep(address)
        check_sweep_identity(address)
        if not is_address(address):
            runs = [row.run for row in read_rows(address) if row.run]
            for name in (".lock", ".tune", "report", "runs", *runs):
                refuse_link(Path(address) / name)
        lock = _lock(address)
        try:
            return cls(address, sweep_from(content, DOCUMENT), read_rows(address), lock)
        except BaseException:
            lock.release()
            raise

    def add(self, trials: list[Trial], *, write: bool = True) -> None:
        """Trials that were not known before."""
        for trial in trials:
            self.rows.setdefault(trial.name, Row(trial.name, trial.group, trial.seed))
        if write:
            self.write()

    def set(self, trial: str, status: str, reason: str = "") -> None:
        """A trial's status, on disk at once."""
        row = self.rows[trial]
        run = row.run if status == WAITING else f"runs/{trial}"
        if (row.status, row.reason, row.run) != (status, reason, run):
            row.status, row.reason, row.run = status, reason, run
            self.write()

    def run_address(self, trial: str) -> str:
        """Where a trial's run directory is."""
        return join(self.address, "runs", trial)

    def write(self) -> None:
        """Write `trials.csv`, all or nothing; raises `LeaseLost` where another process writes it."""
        self.hold()
        write_rows(self.address, self.rows.values())

    def hold(self) -> None:
        """Raise `LeaseLost` where another process writes this sweep by now."""
        if isinstance(self._lock, Lease):
            self._lock.hold()

    def discard(self) -> None:
        """Remove a sweep of which no trial has begun, so that its name is free again."""
        if not any(row.run for row in self.rows.values()):
            for name in (DOCUMENT, TRIALS, IDENTITY, ".lock"):
                remove_file(join(self.address, name))
        self.close()
        if not is_address(self.address):
            with contextlib.suppress(OSError):  # something else is in it
                Path(self.address).rmdir()

    def close(self) -> None:
        """Let go of the lock, or of the lease."""
        self._lock.release()
