"""Local training of all clients of a device at once, in chunks that fit its memory.

A chunk is one batched model. Batches are padded to the same length, the rows that fill them up weigh nothing;
clients are in order of their number of steps, so that those who are done are simply left out at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.strategies.rules import Memory
from lightning_modules.engines.stacked.batch_table import BatchTable
from lightning_modules.engines.stacked.batched import Anchors, Batch, BatchedModel
from lightning_modules.engines.stacked.chunks import Chunks
from lightning_modules.engines.stacked.optimizers import SlabOptimizer, Slabs
from lightning_modules.engines.stacked.work import Outcome, Work


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
        self.ran = False  # whether it trained anybody

    def run(self, work: Work) -> Outcome:
        """All clients, chunk by chunk."""
        self.ran = True
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
        table = BatchTable.of(work, inside, len(at), self._pass if self._fixed else None, model)
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
        table = BatchTable.of(work, inside, len(at), self._batch, self.model, training=True)
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
        table: BatchTable,
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
        anchors = _anchors_at(work.anchors, where)
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
            known = {name: each[:stays] for name, each in memory.items()}
            gradient, value, new = self._gradient(
                work, batches, now, theta[:stays], buffers[:stays], known, active
            )
            if work.rule is not None and work.rule.moves:
                _put(theta[:stays], gradient, active)
            else:
                moves = _both(active, moving)
                self.optimizer.step(theta[:stays], gradient, views, moves, counters, step)
            if buffers.shape[1]:
                buffers[:stays] = new if active is None else torch.where(active, new, buffers[:stays])
            total[:stays] += value if active is None else torch.where(active[:, 0], value, 0.0)
        return total * several / table.counts

    def _gradient(
        self,
        work: Work,
        batches: list[Batch],
        anchors: Anchors,
        theta: Tensor,
        buffers: Tensor,
        memory: Memory,
        active: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, or what the rule makes of it; objective; buffers) of one step; a rule's memory is written."""
        if work.rule is None:
            compute = self.model.gradient(work.penalties, batches[0], anchors)
            gradient, value, new = compute(theta, buffers, batches[0])
            return gradient, value, new
        compute = self.model.ruled(work.rule, work.penalties, batches, anchors)
        gradient, value, new, then = compute(theta, buffers, memory)
        for name, each in then.items():
            _put(memory[name], each, active)
        return gradient, value, new


def _anchors_at(anchors: Anchors, where: Tensor | None) -> Anchors:
    """What penalties hold constant, of the clients of a chunk."""
    return [
        {
            name: (value, shared) if shared or where is None else (value.index_select(0, where), shared)
            for name, (value, shared) in each.items()
        }
        for each in anchors
    ]


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


def _placed(positions: npt.NDArray[np.int64], count: int, device: torch.device) -> Tensor | None:
    """Positions as an index on the device; None if they are all of them in order, and nothing has to move."""
    if len(positions) == count and np.array_equal(positions, np.arange(count)):
        return None
    return torch.from_numpy(positions).to(device, non_blocking=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
