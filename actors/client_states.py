"""What clients keep between rounds, as a transaction: pending until the round commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

State = dict[str, Any]


@dataclass(frozen=True)
class Changes:
    """What a round changes in the states of some clients."""

    put: dict[int, State] = field(default_factory=dict)  # new values by client and name
    gone: dict[int, list[str]] = field(default_factory=dict)  # names that a client loses

    def onto(self, states: Mapping[int, State]) -> dict[int, State]:
        """The states with these changes.

        >>> Changes({1: {"a": 2}}, {1: ["b"]}).onto({0: {"a": 0}, 1: {"a": 1, "b": 1, "c": 1}})
        {0: {'a': 0}, 1: {'c': 1, 'a': 2}}
        """
        found = dict(states)
        for client in {*self.put, *self.gone}:
            lost = {*self.gone.get(client, ()), *self.put.get(client, {})}
            kept = {name: value for name, value in found.get(client, {}).items() if name not in lost}
            found[client] = kept | self.put.get(client, {})
        return found


class ClientStates:
    """Committed and pending state of some clients. States are values: a change makes a new one."""

    def __init__(self, clients: Iterable[int]) -> None:
        self._committed: dict[int, State] = {client: {} for client in clients}
        self._pending: dict[int, State] = {}

    def of(self, client: int) -> State:
        """A client's state as the running round sees it."""
        return self._pending.get(client, self._committed[client])

    def put(self, client: int, state: State) -> None:
        """Replace a client's state, if the round commits."""
        self._pending[client] = state

    def host(self, client: int) -> State:
        """What of a client's state is in the memory of this process, as the running round sees it: here, all."""
        return ClientStates.of(self, client)

    def put_host(self, client: int, state: State) -> None:
        """Replace what of a client's state is in the memory of this process, if the round commits."""
        ClientStates.put(self, client, state)

    def changes(self) -> Changes:
        """What the running round changes so far."""
        found = Changes()
        for client, new in self._pending.items():
            old = self._committed[client]
            if put := {name: value for name, value in new.items() if old.get(name) is not value}:
                found.put[client] = put
            if gone := [name for name in old if name not in new]:
                found.gone[client] = gone
        return found

    def abort(self) -> None:
        """Forget what an aborted attempt at a round left."""
        self._pending.clear()

    def commit(self) -> None:
        """Make the round's changes permanent."""
        self._committed.update(self._pending)
        self._pending.clear()

    def snapshot(self) -> dict[int, State]:
        """The committed state of every client: values that nobody writes to."""
        return dict(self._committed)

    def restore(self, states: dict[int, State]) -> None:
        """Take over committed states; a client without one starts with nothing."""
        self._committed = {client: states.get(client, {}) for client in self._committed}
        self._pending.clear()
