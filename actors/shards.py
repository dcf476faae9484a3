"""The states of a block of clients as a shard of a checkpoint, written and read by the process that holds them.

States are values that nobody writes to, so holding on to those of a committed round is enough: an actor writes them in
a thread of its own while the next round runs. The driver only learns the name, length and checksum of the file. Where
an actor does not see the driver's folder (another node's disk), its states travel through the driver, one block at a
time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from actors.client_states import State
from actors.wire import MODEL_KEY
from archipelago.core.errors import UserError
from archipelago.runs.checkpoints import MANIFEST, ShardFacts, StoredParts, read_states, write_shard
from archipelago.runs.trees import Rows

HELD = 3  # rounds of which an actor holds on to the states: one is written, one waits, one is read
_PIECE = 64e6  # bytes of private models that the driver fetches at a time
_VISIBLE = 60.0  # seconds that a network file system is given to show a file to another node

Models = dict[str, list[int]]  # name of a private model -> clients that have one


class ClientShard(Protocol):
    """The committed states of some clients, wherever they are (a `Shard` of a checkpoint)."""

    def begin(self, path: Path) -> None:
        """Start to write the file, if somebody else does it."""

    def finish(self, path: Path) -> ShardFacts:
        """Returns when the file is there."""

    def __call__(self) -> dict[int, State]:
        """The states themselves."""

    def private(self) -> tuple[Models, int]:
        """({private model: clients}, length of a model)."""

    def models(self, name: str, clients: list[int]) -> dict[int, Any]:
        """The private models of that name of some clients."""


class LocalShard:
    """States of clients in this process."""

    def __init__(self, states: dict[int, State]) -> None:
        self._states = states

    def begin(self, path: Path) -> None:
        """Nobody else writes it."""

    def finish(self, path: Path) -> ShardFacts:
        """Write the file."""
        return write_shard(path, self._states)

    def __call__(self) -> dict[int, State]:
        """The states."""
        return self._states

    def private(self) -> tuple[Models, int]:
        """({private model: clients}, length of a model)."""
        models: Models = {}
        length = 0
        for client, state in self._states.items():
            for key, value in state.items():
                if key.startswith(MODEL_KEY):
                    models.setdefault(key.removeprefix(MODEL_KEY), []).append(client)
                    length = len(value)
        return models, length

    def models(self, name: str, clients: list[int]) -> dict[int, Any]:
        """The private models of that name of some clients."""
        return {client: self._states[client][MODEL_KEY + name] for client in clients}


class HeldStates:
    """What a ClientActor holds on to of committed rounds, and the thread that writes it."""

    def __init__(self) -> None:
        self._held: dict[int, LocalShard] = {}
        self._writing: dict[int, Future[ShardFacts]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard")

    def hold(self, number: int, states: dict[int, State]) -> None:
        """Hold on to these states under a number that grows."""
        self._held[number] = LocalShard(states)
        for old in sorted(self._held)[:-HELD]:
            del self._held[old]

    def shard(self, number: int) -> LocalShard:
        """What is held under that number."""
        return self._held[number]

    def save(self, number: int, path: Path) -> bool:
        """Begin to write a file; False if this process does not see its folder, or may not write there."""
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
            return False
        self._writing[number] = self._thread.submit(self._held[number].finish, path)
        return True

    def saved(self, number: int) -> ShardFacts | None:
        """What was written, or None as long as it is on its way; then the states are let go of."""
        if not self._writing[number].done():
            return None
        facts = self._writing.pop(number).result()
        self.release(number)
        return facts

    def release(self, number: int) -> None:
        """Let go of the states."""
        self._held.pop(number, None)


class ActorShard:
    """What a ClientActor holds under a number, as the driver sees it."""

    def __init__(self, actor: Any, number: int, wait: Callable[[dict[Any, Any], str], Any], key: int) -> None:
        self._actor, self._number = actor, number
        self._wait, self._key = wait, key  # the session's, with a watchdog that knows the actor by its key
        self._started: Any = None

    def begin(self, path: Path) -> None:
        """Ask the actor to write the file in the background."""
        self._started = self._actor.shard.remote("save", self._number, path.absolute())

    def finish(self, path: Path) -> ShardFacts:
        """Wait until the actor has written the file, or write it here where the actor cannot."""
        if not self._wait({self._key: self._started}, "save")[0]:
            facts = write_shard(path, self())
            self._ask("release", self._number)
            return facts
        pause = 0.01
        while (facts := self._ask("saved", self._number)) is None:
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        _wait_until_seen(path, facts.bytes)
        return facts

    def __call__(self) -> dict[int, State]:
        """The states, fetched."""
        return self._ask("states", self._number)

    def private(self) -> tuple[Models, int]:
        """({private model: clients}, length of a model)."""
        return self._ask("private", self._number)

    def models(self, name: str, clients: list[int]) -> dict[int, Any]:
        """The private models of that name of some clients."""
        return self._ask("models", self._number, name, clients)

    def _ask(self, *question: Any) -> Any:
        return self._wait({self._key: self._actor.shard.remote(*question)}, f"shard {question[0]}")[0]


def _wait_until_seen(path: Path, length: int) -> None:
    """Another node wrote the file: a network file system may show it a little later."""
    deadline = time.monotonic() + _VISIBLE
    while not (path.exists() and path.stat().st_size == length):
        if time.monotonic() > deadline:
            raise UserError(
                f"Expected {path}, which a client actor on another node has written, to be seen here within "
                f"{_VISIBLE:g} s: is the storage the same folder on all nodes? Choose another one with storage=...",
                code="not-shared", path=path,
            )  # fmt: skip
        time.sleep(0.1)


def read_where_it_is(folder: str, manifest: str, shards: Mapping[str, list[int]]) -> dict[int, State] | None:
    """The states of some clients from a checkpoint; None if this process does not see that very checkpoint."""
    path = Path(folder)
    try:
        if (path / MANIFEST).read_text(encoding="utf-8") != manifest:
            return None
    except OSError:
        return None
    return read_states(path, shards)


def states_of(clients: Mapping[int, State] | StoredParts, wanted: Iterable[int]) -> dict[int, State]:
    """The states of some clients of a checkpoint, read or at hand; a client without one is left out."""
    if isinstance(clients, StoredParts):
        return clients.states(wanted)
    return {client: clients[client] for client in wanted if client in clients}


def private_models(shards: Iterable[ClientShard]) -> dict[str, Any]:
    """Models that clients keep: `private-<name>`, a row for each client of `private-<name>-clients`.

    Rows are fetched when they are written, a piece at a time.
    """
    where: dict[str, dict[int, ClientShard]] = {}
    length = 0
    for shard in shards:
        models, found = shard.private()
        length = max(length, found)
        for name, clients in models.items():
            where.setdefault(name, {}).update(dict.fromkeys(clients, shard))
    tables: dict[str, Any] = {}
    for name, holders in where.items():
        tables[f"private-{name}"] = _table(name, holders, length)
        tables[f"private-{name}-clients"] = np.asarray(sorted(holders), np.int64)
    return tables


def _table(name: str, holders: dict[int, ClientShard], length: int) -> Rows:
    order = {client: row for row, client in enumerate(sorted(holders))}
    step = max(1, int(_PIECE // (4 * max(length, 1))))

    def rows() -> Iterator[tuple[int, Any]]:
        for shard in dict.fromkeys(holders.values()):
            clients = sorted(client for client, holder in holders.items() if holder is shard)
            for at in range(0, len(clients), step):
                for client, value in shard.models(name, clients[at : at + step]).items():
                    yield order[client], value

    return Rows((len(holders), length), np.dtype(np.float32), rows)
