"""Local training of all clients of a device at once, in chunks that fit its memory.

A chunk is one batched model. Batches are padded to the same length, the rows that fill them up weigh nothing;
clients are in order of their number of steps, so that those who are done are simply left out at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.rules import Memory, Rule
from lightning_modules.engines.stacked.batched import Anchors, Batch, BatchedModel
from lightning_modules.engines.stacked.optimizers import SlabOptimizer, Slabs

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """Local training of n clients, as tables. Places are rows of `rows` and of the tables, all clients' in one."""

    start: Callable[
        [npt.NDArray[np.int64]], Tensor
    ]  # (m, P) models of the clients at some positions, fresh memory
    batches: Sequence[Sequence[npt.NDArray[np.int64]]]  # of each client: the places of each of its batches
    rows: Tensor  # sample at each place, where the samples are looked up
    seeds: Sequence[int]
    slabs: Slabs = field(default_factory=dict)  # (n, parameters) optimizer states
    steps: npt.NDArray[np.int64] | None = None  # optimizer steps before
    tables: dict[str, Tensor] = field(
        default_factory=dict
    )  # by place: frozen, sample_weights, outputs of penalties
    scale: Tensor | None = None  # (n,)
    penalties: Sequence[Penalty] = ()
    anchors: Anchors = field(default_factory=list)
    only: tuple[str, ...] | None = None  # tensors that are trained, by name; None: all
    rule: Rule | None = None  # how a step follows from gradients
    memory: Memory = field(default_factory=dict)  # what it remembers: (n, parameters), or (n,) numbers
    rate: float = 1.0  # what the learning rate is multiplied with in this round

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def several(self) -> int:
        """Mini-batches that a step takes."""
        return 1 if self.rule is None else len(self.rule.passes)


@dataclass(frozen=True)
class Outcome:
    """What came out of it: all still on the device."""

    models: Tensor  # (n, P)
    slabs: Slabs
    steps: npt.NDArray[np.int64]  # optimizer steps after
    objective: Tensor  # (n,) float64: mean over the steps
    memory: Memory = field(default_factory=dict)  # what the rule remembers then


class Chunks:
    """How many clients fit at a time: halved when memory runs out, and remembered.

    A `fixed` number is never halved: results would depend on the memory of a device.
    """

    def __init__(self, most: int | None = None, *, fixed: bool = False) -> None:
        self.most, self.fixed = most, fixed
        self.notes: list[str] = []

    def run(self, count: int, part: Callable[[npt.NDArray[np.int64]], T]) -> list[T]:
        """`part` for all of `count` positions, in pieces that fit."""
        found, at = [], 0
        while at < count:
            size = min(count - at, self.most or count)
            try:
                found.append(part(np.arange(at, at + size)))
                at += size
            except torch.OutOfMemoryError:
                if size == 1:
                    raise  # one client alone does not fit: nothing is left to divide
                if self.fixed:
                    raise UserError(
                        f"Expected {size} clients at a time to fit the device under determinism=exact, and they do "
                        f"not: set local.chunk={(size + 1) // 2}, the same for all runs that are compared, or "
                        "determinism=seeded."
                    ) from None
                self.most = (size + 1) // 2
                self.notes.append(
                    f"Out of device memory with {size} clients at a time: continuing with {self.most} "
                    f"(local.chunk={self.most} begins with that)."
                )
            # Outside the handler: its traceback would keep the tensors of the failed attempt alive.
            if self.notes and torch.cuda.is_available():
                torch.cuda.empty_cache()
        return found


class StackedTraining:
    """Trains the clients of `Work`.

    `fixed` clients to a chunk, filled up, with batches of `batch` rows and full passes of `samples`: every shape
    that a kernel sees is the same, whatever clients are beside each other.
    """

    def __init__(
        self,
        model: BatchedModel,
        optimizer: SlabOptimizer,
        *,
        batch: int | None = None,
        samples: int | None = None,
        fixed: int | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._batch, self._pass, self._fixed = batch, samples, fixed
        self.chunks = Chunks(fixed, fixed=fixed is not None)

    def run(self, work: Work) -> Outcome:
        """All clients, chunk by chunk."""
        parts = self.chunks.run(len(work), lambda at: self._chunk(work, at))
        models, slabs, objective, memory = (list(each) for each in zip(*parts, strict=True))
        before = np.zeros(len(work), np.int64) if work.steps is None else work.steps
        steps = before + np.array([len(batches) // work.several for batches in work.batches])
        return Outcome(
            _joined(models),
            {name: _joined([each[name] for each in slabs]) for name in slabs[0]},
            steps,
            _joined(objective),
            {name: _joined([each[name] for each in memory]) for name in memory[0]},
        )

    def gradients(self, work: Work) -> tuple[Tensor, Tensor]:
        """(n, P) gradients of the mean loss over all batches of each client, and (n,) that loss; nothing moves."""
        parts = self.chunks.run(len(work), lambda at: self._gradients_of(work, at))
        return _joined([gradient for gradient, _ in parts]), _joined([value for _, value in parts])

    def _gradients_of(self, work: Work, at: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        model, device = self.model, self.model.device
        order = np.argsort([-len(work.batches[i]) for i in at], kind="stable")
        inside = self._filled(at[order])
        table = _Table.of(work, inside, len(at), self._pass if self._fixed else None, model)
        start = work.start(inside)
        theta, buffers = start[:, : model.parameters], start[:, model.parameters :]
        total = torch.zeros(len(inside), dtype=torch.float64, device=device)
        gradient = torch.zeros(start.shape, device=device)
        shares = table.lengths / np.maximum(table.lengths.sum(axis=1, keepdims=True), 1)
        share = torch.from_numpy(shares.astype(np.float32)).to(device, non_blocking=True)
        model.evaluating()
        for step in range(table.lengths.shape[1]):
            running = len(inside) if self._fixed else int((table.lengths[:, step] > 0).sum())
            batch = table.batch(step, running, None)
            compute = model.gradient([], batch, [], training=False)
            found, value, _ = compute(theta[:running], buffers[:running], batch)
            now = share[:running, step]
            # Whoever is done has the rows of somebody else here, which may be anything.
            gradient[:running, : model.parameters] += torch.where(now[:, None] > 0, now[:, None] * found, 0.0)
            total[:running] += torch.where(now > 0, now * value, 0.0)
        gradient[:, : model.parameters] = model.of_trained(gradient[:, : model.parameters])
        back = _placed(np.argsort(order), len(inside), device)
        return (
            (gradient, total)
            if back is None
            else (gradient.index_select(0, back), total.index_select(0, back))
        )

    def _chunk(self, work: Work, at: npt.NDArray[np.int64]) -> tuple[Tensor, Slabs, Tensor, Memory]:
        """Clients at some positions of `work`: their models, states and mean objectives."""
        counts = np.array([len(work.batches[i]) for i in at])
        order = np.argsort(-counts, kind="stable")  # whoever has more steps comes first
        inside = self._filled(at[order])
        table = _Table.of(work, inside, len(at), self._batch, self.model, training=True)
        width = self.model.parameters
        start = work.start(inside)
        theta, buffers = start[:, :width].contiguous(), start[:, width:].contiguous()
        where = _placed(inside, len(work), self.model.device)
        slabs = {
            name: slab if where is None else slab.index_select(0, where) for name, slab in work.slabs.items()
        }
        slabs = {name: slab.clone() if slab is work.slabs[name] else slab for name, slab in slabs.items()}
        memory = {
            name: value.clone() if where is None else value.index_select(0, where)
            for name, value in work.memory.items()
        }
        objective = self._steps(work, table, theta, buffers, slabs, memory, inside, where)
        models = torch.cat([theta, buffers], dim=1) if buffers.shape[1] else theta
        back = _placed(np.argsort(order), len(inside), self.model.device)
        if back is None:
            return models, slabs, objective, memory
        return (
            models.index_select(0, back),
            {name: slab.index_select(0, back) for name, slab in slabs.items()},
            objective.index_select(0, back),
            {name: value.index_select(0, back) for name, value in memory.items()},
        )

    def _filled(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of a chunk, the first one again and again where a chunk has a fixed number of clients."""
        missing = max(0, (self.chunks.most or 0) - len(positions)) if self._fixed else 0
        return np.concatenate([positions, np.repeat(positions[:1], missing)])

    def _steps(
        self,
        work: Work,
        table: _Table,
        theta: Tensor,
        buffers: Tensor,
        slabs: Slabs,
        memory: Memory,
        inside: npt.NDArray[np.int64],
        where: Tensor | None,
    ) -> Tensor:
        """All steps of a chunk, in place; returns the mean objectives."""
        model, device = self.model, self.model.device
        before = np.zeros(len(work), np.int64) if work.steps is None else work.steps
        several = work.several
        counters = self.optimizer.counters(before[inside], table.lengths[:, ::several], device, work.rate)
        anchors = [
            {
                name: (value, shared) if shared or where is None else (value.index_select(0, where), shared)
                for name, (value, shared) in each.items()
            }
            for each in work.anchors
        ]
        scale = work.scale if work.scale is None or where is None else work.scale.index_select(0, where)
        moving = None if work.only is None else model.columns_of(work.only)
        total = torch.zeros(len(inside), dtype=torch.float64, device=device)
        for step in range(table.lengths.shape[1] // several):
            first = step * several
            running = int((table.lengths[:, first] > 0).sum())
            # Fixed shapes: nobody leaves, some do nothing.
            stays = len(inside) if self._fixed or model.compiles else running
            active = table.active(first) if stays > running else None
            batches = [table.batch(first + number, stays, scale) for number in range(several)]
            now = [
                {name: (v if shared else v[:stays], shared) for name, (v, shared) in each.items()}
                for each in anchors
            ]
            lengths = table.lengths[:running, first : first + several]
            model.training(step, shortest=int(lengths.min(initial=2)))
            views = {name: slab[:stays] for name, slab in slabs.items()}
            if work.rule is None:
                compute = model.gradient(work.penalties, batches[0], now)
                gradient, value, new = compute(theta[:stays], buffers[:stays], batches[0])
            else:
                compute = model.ruled(work.rule, work.penalties, batches, now)
                known = {name: each[:stays] for name, each in memory.items()}
                gradient, value, new, then = compute(theta[:stays], buffers[:stays], known)
                for name, each in then.items():
                    _put(memory[name][:stays], each, active)
            if work.rule is not None and work.rule.moves:
                _put(theta[:stays], gradient, active)
            else:
                moves = _both(active, moving)
                self.optimizer.step(theta[:stays], gradient, views, moves, counters, step)
            if buffers.shape[1]:
                buffers[:stays] = new if active is None else torch.where(active, new, buffers[:stays])
            total[:stays] += value if active is None else torch.where(active[:, 0], value, 0.0)
        return total * several / table.counts


@dataclass(frozen=True)
class _Table:
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
    ) -> _Table:
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
        return _Table(
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

    def batch(self, step: int, first: int, scale: Tensor | None) -> Batch:
        """The batches of the first clients in one step."""
        places, lookup = self.places[:first, step], self.lookup[:first, step]
        rows = self.work.rows.index_select(0, lookup.reshape(-1)).reshape(places.shape)
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


def _put(rows: Tensor, values: Tensor, active: Tensor | None) -> None:
    """Write values into rows; only those of clients that are active, if not all are."""
    if active is not None:
        values = torch.where(active if rows.dim() > 1 else active[:, 0], values, rows)
    rows.copy_(values)


def _both(active: Tensor | None, moving: Tensor | None) -> Tensor | None:
    """What moves in a step: (n, 1) clients, (1, parameters) columns, or both; None: everything."""
    if active is None or moving is None:
        return moving if active is None else active
    return active & moving


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


def _placed(positions: npt.NDArray[np.int64], count: int, device: torch.device) -> Tensor | None:
    """Positions as an index on the device; None if they are all of them in order, and nothing has to move."""
    if len(positions) == count and np.array_equal(positions, np.arange(count)):
        return None
    return torch.from_numpy(positions).to(device, non_blocking=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
