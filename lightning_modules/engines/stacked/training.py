"""Local training of all clients of a device at once, in chunks that fit its memory.

A chunk is one batched model. Batches are padded to the same length, the rows that fill them up weigh nothing;
clients are in order of their number of steps, so that those who are done are simply left out at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.strategies.rules import Memory
from lightning_modules.engines.stacked.batch_table import BatchTable
from lightning_modules.engines.stacked.batched import Anchors, Batch, BatchedModel
from lightning_modules.engines.stacked.chunks import Chunks
from lightning_modules.engines.stacked.device_memory import ClientRows, DeviceMemory, Positions
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
        memory: DeviceMemory,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._batch, self._pass, self._fixed = batch, samples, fixed
        self._memory = memory
        self.chunks = Chunks(memory, fixed, fixed=fixed is not None)
        self.ran = False  # whether it trained anybody

    def run(self, work: Work) -> Outcome:
        """All clients, chunk by chunk; what comes out is written to tables as it is made."""
        self.ran = True
        before = np.zeros(len(work), np.int64) if work.steps is None else work.steps
        steps = before + np.array([len(batches) // work.several for batches in work.batches])
        count, new = len(work), self._memory.empty
        names = self.optimizer.names if work.keeps_slabs else ()
        into = _Tables(
            models=new(count, self.model.spec.size),
            slabs={name: new(count, self.optimizer.width) for name in names},
            kept={name: new(count, self.model.spec.size) for name in work.kept},
        )
        measured = self.chunks.run(count, lambda at: self._chunk(work, at, into))
        return Outcome(into.models, into.slabs, steps, torch.cat(measured).cpu().numpy(), into.kept)

    def gradients(self, work: Work) -> tuple[ClientRows, npt.NDArray[np.float64]]:
        """(n, P) gradients of the mean loss over all batches of each client; nothing moves.

        The other value is (n, 2): that loss, and the largest absolute value of the gradient.
        """
        into = self._memory.empty(len(work), self.model.spec.size)
        measured = self.chunks.run(len(work), lambda at: self._gradients_of(work, at, into))
        return into, torch.cat(measured).cpu().numpy()

    def _gradients_of(self, work: Work, at: Positions, into: ClientRows) -> Tensor:
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
        return _written(into, at, _rows(gradient, back), _rows(total, back))

    def _chunk(self, work: Work, at: Positions, into: _Tables) -> Tensor:
        """Clients at some positions of `work`, into the tables; returns what is measured of them."""
        counts = np.array([len(work.batches[i]) for i in at])
        order = np.argsort(-counts, kind="stable")  # whoever has more steps comes first
        inside = self._filled(at[order])
        table = BatchTable.of(work, inside, len(at), self._batch, self.model, training=True)
        width = self.model.parameters
        start = work.start(inside)
        theta, buffers = start[:, :width].contiguous(), start[:, width:].contiguous()
        del start
        slabs, memory = work.slabs(inside), work.memory(inside)
        objective = self._steps(work, table, theta, buffers, slabs, memory, inside)
        back = _placed(np.argsort(order), len(inside), self.model.device)
        for name, rows in into.slabs.items():
            rows.write(int(at[0]), _rows(slabs[name], back))
        objective = _rows(objective, back)
        for name, rows in into.kept.items():
            kept = _rows(memory[name], back)
            objective = torch.where(torch.isfinite(kept).all(dim=1), objective, torch.nan)
            whole = torch.cat([kept, _rows(buffers, back)], dim=1) if buffers.shape[1] else kept
            rows.write(int(at[0]), whole)
        models = torch.cat([theta, buffers], dim=1) if buffers.shape[1] else theta
        return _written(into.models, at, _rows(models, back), objective)

    def _filled(self, positions: Positions) -> Positions:
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
        inside: Positions,
    ) -> Tensor:
        """All steps of a chunk, in place; returns the mean objectives."""
        model, device = self.model, self.model.device
        before = np.zeros(len(work), np.int64) if work.steps is None else work.steps
        several = work.several
        counters = self.optimizer.counters(before[inside], table.lengths[:, ::several], device, work.rate)
        anchors = work.anchors(inside)
        scale = work.scale
        if scale is not None and (where := _placed(inside, len(work), device)) is not None:
            scale = scale.index_select(0, where)
        moving = None if work.only is None else model.columns_of(work.only)
        total = torch.zeros(len(inside), dtype=torch.float64, device=device)
        # Fixed shapes: nobody leaves, some do nothing.
        everyone = self._fixed or model.compiles
        here = (
            (table.lengths[:, ::several] > 0).sum(axis=0).tolist()
        )  # clients that are not done, step by step
        for step, running in enumerate(here[: table.lengths.shape[1] // several]):
            first = step * several
            stays = len(inside) if everyone else running
            active = table.active(first) if stays > running else None
            batches = [table.batch(first + number, stays, scale) for number in range(several)]
            if several == 1 and step + 1 < len(here):
                table.prepare(step + 1, len(inside) if everyone else here[step + 1])
            now = _first(anchors, stays)
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


@dataclass(frozen=True)
class _Tables:
    """Where the chunks of a training are written."""

    models: ClientRows
    slabs: dict[str, ClientRows]
    kept: dict[str, ClientRows]


def _written(into: ClientRows, at: Positions, rows: Tensor, objective: Tensor) -> Tensor:
    """Write a chunk's models; (m, 2): its objectives, and the largest absolute value of each model."""
    into.write(int(at[0]), rows)
    return torch.stack([objective, rows.abs().amax(dim=1).to(torch.float64)], dim=1)


def _rows(values: Tensor, back: Tensor | None) -> Tensor:
    """The rows of a chunk in the order of its clients; `back` is None if they are."""
    return values if back is None else values.index_select(0, back)


def _first(anchors: Anchors, count: int) -> Anchors:
    """What penalties hold constant, of the first clients of a chunk."""
    return [
        {name: (value if shared else value[:count], shared) for name, (value, shared) in each.items()}
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


def _placed(positions: Positions, count: int, device: torch.device) -> Tensor | None:
    """Positions as an index on the device; None if they are all of them in order, and nothing has to move."""
    if len(positions) == count and np.array_equal(positions, np.arange(count)):
        return None
    return torch.from_numpy(positions).to(device, non_blocking=True)
