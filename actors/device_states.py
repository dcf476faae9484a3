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
from actors.devices import free_memory
from lightning_modules.engines.stacked.optimizers import SlabOptimizer

MODEL, OPTIMIZER = "model/", "optimizer/"  # beginnings of the names of what lives in slabs
RESERVE = 0.2  # share of a device's free memory that slabs leave to everything else

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Patch:
    """New rows of a slab; `has` is False for clients that lose theirs."""

    clients: Positions  # rows of the slab
    parts: dict[str, Tensor]
    steps: Positions
    has: bool = True


class Slab:
    """One named state of all clients: committed rows, and what the running round changes."""

    def __init__(self, count: int) -> None:
        self.parts: dict[str, Tensor] = {}
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

    def commit(self, device: torch.device) -> None:
        """Make the changes permanent."""
        for patch in self.pending:
            if not patch.has:
                self.has[patch.clients] = False
                continue
            everyone = np.array_equal(patch.clients, np.arange(len(self.has)))
            for name, rows in patch.parts.items():
                if everyone:
                    self.parts[name] = rows
                    continue
                home = self.parts.get(name)
                if home is None:
                    home = self.parts[name] = _allocate(len(self.has), rows.shape[1], device)
                at = torch.from_numpy(patch.clients).to(home.device, non_blocking=True)
                home.index_copy_(0, at, rows.to(home.device))
            self.has[patch.clients], self.steps[patch.clients] = True, patch.steps
        self.pending = []
        if not self.has.any():
            self.parts = {}


def _allocate(count: int, width: int, device: torch.device) -> Tensor:
    """A slab on the device, or in pinned host memory where the device has no room for it."""
    if device.type == "cuda" and 4 * count * width > (1 - RESERVE) * free_memory(device):
        return torch.zeros(count, width, pin_memory=True)
    return torch.zeros(count, width, device=device)


def taken(values: Tensor, rows: Positions, device: torch.device) -> Tensor:
    """Some rows, on the device, as memory of their own."""
    if len(rows) == len(values) and np.array_equal(rows, np.arange(len(rows))):
        return values.to(device) if values.device != device else values.clone()
    at = torch.from_numpy(rows).to(values.device, non_blocking=True)
    return values.index_select(0, at).to(device, non_blocking=True)


class DeviceStates(ClientStates):
    """Committed and pending state of a block's clients, models and optimizer states as slabs."""

    def __init__(self, clients: Iterable[int], optimizer: SlabOptimizer, device: torch.device) -> None:
        listed = sorted(clients)
        super().__init__(listed)
        self._optimizer, self._device = optimizer, device
        self._row = {client: row for row, client in enumerate(listed)}
        self._clients = listed
        self._slabs: dict[str, Slab] = {}

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
        if slab is None or not slab.where(rows)[0].any():
            return torch.zeros(len(rows), width, device=self._device)
        for patch in reversed(slab.pending):
            if patch.has and np.array_equal(patch.clients, rows):
                return patch.parts[part].clone()  # all of them changed together, as a round does
            if np.isin(patch.clients, rows).any():
                break
        home = slab.parts.get(part)
        made = (
            taken(home, rows, self._device)
            if home is not None
            else torch.zeros(len(rows), width, device=self._device)
        )
        missing = ~slab.has[rows]
        if home is not None and missing.any():
            made[torch.from_numpy(np.flatnonzero(missing)).to(self._device)] = 0.0
        at_row = np.full(len(self._clients), -1)
        at_row[rows] = np.arange(len(rows))
        for patch in slab.pending:
            inside = np.flatnonzero(at_row[patch.clients] >= 0)
            if not len(inside):
                continue
            places = torch.from_numpy(at_row[patch.clients[inside]]).to(self._device)
            made[places] = taken(patch.parts[part], inside, self._device) if patch.has else 0.0
        return made

    def put_rows(
        self, name: str, clients: Sequence[int], parts: dict[str, Tensor], steps: Positions | None = None
    ) -> None:
        """Replace this state of some clients, if the round commits; the tensors belong to the states from here on."""
        counted = np.zeros(len(clients), np.int64) if steps is None else steps
        self._patch(name, Patch(self.rows(clients), parts, counted))

    def drop_rows(self, name: str, clients: Sequence[int]) -> None:
        """Take this state from some clients, if the round commits."""
        if name in self._slabs:
            self._patch(name, Patch(self.rows(clients), {}, np.zeros(len(clients), np.int64), has=False))

    def _patch(self, name: str, patch: Patch) -> None:
        slab = self._slabs.setdefault(name, Slab(len(self._clients)))
        slab.pending.append(patch)
        slab.version += 1

    # --- transactions -------------------------------------------------------------------------------------

    def changes(self) -> Changes:
        """What the running round changes so far, as plain arrays: one copy for each patch."""
        found = super().changes()
        for name, slab in self._slabs.items():
            for patch in slab.pending:
                parts = {
                    part: rows.detach().to("cpu", copy=True).numpy() for part, rows in patch.parts.items()
                }
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

    def abort(self) -> None:
        """Forget what an aborted attempt at a round left."""
        super().abort()
        for slab in self._slabs.values():
            slab.version += bool(slab.pending)
            slab.pending = []

    def commit(self) -> None:
        """Make the round's changes permanent."""
        super().commit()
        for slab in self._slabs.values():
            slab.commit(self._device)
        self._slabs = {name: slab for name, slab in self._slabs.items() if slab.has.any()}

    # --- the form that all blocks share -------------------------------------------------------------------

    def host(self, client: int) -> State:
        """What a client keeps on the host, as the running round sees it."""
        return super().of(client)

    def put_host(self, client: int, state: State) -> None:
        """Replace what a client keeps on the host, if the round commits."""
        super().put(client, state)

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
            parts = {part: rows.detach().to("cpu", copy=True).numpy() for part, rows in slab.parts.items()}
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
        names = {name for client in self._clients for name in states.get(client, {}) if _in_slab(name)}
        for name in sorted(names):
            clients = [client for client in self._clients if name in states.get(client, {})]
            parts, steps = self._rows_of(name, [states[client][name] for client in clients])
            self.put_rows(name, clients, parts, steps)
            self._slabs[name].commit(self._device)

    def _part_names(self, name: str) -> tuple[str, ...]:
        return ("model",) if name.startswith(MODEL) else self._optimizer.names

    def _width(self, name: str) -> int:
        slab = self._slabs[name]
        tables = [*slab.parts.values(), *(rows for patch in slab.pending for rows in patch.parts.values())]
        return tables[-1].shape[1] if tables else 0

    def _state(self, name: str, rows: dict[str, npt.NDArray[np.float32]], steps: int) -> Any:
        for row in rows.values():
            row.flags.writeable = False
        return rows["model"] if name.startswith(MODEL) else self._optimizer.to_state(rows, steps)

    def _rows_of(self, name: str, values: Sequence[Any]) -> tuple[dict[str, Tensor], Positions]:
        """States of several clients as rows on the device."""
        if name.startswith(MODEL):
            stacked = torch.from_numpy(np.stack(values)).to(self._device)
            return {"model": stacked}, np.zeros(len(values), np.int64)
        parts = {}
        for part in self._optimizer.names:
            rows = np.zeros((len(values), self._optimizer.width), np.float32)
            for row, state in enumerate(values):
                self._optimizer.from_state(state, part, rows[row])
            parts[part] = torch.from_numpy(rows).to(self._device)
        return parts, np.array([self._optimizer.steps_of(state) for state in values], np.int64)


def _in_slab(name: str) -> bool:
    return name.startswith((MODEL, OPTIMIZER))
