"""What clients keep between rounds, on their device: one row each of a slab for every model and optimizer state.

A slab is a (clients, numbers) tensor. A round's changes are patches, rows beside the slab, until it commits. What is
small and belongs to client functions stays on the host, as it does elsewhere. Checkpoints have the same form as those
of every other block: `snapshot` and `restore` translate, one copy per slab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.client_states import Changes, ClientStates, State
from lightning_modules.engines.stacked.device_memory import ClientRows, DeviceMemory, Positions
from lightning_modules.engines.stacked.optimizers import SlabOptimizer

PIECE = 64  # rows that are copied from one table to another at a time
MODEL, OPTIMIZER = "model/", "optimizer/"  # beginnings of the names of what lives in slabs


@dataclass(frozen=True)
class Patch:
    """New rows of a slab; `has` is False for clients that lose theirs."""

    clients: Positions  # rows of the slab
    parts: dict[str, ClientRows]
    rows: Positions  # of the parts, one for each client
    steps: Positions
    has: bool = True


class Slab:
    """One named state of all clients: committed rows, and what the running round changes."""

    def __init__(self, count: int) -> None:
        self.parts: dict[str, ClientRows] = {}
        self.has = np.zeros(count, bool)
        self.steps = np.zeros(count, np.int64)
        self.pending: list[Patch] = []
        self.version = 0

    def where(self, rows: Positions) -> tuple[npt.NDArray[np.bool_], Positions]:
        """(who has one, optimizer steps behind it), pending changes included."""
        has, steps = self.has.copy(), self.steps.copy()
        for patch in self.pending:
            has[patch.clients], steps[patch.clients] = patch.has, patch.steps
        return has[rows], steps[rows]

    def located(self, rows: Positions) -> list[tuple[dict[str, ClientRows], Positions, Positions]]:
        """Where the newest state of some clients is: (tables, positions among `rows`, rows of the tables)."""
        source, place = np.where(self.has, 0, -1), np.arange(len(self.has))
        for number, patch in enumerate(self.pending, start=1):
            source[patch.clients] = number if patch.has else -1
            place[patch.clients] = patch.rows
        tables = [self.parts, *(patch.parts for patch in self.pending)]
        found = []
        for number in np.unique(source[rows]):
            if number >= 0:
                among = np.flatnonzero(source[rows] == number)
                found.append((tables[number], among, place[rows[among]]))
        return found

    def commit(self, memory: DeviceMemory) -> None:
        """Make the changes permanent."""
        everyone = np.arange(len(self.has))
        for patch in self.pending:
            if not patch.has:
                self.has[patch.clients] = False
                continue
            whole = np.array_equal(patch.clients, everyone) and np.array_equal(patch.rows, everyone)
            for name, table in patch.parts.items():
                if whole and len(table) == len(everyone):
                    self.parts[name] = table
                    continue
                if name not in self.parts:
                    self.parts[name] = memory.zeros(len(everyone), table.width)
                for at in range(0, len(patch.clients), PIECE):
                    piece = slice(at, at + PIECE)
                    self.parts[name].replace(patch.clients[piece], table, patch.rows[piece])
            self.has[patch.clients], self.steps[patch.clients] = True, patch.steps
        self.pending = []
        if not self.has.any():
            self.parts = {}


class DeviceStates(ClientStates):
    """Committed and pending state of a block's clients, models and optimizer states as slabs."""

    def __init__(self, clients: Iterable[int], optimizer: SlabOptimizer, memory: DeviceMemory) -> None:
        listed = sorted(clients)
        super().__init__(listed)
        self._optimizer, self._memory, self._device = optimizer, memory, memory.device
        self._row = {client: row for row, client in enumerate(listed)}
        self._clients = listed
        self._slabs: dict[str, Slab] = {}
        self._early = False  # whether changes are copied to the host as soon as they are made
        self._copies: dict[int, dict[str, Tensor]] = {}  # by patch of the running round

    def rows(self, clients: Sequence[int]) -> Positions:
        """Where clients stand in every slab."""
        return np.array([self._row[client] for client in clients], np.int64)

    # --- slabs --------------------------------------------------------------------------------------------

    def has(self, name: str, clients: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which clients have this state, as the running round sees it."""
        slab = self._slabs.get(name)
        return np.zeros(len(clients), bool) if slab is None else slab.where(self.rows(clients))[0]

    def steps(self, name: str, clients: Sequence[int]) -> Positions:
        """Optimizer steps behind each client's state; 0 without one."""
        slab = self._slabs.get(name)
        if slab is None:
            return np.zeros(len(clients), np.int64)
        has, steps = slab.where(self.rows(clients))
        return np.where(has, steps, 0)

    def version(self, name: str) -> int:
        """Changes with every change of this state."""
        slab = self._slabs.get(name)
        return -1 if slab is None else slab.version

    def values(self, name: str, part: str, clients: Sequence[int], width: int) -> Tensor:
        """(n, width) rows as the running round sees them; zeros for a client without one."""
        slab, rows = self._slabs.get(name), self.rows(clients)
        found = [] if slab is None else slab.located(rows)
        if len(found) == 1 and len(found[0][1]) == len(rows):
            parts, _, at = found[0]
            return parts[part].read(at)
        made = torch.zeros(len(rows), width, device=self._device)
        for parts, among, at in found:
            places = torch.from_numpy(among).to(self._device, non_blocking=True)
            made.index_copy_(0, places, parts[part].read(at))
        return made

    def table(self, name: str, part: str, clients: Sequence[int]) -> tuple[ClientRows, Positions] | None:
        """(table, row of each client, -1 without one) if those who have this state have it in one place."""
        slab, rows = self._slabs.get(name), self.rows(clients)
        found = [] if slab is None else slab.located(rows)
        if len(found) != 1:
            return None
        parts, among, at = found[0]
        row_of = np.full(len(rows), -1, np.int64)
        row_of[among] = at
        return parts[part], row_of

    def put_rows(
        self,
        name: str,
        clients: Sequence[int],
        parts: dict[str, ClientRows],
        steps: Positions | None = None,
        rows: Positions | None = None,
    ) -> None:
        """Replace this state of some clients, if the round commits; the tables belong to the states from here on.

        `rows` of the tables are theirs, one for each client; without it, the first ones.
        """
        counted = np.zeros(len(clients), np.int64) if steps is None else steps
        places = np.arange(len(clients)) if rows is None else rows
        self._patch(name, Patch(self.rows(clients), parts, places, counted))

    def drop_rows(self, name: str, clients: Sequence[int]) -> None:
        """Take this state from some clients, if the round commits."""
        if name in self._slabs:
            nothing = np.zeros(len(clients), np.int64)
            self._patch(name, Patch(self.rows(clients), {}, nothing, nothing, has=False))

    def _patch(self, name: str, patch: Patch) -> None:
        slab = self._slabs.setdefault(name, Slab(len(self._clients)))
        slab.pending.append(patch)
        if self._early:
            self._copied_to_host(patch)
        slab.version += 1

    # --- transactions -------------------------------------------------------------------------------------

    def changes(self) -> Changes:
        """What the running round changes so far, as plain arrays: a copy for each state, and one wait for all."""
        found = super().changes()
        patches = [(name, patch) for name, slab in self._slabs.items() for patch in slab.pending]
        copies = [self._copied_to_host(patch) for _, patch in patches]
        self._memory.wait()
        # Whoever asks once asks after every round: from here on, what changes sets out as soon as it does.
        self._early = True
        for (name, patch), copied in zip(patches, copies, strict=True):
            parts = {part: rows.numpy() for part, rows in copied.items()}
            for at, row in enumerate(patch.clients.tolist()):
                client = self._clients[row]
                put, gone = found.put.get(client, {}), found.gone.get(client, [])
                put.pop(name, None)  # the last patch counts
                if patch.has:
                    own = {part: rows[at] for part, rows in parts.items()}
                    found.put.setdefault(client, put)[name] = self._state(name, own, int(patch.steps[at]))
                elif name not in gone:
                    found.gone.setdefault(client, gone).append(name)
        return found

    def _copied_to_host(self, patch: Patch) -> dict[str, Tensor]:
        """The rows of a patch on their way to the host; those that set out when it was made."""
        if id(patch) not in self._copies:
            self._copies[id(patch)] = {
                part: self._memory.fetch(table, patch.rows) for part, table in patch.parts.items()
            }
        return self._copies[id(patch)]

    def abort(self) -> None:
        """Forget what an aborted attempt at a round left."""
        super().abort()
        self._copies.clear()
        for slab in self._slabs.values():
            slab.version += bool(slab.pending)
            slab.pending = []

    def commit(self) -> None:
        """Make the round's changes permanent."""
        super().commit()
        self._copies.clear()
        for slab in self._slabs.values():
            slab.commit(self._memory)
        self._slabs = {name: slab for name, slab in self._slabs.items() if slab.has.any()}

    # --- the form that all blocks share -------------------------------------------------------------------

    def of(self, client: int) -> State:
        """A client's whole state as plain arrays: for code that goes client by client."""
        found = dict(self.host(client))
        for name in self._slabs:
            if self.has(name, [client])[0]:
                parts = self._part_names(name)
                width = self._width(name)
                rows = {part: self.values(name, part, [client], width)[0].cpu().numpy() for part in parts}
                found[name] = self._state(name, rows, int(self.steps(name, [client])[0]))
        return found

    def put(self, client: int, state: State) -> None:
        """Replace a client's whole state, if the round commits."""
        before = self.of(client)
        for name in [n for n in before if _in_slab(n) and n not in state]:
            self.drop_rows(name, [client])
        for name, value in state.items():
            if _in_slab(name) and before.get(name) is not value:
                self.put_rows(name, [client], *self._rows_of(name, [value]))
        self.put_host(client, {name: value for name, value in state.items() if not _in_slab(name)})

    def snapshot(self) -> dict[int, State]:
        """The committed state of every client as plain arrays: one copy per slab."""
        found = super().snapshot()
        states = {client: dict(state) for client, state in found.items()}
        for name, slab in self._slabs.items():
            # Memory of its own: a slab on the host is written to by the next commit, while a thread may write this.
            parts = {part: table.on_host() for part, table in slab.parts.items()}
            for row, client in enumerate(self._clients):
                if slab.has[row]:
                    own = {part: rows[row] for part, rows in parts.items()}
                    states[client][name] = self._state(name, own, int(slab.steps[row]))
        return states

    def restore(self, states: dict[int, State]) -> None:
        """Take over committed states; a client without one starts with nothing."""
        plain = {
            client: {name: value for name, value in state.items() if not _in_slab(name)}
            for client, state in states.items()
        }
        super().restore(plain)
        self._slabs = {}
        self._copies.clear()
        names = {name for client in self._clients for name in states.get(client, {}) if _in_slab(name)}
        for name in sorted(names):
            clients = [client for client in self._clients if name in states.get(client, {})]
            parts, steps = self._rows_of(name, [states[client][name] for client in clients])
            self.put_rows(name, clients, parts, steps)
            self._slabs[name].commit(self._memory)

    def _part_names(self, name: str) -> tuple[str, ...]:
        return ("model",) if name.startswith(MODEL) else self._optimizer.names

    def _width(self, name: str) -> int:
        slab = self._slabs[name]
        tables = [*slab.parts.values(), *(rows for patch in slab.pending for rows in patch.parts.values())]
        return tables[-1].width if tables else 0

    def _state(self, name: str, rows: dict[str, npt.NDArray[np.float32]], steps: int) -> Any:
        for row in rows.values():
            row.flags.writeable = False
        return rows["model"] if name.startswith(MODEL) else self._optimizer.to_state(rows, steps)

    def _rows_of(self, name: str, values: Sequence[Any]) -> tuple[dict[str, ClientRows], Positions]:
        """States of several clients as tables."""
        if name.startswith(MODEL):
            return {"model": self._memory.placed(np.stack(values))}, np.zeros(len(values), np.int64)
        parts = {}
        for part in self._optimizer.names:
            rows = np.zeros((len(values), self._optimizer.width), np.float32)
            for row, state in enumerate(values):
                self._optimizer.from_state(state, part, rows[row])
            parts[part] = self._memory.placed(rows)
        return parts, np.array([self._optimizer.steps_of(state) for state in values], np.int64)


def _in_slab(name: str) -> bool:
    return name.startswith((MODEL, OPTIMIZER))
