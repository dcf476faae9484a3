"""What models say about the samples of many clients: model by model over everybody's samples, on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.requests import ClientSamples
from actors.stacking import Stacked
from archipelago.core.errors import UserError
from lightning_modules.engines.stacked.batched import BatchedModel
from lightning_modules.engines.stacked.chunks import Chunks
from lightning_modules.engines.stacked.device_memory import DeviceMemory, Positions, is_out_of_memory

KEPT = 256e6  # bytes of outputs that are kept for the rest of a round
WASTE = 2.0  # padded samples per real one at most, where every client has a model of its own


@dataclass(frozen=True)
class Places:
    """The samples of some clients in one split, one after the other; a place is a position in that list."""

    clients: tuple[int, ...]
    split: str
    sizes: Positions
    starts: Positions  # place of each client's first sample
    index: npt.NDArray[np.int64]  # samples of the federation
    rows: Tensor  # samples of the block, where they are looked up
    owner: Tensor  # position of the client
    lengths: Tensor  # sizes, on the device

    def __len__(self) -> int:
        return len(self.index)

    def rows_at(self, places: Positions, sent: Tensor) -> Tensor:
        """The samples at some places, given on the host and on the device: looked up where the samples are."""
        here = sent if self.rows.device == sent.device else torch.from_numpy(places)
        return self.rows.index_select(0, here)

    def of(self, at: Positions) -> Positions:
        """The places of the clients at some positions, one after the other."""
        parts = [np.arange(self.starts[i], self.starts[i] + self.sizes[i]) for i in at]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class PlacesOf:
    """Makes `Places`, and remembers the last few: in most rounds the same clients are asked."""

    REMEMBERED = 8

    def __init__(self, clients: Mapping[int, ClientSamples], model: BatchedModel) -> None:
        self._clients, self._model = clients, model
        self._known: dict[tuple[tuple[int, ...], str], Places] = {}

    def get(self, clients: Sequence[int], split: str) -> Places:
        """The samples of some clients in one split."""
        key = (tuple(clients), split)
        if key not in self._known:
            while len(self._known) >= self.REMEMBERED:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._make(*key)
        return self._known[key]

    def _make(self, clients: tuple[int, ...], split: str) -> Places:
        lists = [getattr(self._clients[client], split) for client in clients]
        sizes = np.array([len(each) for each in lists], np.int64)
        index = np.concatenate(lists) if lists else np.zeros(0, np.int64)
        device = self._model.device
        samples = self._model.samples
        owner = np.repeat(np.arange(len(clients), dtype=np.int32), sizes)
        sent = torch.from_numpy(np.concatenate([owner, sizes.astype(np.int32)])).to(device)
        return Places(
            clients,
            split,
            sizes,
            starts=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64),
            index=index,
            rows=torch.from_numpy(samples.rows(index)).to(samples.rows_device),
            owner=sent[: len(owner)],
            lengths=sent[len(owner) :].to(torch.int64),
        )


class StackedOutputs:
    """Outputs (or features) of references on places; those of known models are kept while the round lasts."""

    def __init__(self, model: BatchedModel, memory: DeviceMemory, *, features: bool = False) -> None:
        self.model, self._features = model, features
        self._memory, self.chunks = memory, Chunks(memory)
        self._kept: dict[Hashable, Tensor] = {}
        self._bytes = 0

    def forget(self) -> None:
        """The round is over: its models will not be asked for again."""
        self._kept.clear()
        self._bytes = 0

    def of(self, what: Stacked, places: Places) -> Tensor:
        """(places, outputs) of each client's model; zeros for a client without one."""
        key = None if what.key is None else (what.key, _bytes(what.rows), places.clients, places.split)
        found = None if key is None else self._kept.get(key)
        if found is None:
            found = self._keep(key, self._compute(what, places))
        return found

    def of_each(self, models: Stacked, places: Places) -> list[Tensor]:
        """(places, outputs) of each of K models that all clients share."""
        return [self.of_one(models, k, places) for k in range(len(models.shared))]

    def of_one(self, models: Stacked, k: int, places: Places) -> Tensor:
        """(places, outputs) of model k of K, on everybody's samples."""
        return self.of(
            Stacked(models.shared[k], None, None if models.key is None else (models.key, k)), places
        )

    def _keep(self, key: Hashable, outputs: Tensor) -> Tensor:
        size = outputs.numel() * outputs.element_size()
        if key is not None and self._bytes + size <= KEPT:
            self._kept[key] = outputs
            self._bytes += size
        return outputs

    def _compute(self, what: Stacked, places: Places) -> Tensor:
        if what.rows is None:
            return self._pass(what.shared, places.rows)
        everyone = np.arange(len(places.clients))
        used = np.unique(what.rows[what.rows >= 0])
        known = [self._known(what, int(row), places) for row in used]
        if len(used) and all(table is not None for table in known):
            return self._chosen(what, used, known, places)
        if len(used) > max(1, len(everyone) // 2) and not self.model.exact:
            return self._of_own_models(what, places)
        return self._model_by_model(what, used, places)

    def _known(self, what: Stacked, row: int, places: Places) -> Tensor | None:
        """What model `row` says about everybody, if that was asked before in this round."""
        if what.key is None:
            return None
        return self._kept.get(((what.key, row), _bytes(None), places.clients, places.split))

    def _chosen(self, what: Stacked, used: Positions, known: Sequence[Any], places: Places) -> Tensor:
        """Each client's part of tables that are there already."""
        assert what.rows is not None
        position = np.searchsorted(used, np.maximum(what.rows, used[0]))
        chosen = torch.from_numpy(position).to(self.model.device).index_select(0, places.owner)
        table = torch.stack(list(known))
        made = table[chosen, torch.arange(len(places), device=self.model.device)]
        return self._without(made, what.rows >= 0, places)

    def _without(self, outputs: Tensor, has: npt.NDArray[np.bool_], places: Places) -> Tensor:
        """Zeros for clients that have no model."""
        if has.all():
            return outputs
        counts = torch.from_numpy(has).to(self.model.device).index_select(0, places.owner)
        return torch.where(counts.reshape([-1] + [1] * (outputs.dim() - 1)), outputs, 0.0)

    def _model_by_model(self, what: Stacked, used: Positions, places: Places) -> Tensor:
        """K models, each on the samples of all clients that have it."""
        assert what.rows is not None
        device = self.model.device
        groups = [places.of(np.flatnonzero(what.rows == row)) for row in used]
        listed = np.concatenate([*groups, np.zeros(0, np.int64)])
        order = torch.from_numpy(listed).to(device)
        rows = places.rows_at(listed, order)
        ends = np.cumsum([len(group) for group in groups])
        parts = [
            self._pass(what.one(int(row), device), rows[end - len(group) : end])
            for row, group, end in zip(used, groups, ends, strict=True)
            if len(group)
        ]
        if not parts:
            return self._nothing(what, places)
        joined = torch.cat(parts)
        return joined.new_zeros(len(places), *joined.shape[1:]).index_copy_(0, order, joined)

    def _of_own_models(self, what: Stacked, places: Places) -> Tensor:
        """A model for each client: batched, clients of like sizes together so that little is padded."""
        assert what.rows is not None
        made: Tensor | None = None
        there = np.flatnonzero((what.rows >= 0) & (places.sizes > 0))
        for group in _alike(there, places.sizes):
            parts = self.chunks.run(len(group), functools.partial(self._padded, what, places, group))
            for outputs, at in parts:
                if made is None:
                    made = outputs.new_zeros(len(places), *outputs.shape[1:])
                made.index_copy_(0, at, outputs)
        return self._nothing(what, places) if made is None else made

    def _nothing(self, what: Stacked, places: Places) -> Tensor:
        """Zeros for everybody: nobody has a model, or whoever has one has no samples."""
        any_row = torch.zeros(1, dtype=torch.int32).to(places.rows.device)
        shape = self._pass(what.one(0, self.model.device), any_row).shape[1:]
        return torch.zeros(len(places), *shape, device=self.model.device)

    def _padded(
        self, what: Stacked, places: Places, among: Positions, chosen: Positions
    ) -> tuple[Tensor, Tensor]:
        """Some of a group of clients, each under its own model: (outputs, their places)."""
        assert what.rows is not None
        group = among[chosen]
        device, sizes = self.model.device, places.sizes[group]
        longest = int(sizes.max())
        at = places.starts[group][:, None] + np.minimum(np.arange(longest), sizes[:, None] - 1)
        real = np.arange(longest) < sizes[:, None]
        sent = torch.from_numpy(np.concatenate([at.reshape(-1), np.flatnonzero(real), at[real]])).to(device)
        padded, kept, where = sent.split([at.size, int(real.sum()), int(real.sum())])
        rows = places.rows_at(at.reshape(-1), padded).reshape(at.shape)
        outputs = self._fitting(lambda: self.model.forward_many(what.of(group, device), rows, self._features))
        return outputs.flatten(0, 1).index_select(0, kept), where

    def _pass(self, model: Tensor, rows: Tensor) -> Tensor:
        """One model on many samples."""
        return self._fitting(lambda: self.model.forward_one(model, rows, self._features))

    def _fitting(self, forward: Callable[[], Tensor]) -> Tensor:
        """A forward pass; half as many samples at a time whenever memory runs out."""
        while True:
            try:
                return forward()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not self._kept and not self._memory.can_spill:
                    self._refuse()
                    if self.model.rows_of_a_pass == 1:
                        raise
            if self._kept:
                self.forget()  # they can be computed again
            elif not self._memory.spill():
                self.model.rows_of_a_pass = (self.model.rows_of_a_pass + 1) // 2
                self.chunks.notes.append(
                    "Out of device memory in a forward pass: continuing with "
                    f"{self.model.rows_of_a_pass} samples at a time."
                )
            torch.cuda.empty_cache()

    def _refuse(self) -> None:
        if self.model.exact:
            raise UserError(
                f"Expected {self.model.rows_of_a_pass} samples in a forward pass to fit the device under "
                "determinism=exact, and they do not: set evaluation.batch lower, the same for all runs that "
                "are compared, or determinism=seeded.",
                code="too-little-memory", setting="evaluation.batch",
            ) from None  # fmt: skip


def _alike(positions: Positions, sizes: Positions) -> list[Positions]:
    """Clients in groups of like sizes: a group padded to its largest has at most WASTE times its samples.

    >>> [group.tolist() for group in _alike(np.arange(4), np.array([10, 100, 90, 12]))]
    [[1, 2], [3, 0]]
    """
    order = positions[np.argsort(-sizes[positions], kind="stable")]
    groups: list[list[int]] = []
    for at in order:
        if groups:
            longest, together = sizes[groups[-1][0]], [*groups[-1], int(at)]
            if longest * len(together) <= WASTE * sizes[together].sum():
                groups[-1] = together
                continue
        groups.append([int(at)])
    return [np.array(group) for group in groups]


def _bytes(rows: Positions | None) -> bytes:
    return b"" if rows is None else rows.tobytes()
