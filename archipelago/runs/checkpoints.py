"""Checkpoints: all or nothing, written in the background, and the newest good one found again.

`checkpoints/round-000010/` holds one checksummed file per named part of the state and a manifest. It is
built under another name, made durable, and renamed; only then are older ones removed.

The states of clients are shards (`clients-00003.safetensors`, one for each block of clients), which the processes
that hold them write and read themselves where they see the folder. The manifest, written last, has the clients, the
length and the checksum of each. A client's state can be read, and checked, without the others of its shard.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from archipelago.core.errors import UserError
from archipelago.core.files import sync_folder, write_whole
from archipelago.core.own_files import CHECKPOINT, UNFINISHED_CHECKPOINT, remove_own_files
from archipelago.runs.identity import identity_of
from archipelago.runs.trees import (
    DamagedFile,
    read_checksum,
    read_entries,
    read_keys,
    read_tree,
    write_entries,
    write_tree,
)

if TYPE_CHECKING:
    from archipelago.runs.directory import RunDirectory

MANIFEST = "manifest.json"

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHARD = re.compile(r"clients(-\d+)?")


@dataclass(frozen=True)
class ShardFacts:
    """What a manifest says about a shard."""

    clients: list[int]
    bytes: int
    checksum: str


class Shard(Protocol):
    """A part of a checkpoint that knows how to write itself: the states of some clients."""

    def begin(self, path: Path) -> None:
        """Start to write the file, if somebody else does it; returns at once."""

    def finish(self, path: Path) -> ShardFacts:
        """Returns when the file is there, complete and durable."""

    def __call__(self) -> dict[int, Any]:
        """The states themselves."""


def write_shard(path: Path, states: Mapping[int, Any]) -> ShardFacts:
    """Write the states of some clients; atomic."""
    checksum = write_entries(path, states)
    return ShardFacts([int(client) for client in states], path.stat().st_size, checksum)


class StoredParts(Mapping[str, Any]):
    """The named parts of a checkpoint on disk, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """A `DamagedFile` if the manifest cannot be read."""
        self.path = path
        try:
            self.manifest = (path / MANIFEST).read_text(encoding="utf-8")
            found = json.loads(self.manifest)
            self._names = [str(name) for name in found["parts"]]
            self.identity: str | None = found.get("identity")
            self.round, self.tables = int(found["round"]), dict(found.get("tables") or {})
            shards = {name: ShardFacts(**facts) for name, facts in found.get("shards", {}).items()}
            self._checksums = dict(found.get("checksums") or {})  # of the others; empty of an earlier version
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(
                f"Checkpoint {path} is damaged: its manifest cannot be read ({error})."
            ) from error
        self._listed = shards
        self._read: dict[str, Any] = {}  # what is no client's, and is asked for more than once
        self._clients: dict[str, list[int]] = {name: facts.clients for name, facts in shards.items()}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if _SHARD.fullmatch(name):
            return read_tree(self._file(name))
        if name not in self._read:
            self._read[name] = read_tree(self._file(name))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def check(self, deep: bool) -> None:
        """A `DamagedFile` if something is missing or damaged; whether all bits are right, only if `deep`.

        Never holds more than one part, or one client's state, at a time.
        """
        for name in self._names:
            file, facts = self._file(name), self._listed.get(name)
            if not _SHARD.fullmatch(name):
                if self._checksums.get(name) not in (None, read_checksum(file)):
                    raise _other_file(file)
                self[name]
                continue
            clients, checksum = read_keys(file)
            if facts is None:  # a checkpoint of an earlier version: its manifest does not say who is where
                self._clients[name] = clients
                if deep:
                    self[name]
                continue
            if file.stat().st_size != facts.bytes or checksum != facts.checksum:
                raise _other_file(file)
            for client in facts.clients if deep else ():
                read_entries(file, [client])

    def shards_of(self, clients: Iterable[int]) -> dict[str, list[int]]:
        """{shard: those of the clients whose state it holds}; shards without any are left out."""
        wanted = set(clients)
        found = {name: [c for c in held if c in wanted] for name, held in self._clients.items()}
        return {name: some for name, some in found.items() if some}

    def states(self, clients: Iterable[int]) -> dict[int, Any]:
        """The states of some clients."""
        return read_states(self.path, self.shards_of(clients))


def _other_file(file: Path) -> DamagedFile:
    return DamagedFile(f"{file} is damaged: it is not the file that the manifest names.")


def read_states(checkpoint: Path, shards: Mapping[str, list[int]]) -> dict[int, Any]:
    """The states of some clients, by the shards they are in; a `DamagedFile` if one is missing or damaged."""
    states: dict[int, Any] = {}
    for name, clients in shards.items():
        file = checkpoint / f"{name}.safetensors"
        found = read_entries(file, clients)
        if missing := [client for client in clients if client not in found]:
            raise DamagedFile(f"{file} is damaged: it lacks client {missing[0]}.")
        states |= found
    return states


class CheckpointWriter:
    """Writes checkpoints of a run in a background thread, one at a time, and keeps the newest `keep`.

    The round `fork` gets one in any case, and keeps it: another run begins there (`sweeps/shared_prefix.py`).
    What goes wrong in the thread is raised by the next `submit` or by `close`.
    """

    def __init__(
        self,
        run: RunDirectory | str | Path,
        every: int,
        keep: int,
        minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        fork: int | None = None,
    ) -> None:
        self._folder = _folder(run)
        self._fork = fork
        self._every, self._seconds, self._clock = every, 60.0 * minutes, clock
        self._last = clock()
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._folder.mkdir(exist_ok=True)
        remove_unfinished_checkpoints(self._folder.parent)

    def due(self, round: int) -> bool:
        """Whether the settings ask for a checkpoint after this round."""
        old = self._seconds > 0 and self._clock() - self._last >= self._seconds
        return round % self._every == 0 or old or round == self._fork

    def submit(
        self,
        round: int,
        parts: Mapping[str, Any | Callable[[], Any] | Shard],
        tables: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint of `round` in the background; waits only if the one before is still on its way.

        A part is a tree, a function that returns one and is called in the background, or a `Shard`. What they refer
        to must not change afterwards: state values are replaced from round to round, never written to. `tables` are the
        digests of the rows that the checkpoint stands on.
        """
        for name in parts:
            if not _PART.fullmatch(name):
                raise ValueError(f"'{name}' cannot be a file name; use letters, digits, '.', '_' and '-'")
        self._wait()
        self._last = self._clock()
        self._writing = self._thread.submit(self._write, round, dict(parts), dict(tables or {}))

    def close(self) -> None:
        """Wait for the last checkpoint, raise what went wrong with it, and end the thread."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def abandon(self) -> None:
        """End the thread after an error elsewhere, or after `close`; whatever it still runs into is dropped.

        A checkpoint that was on its way is on disk whole, or not at all, when this returns.
        """
        self._thread.shutdown()
        self._writing = None

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self, round: int, parts: Mapping[str, Any | Callable[[], Any] | Shard], tables: dict[str, str]
    ) -> None:
        final = self._folder / f"round-{round:06d}"
        # A name that no other process, on any node, has ever looked for: who sees this folder shares the storage.
        building = final.with_name(f"{final.name}.tmp-{os.getpid()}{uuid.uuid4().int % 10**12:012d}")
        try:
            building.mkdir()
            shards, checksums = _write_parts(building, parts)
            identity = identity_of(self._folder.parent)
            manifest = {
                "round": round,
                "parts": sorted(parts),
                "shards": shards,
                "checksums": checksums,
                "identity": identity,
                "tables": tables,
            }
            write_whole(building / MANIFEST, json.dumps(manifest) + "\n")
            if final.exists():  # a round that was run again
                remove_checkpoint(final)
            building.rename(final)
            sync_folder(self._folder)
        except BaseException:
            remove_own_files(self._folder.parent, f"checkpoints/{building.name}")
            raise
        for written, old in checkpoints(self._folder.parent)[: -self._keep]:
            if written != self._fork:
                remove_checkpoint(old)


def _write_parts(folder: Path, parts: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Write all parts; returns what the manifest says about shards, and the checksums of the others."""
    files = {name: folder / f"{name}.safetensors" for name in parts}
    for name, part in parts.items():
        if hasattr(part, "begin"):  # all at once: others write them
            part.begin(files[name])
    facts: dict[str, ShardFacts] = {}
    checksums: dict[str, str] = {}
    for name, part in parts.items():
        if hasattr(part, "begin"):
            facts[name] = part.finish(files[name])
            continue
        tree = part() if callable(part) else part
        if _SHARD.fullmatch(name):
            facts[name] = write_shard(files[name], tree)
        else:
            checksums[name] = write_tree(files[name], tree)
        del tree
    sync_folder(folder)
    return {name: asdict(facts[name]) for name in sorted(facts)}, checksums


def checkpoints(run: RunDirectory | str | Path) -> list[tuple[int, Path]]:
    """(round, folder) of every finished checkpoint, oldest first; they may still turn out to be damaged."""
    folder = _folder(run)
    entries = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    found = [(CHECKPOINT.fullmatch(entry.name), entry) for entry in entries]
    return sorted((int(name.group(1)), entry) for name, entry in found if name is not None)


def load(path: str | Path, deep: bool = True) -> StoredParts:
    """The named parts of one checkpoint; a `DamagedFile` if anything about it is damaged, missing or of another run.

    Whether clients' states have the right bits is looked at only if `deep`; whoever reads them sees it anyway.
    """
    parts = StoredParts(Path(path))
    if parts.identity is not None and parts.identity != identity_of(parts.path.parents[1]):
        raise DamagedFile(
            f"Checkpoint {path} is of another run: its identity is not the one of {parts.path.parents[1]}."
        )
    parts.check(deep)
    return parts


def adopt_checkpoint(path: Path) -> None:
    """Make a checkpoint that was copied from another run one of the run that it is in now."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest["identity"] = identity_of(path.parents[1])
    manifest["tables"] = {}  # it stands on the rows of that run, which are not always taken over
    write_whole(path / MANIFEST, json.dumps(manifest) + "\n")


def latest(
    run: RunDirectory | str | Path,
    at_most: int | None = None,
    *,
    deep: bool = True,
    damaged: Mapping[int, str] | None = None,
) -> tuple[int, StoredParts, list[str]] | None:
    """(round, parts, warnings) of the newest checkpoint that is whole; None if there never was one.

    Checkpoints later than round `at_most` do not count.
    A damaged one is passed over with a warning; if all are damaged, nothing can be resumed: a `UserError`.
    `damaged` are rounds whose checkpoints turned out to be so elsewhere, and why.
    """
    warnings: list[str] = []
    found = [each for each in checkpoints(run) if at_most is None or each[0] <= at_most]
    for round, path in reversed(found):
        try:
            if damaged and round in damaged:
                raise DamagedFile(damaged[round])
            return round, load(path, deep), warnings
        except UserError as error:
            warnings.append(f"The checkpoint of round {round} was passed over: {error}")
    if found:
        raise UserError(
            f"No checkpoint of {_folder(run).parent} can be read ({warnings[0]}); run the experiment again "
            "under another name with name=...",
            code="no-checkpoint", run=run,
        )  # fmt: skip
    return None


def _folder(run: RunDirectory | str | Path) -> Path:
    return Path(run if isinstance(run, str | Path) else run.path) / "checkpoints"


def remove_unfinished_checkpoints(run: Path) -> None:
    """Remove what a killed process left half written or half removed: the run's lock says that there is no other."""
    for leftover in (run / "checkpoints").iterdir() if (run / "checkpoints").is_dir() else []:
        if UNFINISHED_CHECKPOINT.fullmatch(leftover.name):
            remove_own_files(run, f"checkpoints/{leftover.name}")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; first its name, so that a half removed one never looks like a whole one.

    What somebody else put into it stays, under the other name.
    """
    doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
    while doomed.exists():  # such a folder of an earlier one, or of a process of the same number
        doomed = doomed.with_name(f"{doomed.name}0")
    path.rename(doomed)
    remove_own_files(path.parents[1], f"checkpoints/{doomed.name}")
