"""The mini-batches of many clients as one table of places, padded to the same length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.randomness import generator
from lightning_modules.engines.stacked.batched import Batch, BatchedModel
from lightning_modules.engines.stacked.work import Work


@dataclass(frozen=True)
class BatchTable:
    """Places, lengths and keys of every batch of a chunk: sent to the device once."""

    work: Work
    model: BatchedModel
    lengths: npt.NDArray[np.int64]  # (n, S) on the host, 0 where a client is done
    places: Tensor  # (n, S, B)
    lookup: Tensor  # the same, where the samples are looked up
    sizes: Tensor  # (n, S) lengths as float32
    keys: Tensor | None  # (n, S, dropout layers)
    counts: Tensor  # (n,) number of steps, at least 1
    drawn: dict[str, Tensor]  # (n, S, B, ...) random numbers of augmentations, by name

    @staticmethod
    def of(
        work: Work,
        inside: npt.NDArray[np.int64],
        real: int,
        batch: int | None,
        model: BatchedModel,
        training: bool = False,
    ) -> BatchTable:
        batches = [work.batches[i] if row < real else [] for row, i in enumerate(inside)]
        steps = max(len(each) for each in batches)
        width = max(batch or 1, max((len(one) for each in batches for one in each), default=1))
        lengths = np.zeros((len(inside), steps), np.int64)
        places = np.zeros((len(inside), steps, width), np.int32)
        for row, each in enumerate(batches):
            for step, one in enumerate(each):
                lengths[row, step] = len(one)
                places[row, step] = one[0] if len(one) else 0  # a row of its own client, so that it is finite
                places[row, step, : len(one)] = one
        device = model.device
        keys = None
        if model.dropouts:
            shape = (len(inside), steps, model.dropouts)
            drawn = np.stack([_keys(work.seeds[i], steps, model.dropouts) for i in inside]).reshape(shape)
            keys = torch.from_numpy(drawn).to(device, non_blocking=True)
        numbers = np.concatenate([lengths, np.maximum(lengths > 0, 0).sum(1, keepdims=True).clip(1)], axis=1)
        sent = torch.from_numpy(numbers.astype(np.float32)).to(device, non_blocking=True)
        on_host = torch.from_numpy(places)
        sent_places = on_host.to(device, non_blocking=True)
        return BatchTable(
            work,
            model,
            lengths,
            sent_places,
            sent_places if model.samples.on_device else on_host,
            sent[:, :steps],
            keys,
            sent[:, steps],
            _drawn(model, [work.seeds[i] for i in inside], lengths, width) if training else {},
        )

    def active(self, step: int) -> Tensor:
        """(n, 1): who has a batch in this step."""
        return self.sizes[:, step : step + 1] > 0

    def _rows(self, step: int, first: int) -> Tensor:
        """(first, B) samples of the first clients in one step."""
        lookup = self.lookup[:first, step]
        return self.work.rows.index_select(0, lookup.reshape(-1)).reshape(lookup.shape)

    def prepare(self, step: int, first: int) -> None:
        """`batch` will be asked for next with these numbers: samples of the host can be gathered ahead."""
        if not self.model.samples.on_device and step < self.lengths.shape[1]:
            self.model.samples.prepare(self._rows(step, first))

    def batch(self, step: int, first: int, scale: Tensor | None) -> Batch:
        """The batches of the first clients in one step."""
        places, rows = self.places[:first, step], self._rows(step, first)
        length = self.sizes[:first, step]
        real = torch.arange(places.shape[1], device=places.device) < length[:, None]
        samples = self.model.samples
        x = samples.inputs(rows)
        if self.drawn:
            now = {name: numbers[:first, step].flatten(0, 1) for name, numbers in self.drawn.items()}
            x = self.model.augment.apply(x.flatten(0, 1), now).reshape(x.shape)
        batch: Batch = {
            "x": x,
            "y": samples.targets(rows),
            "weights": real / length.clamp_min(1.0)[:, None],
            "length": length,
        }
        for name, table in self.work.tables.items():
            found = table.index_select(0, places.reshape(-1))
            batch[name] = found.reshape(*places.shape, *table.shape[1:])
        if scale is not None:
            batch["scale"] = scale[:first]
        if self.keys is not None:
            batch["keys"] = self.keys[:first, step]
        return batch


def _keys(seed: int, steps: int, layers: int) -> npt.NDArray[np.int64]:
    """(steps, layers) 32-bit keys of one client's training."""
    return generator(seed, "dropout").integers(0, 2**32, (steps, layers), np.int64)


def _drawn(
    model: BatchedModel, seeds: Sequence[int], lengths: npt.NDArray[np.int64], width: int
) -> dict[str, Tensor]:
    """The random numbers of all steps: the same as each client would draw for itself, zeros in rows that fill up."""
    found: dict[str, npt.NDArray[Any]] = {}
    if not model.augment:
        return {}
    for row, seed in enumerate(seeds):
        for step in np.flatnonzero(lengths[row]).tolist():
            count = int(lengths[row, step])
            for name, numbers in model.augment.draws(seed, step, count).items():
                if name not in found:
                    found[name] = np.zeros((*lengths.shape, width, *numbers.shape[1:]), numbers.dtype)
                found[name][row, step, :count] = numbers
    return {name: torch.from_numpy(each).to(model.device, non_blocking=True) for name, each in found.items()}
