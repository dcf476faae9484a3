"""Checkpoints: whole or not at all, written in the background, and the newest good one found again.

`checkpoints/round-000010/` holds one checksummed file per named part of the state and a manifest. It is
built under another name, made durable, and renamed; only then are older ones removed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError
from archipelago.core.files import sync_folder, write_whole
from archipelago.core.own_files import CHECKPOINT, UNFINISHED_CHECKPOINT, remove_own_files
from archipelago.runs.identity import identity_of
from archipelago.runs.trees import read_tree, write_tree

if TYPE_CHECKING:
    from archipelago.runs.directory import RunDirectory

Trees = dict[str, Any]

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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

    def submit(self, round: int, parts: Mapping[str, Any | Callable[[], Any]]) -> None:
        """Write a checkpoint of `round` in the background; waits only if the one before is still on its way.

        A part is a tree, or a function that returns one and is called in the background. What they refer to
        must not change afterwards: state values are replaced from round to round, never written to.
        """
        for name in parts:
            if not _PART.fullmatch(name):
                raise ValueError(f"'{name}' cannot be a file name; use letters, digits, '.', '_' and '-'")
        self._wait()
        self._last = self._clock()
        self._writing = self._thread.submit(self._write, round, dict(parts))

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

    def _write(self, round: int, parts: Mapping[str, Any | Callable[[], Any]]) -> None:
        final = self._folder / f"round-{round:06d}"
        building = final.with_name(f"{final.name}.tmp-{os.getpid()}")
        try:
            building.mkdir()
            for name, part in parts.items():
                write_tree(building / f"{name}.safetensors", part() if callable(part) else part)
            manifest = json.dumps(
                {"round": round, "parts": sorted(parts), "identity": identity_of(self._folder.parent)}
            )
            write_whole(building / "manifest.json", manifest + "\n")
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


def checkpoints(run: RunDirectory | str | Path) -> list[tuple[int, Path]]:
    """(round, folder) of every finished checkpoint, oldest first; they may still turn out to be damaged."""
    folder = _folder(run)
    entries = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    found = [(CHECKPOINT.fullmatch(entry.name), entry) for entry in entries]
    return sorted((int(name.group(1)), entry) for name, entry in found if name is not None)


def load(path: str | Path) -> Trees:
    """The named parts of one checkpoint; a `UserError` if anything about it is damaged or missing."""
    path = Path(path)
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        names, identity = manifest["parts"], manifest.get("identity")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"Checkpoint {path} is damaged: its manifest cannot be read ({error}).") from error
    if identity is not None and identity != identity_of(path.parents[1]):
        raise UserError(
            f"Checkpoint {path} is of another run: its identity is not the one of {path.parents[1]}."
        )
    return {name: read_tree(path / f"{name}.safetensors") for name in names}


def adopt_checkpoint(path: Path) -> None:
    """Make a checkpoint that was copied from another run one of the run that it is in now."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["identity"] = identity_of(path.parents[1])
    write_whole(path / "manifest.json", json.dumps(manifest) + "\n")


def latest(run: RunDirectory | str | Path, at_most: int | None = None) -> tuple[int, Trees, list[str]] | None:
    """(round, parts, warnings) of the newest checkpoint that is whole; None if there never was one.

    Checkpoints later than round `at_most` do not count.
    A damaged one is passed over with a warning; if all are damaged, nothing can be resumed: a `UserError`.
    """
    warnings: list[str] = []
    found = [each for each in checkpoints(run) if at_most is None or each[0] <= at_most]
    for round, path in reversed(found):
        try:
            return round, load(path), warnings
        except UserError as error:
            warnings.append(f"The checkpoint of round {round} was passed over: {error}")
    if found:
        raise UserError(
            f"No checkpoint of {_folder(run).parent} can be read ({warnings[0]}); run the experiment again "
            "under another name with name=..."
        )
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
