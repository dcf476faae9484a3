"""References of many clients at once, on their device: what `wire.py` resolves client by client, as tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.device_states import DeviceStates, Positions, taken
from actors.wire import ClientSide
from archipelago.strategies.parameters import PartialSums, Vector, normalised_rows, used_rows
from lightning_modules.flat import is_value, tensor_of

SCRATCH = 2**25  # numbers that a sum of models works on at a time


@dataclass(frozen=True)
class Stacked:
    """What a reference means for n clients: row `rows[i]` of `values` for client i, or all of it for everyone.

    A row of -1 points at nothing. `key` tells whether two of them are the same values: it is None where that
    cannot be known.
    """

    values: Tensor
    rows: Positions | None = None  # None: `values` is what every client has
    key: Hashable = None

    def present(self, count: int) -> npt.NDArray[np.bool_]:
        """Which of n clients have one."""
        return np.ones(count, bool) if self.rows is None else self.rows >= 0

    def of(self, at: Positions, device: torch.device) -> Tensor:
        """(m, ...) values of the clients at some positions, as memory of their own."""
        if self.rows is None:
            return self.values.expand(len(at), *self.values.shape).clone()
        return taken(self.values, np.maximum(self.rows[at], 0), device)


class SlabResults(Mapping[int, Vector]):
    """Models that a call made, on the device; client by client they are plain arrays."""

    def __init__(self, clients: Sequence[int], values: Tensor) -> None:
        self.values_on_device = values
        self.row = {client: row for row, client in enumerate(clients)}

    def __getitem__(self, client: int) -> Vector:
        value: Vector = self.values_on_device[self.row[client]].cpu().numpy()
        value.flags.writeable = False
        return value

    def __iter__(self) -> Any:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)


class Uploads:
    """Arrays of the server on the device, once: recognised by their read-only memory.

    What a round has not asked for is let go at its end; the models at its end are those that the next one begins with.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[Hashable, tuple[npt.NDArray[Any], Tensor]] = {}
        self._asked: set[Hashable] = set()

    def get(self, array: npt.NDArray[Any]) -> tuple[Tensor, Hashable]:
        """The array on the device, and a key that stands for its content while the round lasts."""
        if not is_value(array):
            return self.send(array), None
        key = ("array", array.ctypes.data, array.shape, array.strides, array.dtype.str)
        if key not in self._kept:
            # The array is kept: as long as it is alive, its address is its own.
            self._kept[key] = (array, tensor_of(array).to(self._device))
        self._asked.add(key)
        return self._kept[key][1], key

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        """An array on the device that nobody will ask for again."""
        return tensor_of(array).to(self._device, copy=True)

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
        own = self.states.values(name, "model", clients, self.width)
        rows = np.where(has, np.arange(len(clients)), -1)
        if has.all() or default is None:
            return Stacked(own, rows, ("private", name, self.states.version(name), tuple(clients)))
        return self._filled(own, has, default)

    def result(self, handle: str, clients: Sequence[int], default: Stacked | None) -> Stacked:
        """What each client made in an earlier call, or what it started from if that never arrived."""
        made = self.side.results.get(handle, {})
        if not isinstance(made, SlabResults):
            return self._result_of_loop(made, clients, default)
        rows = np.array([made.row.get(client, -1) for client in clients], np.int64)
        if (rows >= 0).all() or default is None:
            return Stacked(made.values_on_device, rows, ("result", handle))
        own = taken(made.values_on_device, np.maximum(rows, 0), self.device)
        return self._filled(own, rows >= 0, default)

    def _result_of_loop(
        self, made: Mapping[int, Vector], clients: Sequence[int], default: Stacked | None
    ) -> Stacked:
        """The same, where the call went client by client."""
        found = self.values([made.get(client) for client in clients])
        has = found.present(len(clients))
        if has.all() or default is None:
            return found
        return self._filled(found.of(np.arange(len(clients)), self.device), has, default)

    def _filled(self, own: Tensor, has: npt.NDArray[np.bool_], default: Stacked) -> Stacked:
        mask = torch.from_numpy(has).to(self.device)[:, None]
        everyone = np.arange(len(has))
        rows = np.where(has | default.present(len(has)), everyone, -1)
        return Stacked(torch.where(mask, own, default.of(everyone, self.device)), rows)

    def merged(self, base: Stacked, other: Stacked, columns: npt.NDArray[np.int64], count: int) -> Stacked:
        """Models some columns of which come from others; who has no other keeps the base."""
        everyone = np.arange(count)
        values = base.of(everyone, self.device)
        at = self.uploads.get(columns)[0]
        changed = other.of(everyone, self.device).index_select(1, at)
        has = other.present(count)
        if not has.all():
            mask = torch.from_numpy(has).to(self.device)[:, None]
            changed = torch.where(mask, changed, values.index_select(1, at))
        values.index_copy_(1, at, changed)
        return Stacked(values, np.where(base.present(count), everyone, -1))

    def mixed(self, array: npt.NDArray[Any], weights: npt.NDArray[np.float64]) -> Stacked:
        """Weighted means of K models, in double precision and in their order, as `parameters.mixed` has it."""
        models = self.uploads.get(array)[0]
        shares = torch.from_numpy(normalised_rows(weights)).to(self.device)
        total = torch.zeros(len(weights), models.shape[1], dtype=torch.float64, device=self.device)
        for k in range(len(models)):
            total += shares[:, k : k + 1] * models[k]
        return Stacked(total.to(torch.float32), np.arange(len(weights)))

    def summed(self, parts: Sequence[Stacked], factors: npt.NDArray[np.float64]) -> Stacked:
        """Models times their (n, parts) factors, in double precision and in their order, as `parameters.summed`."""
        count = len(factors)
        everyone, has = np.arange(count), np.zeros(count, bool)
        total = torch.zeros(count, self.width, dtype=torch.float64, device=self.device)
        for number, part in enumerate(parts):
            there = part.present(count)
            has |= there
            factor = torch.from_numpy(np.where(there, factors[:, number], 0.0)).to(self.device)[:, None]
            values = part.of(everyone, self.device).to(torch.float64)
            # A row that points at nothing has somebody else's numbers, which may be anything.
            total += torch.where(factor == 0.0, 0.0, factor * values)
        return Stacked(total.to(torch.float32), np.where(has, everyone, -1))


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
    models: Tensor,
    row_of: Positions,
    weights: npt.NDArray[np.float64],
    exponents: npt.NDArray[np.int64],
    columns: tuple[int, int],
) -> PartialSums:
    """`parameters.partial_sums` of some rows of a slab, on its device: the same integers as anywhere.

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
    totals = torch.zeros(len(used), stop - start, dtype=torch.int64, device=models.device)
    for k, size in enumerate(sizes):
        at, factor = pieces[k].to(torch.int64), pieces[len(sizes) + k]
        width = max(1, SCRATCH // max(size, 1))
        for first in range(start, stop, width):
            last = min(first + width, stop)
            values = models[:, first:last].index_select(0, at).to(torch.float64)
            products = values.mul_(factor[:, None]).round_().to(torch.int64)
            totals[k, first - start : last - start] = products.sum(dim=0)
    return used, totals.cpu().numpy()
