"""What clients keep between rounds, as a transaction: pending until the round commits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

State = dict[str, Any]


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
