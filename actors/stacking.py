"""References of many clients at once, on their device: what `wire.py` resolves client by client, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.device_states import DeviceStates
from actors.wire import ClientSide
from archipelago.strategies.parameters import PartialSums, Vector, normalised_rows, used_rows
from lightning_modules.engines.stacked.chunks import Chunks
from lightning_modules.engines.stacked.device_memory import ClientRows, DeviceMemory, Positions, free_memory
from lightning_modules.flat import is_value, tensor_of

SCRATCH = 2**25  # numbers that a sum of models works on at a time, where a device has room for them

Maker = Callable[[Positions], Tensor]


@dataclass(frozen=True)
class Stacked:
    """What a reference means for n clients: row `rows[i]` of `source` for client i, or all of it for everyone.

    A row of -1 points at nothing. `key` tells whether two of them are the same values: it is None where that
    cannot be known. The source is a tensor of the device, a table, or what makes some rows when they are needed.
    """

    source: Tensor | ClientRows | Maker
    rows: Positions | None = None  # None: `source` is what every client has
    key: Hashable = None

    def present(self, count: int) -> npt.NDArray[np.bool_]:
        """Which of n clients have one."""
        return np.ones(count, bool) if self.rows is None else self.rows >= 0

    @property
    def shared(self) -> Tensor:
        """The value, or the values, of all clients."""
        assert isinstance(self.source, Tensor)
        return self.source

    @property
    def is_several(self) -> bool:
        """Whether all clients have K models of it."""
        return self.rows is None and self.shared.dim() == 2

    def of(self, at: Positions, device: torch.device) -> Tensor:
        """(m, ...) values of the clients at some positions, as memory of their own."""
        if self.rows is None:
            return self.shared.expand(len(at), *self.shared.shape).clone()
        return self.take(np.maximum(self.rows[at], 0), device)

    def take(self, rows: Positions, device: torch.device) -> Tensor:
        """Some rows of the source, as memory of their own."""
        if isinstance(self.source, Tensor):
            return ClientRows(self.source, device).read(rows)
        return self.source.read(rows) if isinstance(self.source, ClientRows) else self.source(rows)

    def one(self, row: int, device: torch.device) -> Tensor:
        """One row of the source, to be read only."""
        source = self.source.values if isinstance(self.source, ClientRows) else self.source
        if isinstance(source, Tensor) and source.device == device:
            return source[row]
        return self.take(np.array([row]), device)[0]


class SlabResults(Mapping[int, Vector]):
    """Models that a call made, on the device; client by client they are plain arrays."""

    def __init__(self, clients: Sequence[int], table: ClientRows, rows: Positions | None = None) -> None:
        self.table = table
        places = range(len(clients)) if rows is None else rows.tolist()
        self.row = dict(zip(clients, places, strict=True))

    def together(self, clients: Sequence[int]) -> dict[int, Vector]:
        """Those of several clients, in one copy."""
        there = [client for client in clients if client in self.row]
        table = self.table.on_host(np.array([self.row[client] for client in there], np.int64))
        table.flags.writeable = False
        return dict(zip(there, table, strict=True))

    def __getitem__(self, client: int) -> Vector:
        return self.together([self._known(client)])[client]

    def _known(self, client: int) -> int:
        if client not in self.row:
            raise KeyError(client)
        return client

    def __iter__(self) -> Any:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)


class Uploads:
    """Arrays of the server on the device, once: recognised by their read-only memory.

    What a round has not asked for is let go at its end; the models at its end are those that the next one begins with.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._kept: dict[Hashable, tuple[npt.NDArray[Any], Tensor]] = {}
        self._asked: set[Hashable] = set()

    def get(self, array: npt.NDArray[Any]) -> tuple[Tensor, Hashable]:
        """The array on the device, and a key that stands for its content while the round lasts."""
        if not is_value(array):
            return self.send(array), None
        key = ("array", array.ctypes.data, array.shape, array.strides, array.dtype.str)
        if key not in self._kept:
            # The array is kept: as long as it is alive, its address is its own.
            self._kept[key] = (array, self._memory.sent(tensor_of(array)))
        self._asked.add(key)
        return self._kept[key][1], key

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        """An array on the device that nobody will ask for again."""
        if self._memory.device.type == "cpu":
            return tensor_of(array).clone()
        return self._memory.sent(tensor_of(array))

    def clear(self) -> None:
        """The round is over."""
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._asked}
        self._asked = set()


@dataclass(frozen=True)
class DeviceSide:
    """What encoded references point at, for all clients of a request at once."""

    side: ClientSide
    states: DeviceStates
    uploads: Uploads
    device: torch.device
    width: int  # numbers of a model

    @property
    def arrays(self) -> Sequence[npt.NDArray[Any]]:
        """Those that travelled beside the request."""
        return self.side.arrays

    def shared(self, array: npt.NDArray[Any]) -> Stacked:
        """A model, or K models, that all clients have."""
        value, key = self.uploads.get(array)
        return Stacked(value, None, key)

    def rows(self, array: npt.NDArray[Any], rows: Sequence[int]) -> Stacked:
        """One of K models for each client."""
        value, key = self.uploads.get(array)
        return Stacked(value, np.asarray(rows, np.int64), key)

    def values(self, values: Sequence[Any]) -> Stacked:
        """A value of its own for each client; None for those without one."""
        there = [value for value in values if value is not None]
        rows = np.full(len(values), -1, np.int64)
        rows[[at for at, value in enumerate(values) if value is not None]] = np.arange(len(there))
        table = (
            np.stack([np.asarray(value) for value in there])
            if there
            else np.zeros((1, self.width), np.float32)
        )
        return Stacked(torch.from_numpy(table).to(self.device), rows)

    def private(self, name: str, clients: Sequence[int], default: Stacked | None) -> Stacked:
        """Each client's own model of this name, and what it is until there is one."""
        has = self.states.has(name, clients)
        if not has.any():
            nothing = Stacked(torch.zeros(1, self.width, device=self.device), np.full(len(clients), -1))
            return nothing if default is None else default
        found = self.states.table(name, "model", clients)
        if found is not None and (has.all() or default is None):
            return Stacked(*found, ("private", name, self.states.version(name), tuple(clients)))

        def own(at: Positions) -> Tensor:
            return self.states.values(name, "model", [clients[i] for i in at], self.width)

        if has.all() or default is None:
            key = ("private", name, self.states.version(name), tuple(clients))
            return Stacked(own, np.where(has, np.arange(len(clients)), -1), key)
        return self._filled(own, has, default)

    def result(self, handle: str, clients: Sequence[int], default: Stacked | None) -> Stacked:
        """What each client made in an earlier call, or what it started from if that never arrived."""
        made = self.side.results.get(handle, {})
        if not isinstance(made, SlabResults):
            return self._result_of_loop(made, clients, default)
        rows = np.array([made.row.get(client, -1) for client in clients], np.int64)
        if (rows >= 0).all() or default is None:
            return Stacked(made.table, rows, ("result", handle))
        known = np.maximum(rows, 0)
        return self._filled(lambda at: made.table.read(known[at]), rows >= 0, default)

    def _result_of_loop(
        self, made: Mapping[int, Vector], clients: Sequence[int], default: Stacked | None
    ) -> Stacked:
        """The same, where the call went client by client."""
        found = self.values([made.get(client) for client in clients])
        has = found.present(len(clients))
        if has.all() or default is None:
            return found
        return self._filled(lambda at: found.of(at, self.device), has, default)

    def _filled(self, own: Maker, has: npt.NDArray[np.bool_], default: Stacked) -> Stacked:
        def made(at: Positions) -> Tensor:
            mask = torch.from_numpy(has[at]).to(self.device)[:, None]
            return torch.where(mask, own(at), default.of(at, self.device))

        return Stacked(made, np.where(has | default.present(len(has)), np.arange(len(has)), -1))

    def merged(self, base: Stacked, other: Stacked, columns: npt.NDArray[np.int64], count: int) -> Stacked:
        """Models some columns of which come from others; who has no other keeps the base."""
        chosen, has = self.uploads.get(columns)[0], other.present(count)

        def made(at: Positions) -> Tensor:
            values = base.of(at, self.device)
            changed = other.of(at, self.device).index_select(1, chosen)
            if not has[at].all():
                mask = torch.from_numpy(has[at]).to(self.device)[:, None]
                changed = torch.where(mask, changed, values.index_select(1, chosen))
            return values.index_copy_(1, chosen, changed)

        return Stacked(made, np.where(base.present(count), np.arange(count), -1))

    def mixed(self, array: npt.NDArray[Any], weights: npt.NDArray[np.float64]) -> Stacked:
        """Weighted means of K models, in double precision and in their order, as `parameters.mixed` has it."""
        models, shares = self.uploads.get(array)[0], normalised_rows(weights)

        def made(at: Positions) -> Tensor:
            sent = torch.from_numpy(shares[at]).to(self.device)
            total = torch.zeros(len(at), models.shape[1], dtype=torch.float64, device=self.device)
            for k in range(len(models)):
                total += sent[:, k : k + 1] * models[k]
            return total.to(torch.float32)

        return Stacked(made, np.arange(len(weights)))

    def summed(self, parts: Sequence[Stacked], factors: npt.NDArray[np.float64]) -> Stacked:
        """Models times their (n, parts) factors, in double precision and in their order, as `parameters.summed`."""
        count = len(factors)
        there = np.stack([part.present(count) for part in parts], axis=1)
        used = np.where(there, factors, 0.0)

        def made(at: Positions) -> Tensor:
            sent = torch.from_numpy(used[at]).to(self.device)
            total = torch.zeros(len(at), self.width, dtype=torch.float64, device=self.device)
            for number, part in enumerate(parts):
                factor = sent[:, number : number + 1]
                values = part.of(at, self.device).to(torch.float64)
                # A row that points at nothing has somebody else's numbers, which may be anything.
                total += torch.where(factor == 0.0, 0.0, factor * values)
            return total.to(torch.float32)

        return Stacked(made, np.where(there.any(axis=1), np.arange(count), -1))


def row_sums(table: Tensor) -> Tensor:
    """The sum of every row, halves folded onto each other: a row's bits do not depend on how many rows there are.

    >>> row_sums(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
    [6.0, 15.0]
    """
    while table.shape[1] > 1:
        half = (table.shape[1] + 1) // 2
        folded = table[:, :half].clone()
        folded[:, : table.shape[1] - half] += table[:, half:]
        table = folded
    return table.sum(dim=1)


def fixed_point_sums(
    models: ClientRows,
    row_of: Positions,
    weights: npt.NDArray[np.float64],
    exponents: npt.NDArray[np.int64],
    columns: tuple[int, int],
    chunks: Chunks,
) -> PartialSums:
    """`parameters.partial_sums` of some rows of a table, on its device: the same integers as anywhere.

    `weights` is (K, rows). Returns the rows of it that are in use, and their sums over the chosen columns.
    """
    start, stop = columns
    used = used_rows(weights)
    factors = weights[used] * np.exp2(exponents[used].astype(np.float64))[:, None]
    members = [np.flatnonzero(factor) for factor in factors]
    sizes = [len(at) for at in members]
    # One copy: for each sum the rows of its members, and what they are multiplied with.
    each = [*(row_of[at].astype(np.float64) for at in members), *map(np.take, factors, members)]
    sent = torch.from_numpy(np.concatenate([np.zeros(0), *each])).to(models.device)
    pieces = sent.split([*sizes, *sizes])
    rows = [piece.to(torch.int64) for piece in pieces[: len(sizes)]]

    def piece(at: Positions) -> Tensor:
        first, last = start + int(at[0]), start + int(at[-1]) + 1
        totals = torch.zeros(len(used), len(at), dtype=torch.int64, device=models.device)
        for k, _ in enumerate(sizes):
            values = models.columns(row_of[members[k]], rows[k], first, last).to(torch.float64)
            factor = pieces[len(sizes) + k]
            totals[k] = values.mul_(factor[:, None]).round_().to(torch.int64).sum(dim=0)
        return totals

    scratch = SCRATCH
    if models.device.type == "cuda":  # float32, float64 and int64 of each number, and as much to spare
        scratch = min(scratch, free_memory(models.device) // 40)
    chunks.most = max(1, scratch // max([1, *sizes]))
    found = chunks.run(stop - start, piece)
    totals = torch.cat(found, dim=1) if found else torch.zeros(len(used), 0, dtype=torch.int64)
    return used, totals.cpu().numpy()
