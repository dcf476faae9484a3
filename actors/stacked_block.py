"""A block whose clients are computed together on one device: the engine `stacked`.

The same requests and answers as `ClientBlock`. Samples, models, optimizer states and frozen outputs stay on the
device; for each stage one table of places goes in and one result comes out. Whatever cannot be batched goes client by
client, as in any other block, and the run says what and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.requests import DeriveRequest, TrainRequest
from actors.stacked_measures import StackedMeasures
from actors.stacking import DeviceSide, SlabResults, fixed_point_sums, row_sums
from actors.wire import Encoded, model_key
from archipelago.core.errors import ClientFailure
from archipelago.core.randomness import torch_seed
from archipelago.strategies.parameters import PartialSums
from archipelago.strategies.penalties import features_of
from lightning_modules.engines.stacked.batched import frozen_and_augmented, is_per_sample
from lightning_modules.engines.stacked.chunks import Chunks
from lightning_modules.engines.stacked.device_memory import ClientRows, Positions
from lightning_modules.engines.stacked.work import Outcome, Work


class StackedBlock(StackedMeasures):
    """All clients of a block at once."""

    # --- local training -----------------------------------------------------------------------------------

    def train(self, request: TrainRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """Local training; the models stay here, on the device, under `request.handle`."""
        odd = [p for p in request.penalties if not is_per_sample(p)]
        sees = bool(request.on_top_of) or any(p.outputs or features_of(p) for p in request.penalties)
        why = frozen_and_augmented(self.model, frozen=sees)
        if why:
            self.engine.say(why)
        if odd:
            self.engine.say(
                f"{type(odd[0]).__name__} is a penalty of outputs that does not declare per_sample = True"
            )
        if not self.batched or odd or why or not request.clients:
            return super().train(request, *arrays)
        stage = f"local training ('{request.slot}')"
        with self._failing_together(request.clients, request.round, stage):
            side, clients = self._device_side(arrays), request.clients
            received = request.start.received_by(clients, side)
            work = self._work(request, side)
            frozen = self.tables.frozen_models(request, side)
            outcome = self.parts.train(work)
            measured = outcome.measured
            arrived = np.asarray(np.isfinite(measured).all(axis=1))
            leaves = self.outbox.alters and request.leaves
            # Before results are kept: a private model may be the start and the result.
            starts = self._starts(request, side) if leaves else []
            self._store(request, outcome, arrived)
            sent = self._leave(request, starts, measured) if leaves else None
        rows = []
        for at, batches in enumerate(work.batches):
            forward = int(frozen[at]) * len(np.unique(np.concatenate(batches))) if frozen[at] else 0
            sizes = np.array([len(batch) for batch in batches]).reshape(-1, len(request.passes))
            steps, seen = len(sizes), int(sizes[:, 0].sum())
            backward = int((sizes * np.array(request.passes)).sum())
            there = 0.0 if sent is None else sent[at]
            rows.append((*measured[at].tolist(), backward, forward, received[at], there, steps, seen))
        return rows

    def _starts(self, request: TrainRequest, side: DeviceSide) -> Sequence[Any]:
        """What each client started from, on the host: the server's own arrays, or one copy of all."""
        start = request.start.stack(request.clients, side)
        if start.key is not None and isinstance(start.key, tuple) and start.key[0] == "array":
            return [request.start.resolve(client, side.side) for client in request.clients]
        table = np.empty((len(request.clients), self.model.spec.size), np.float32)

        def copied(at: Positions) -> None:
            table[at] = start.of(at, self.device).cpu().numpy()

        self.pieces.run(len(table), copied)
        table.flags.writeable = False
        return list(table)

    def _work(self, request: TrainRequest, side: DeviceSide) -> Work:
        """The request as tables."""
        clients, local = request.clients, self.setup.local
        places = self.places.get(clients, "train")
        batches = [
            [places.starts[at] + batch for batch in self._positions(client, request, side)]
            for at, client in enumerate(clients)
        ]
        start = request.start.stack(clients, side)
        missing = np.flatnonzero(~start.present(len(clients)))
        if len(missing):
            raise ClientFailure(
                clients[int(missing[0])], request.round, f"preparing '{request.slot}' training",
                "ValueError: there is no model to start from",
            )  # fmt: skip
        memory, width = request.memory(local.keep_optimizer), self.parts.optimizer.width

        def slabs(at: Positions) -> dict[str, Tensor]:
            some, parts = [clients[i] for i in at], self.parts.optimizer.names
            if memory is None:
                return {part: torch.zeros(len(some), width, device=self.device) for part in parts}
            return {part: self.states.values(memory, part, some, width) for part in parts}

        scale = None if request.scale is None else request.scale.stack(clients, side)
        return Work(
            start=lambda at: start.of(at, self.device),
            batches=batches,
            rows=places.rows,
            seeds=[self._seed(client, request) for client in clients],
            slabs=slabs,
            steps=None if memory is None else self.states.steps(memory, clients),
            tables=self.tables.of_training(request, side, places),
            scale=None if scale is None else scale.of(np.arange(len(clients)), self.device).to(torch.float32),
            penalties=request.penalties,
            anchors=self.tables.anchors(request.penalties, clients, side),
            only=request.only,
            rule=request.rule,
            memory=self._memories(request, side),
            rate=request.rate,
            keeps_slabs=request.remembers(local.keep_optimizer),
        )

    def _memories(self, request: TrainRequest, side: DeviceSide) -> Callable[[Positions], dict[str, Tensor]]:
        """What the rule of a training remembers at its beginning, of clients at some positions."""
        remembers: Any = {} if request.rule is None else request.rule.remembers
        width = self.model.spec.parameters
        known = {name: (each.stack(request.clients, side), each.is_model) for name, each in remembers.items()}

        def at_positions(at: Positions) -> dict[str, Tensor]:
            found = {}
            for name, (models, is_model) in known.items():
                value = models.of(at, self.device)
                found[name] = (value[:, :width].contiguous() if is_model else value).to(torch.float32)
            return found

        return at_positions

    def _seed(self, client: int, request: TrainRequest) -> int:
        return torch_seed(self.setup.seed, "training", slot=request.slot, round=request.round, client=client)

    def _positions(self, client: int, request: TrainRequest, side: DeviceSide) -> list[npt.NDArray[np.int64]]:
        """The batches of `ClientBlock._batches` as positions in the client's list of samples."""
        count = len(self.clients[client].train)
        return self._batches(client, request, side.side, np.arange(count))

    def _store(self, request: TrainRequest, outcome: Outcome, arrived: npt.NDArray[np.bool_]) -> None:
        """Keep what is finite: results under the handle, states for the next round."""
        at = np.flatnonzero(arrived)
        clients = [request.clients[i] for i in at]
        self._results[request.handle] = SlabResults(clients, outcome.models, at)  # type: ignore[assignment]
        if not clients:
            return
        if request.remembers(self.setup.local.keep_optimizer):
            name = f"optimizer/{request.slot}"
            self.states.put_rows(name, clients, outcome.slabs, outcome.steps[at], at)
        if request.keep is not None:
            # Nobody writes to results, and states are copied when they are read: one table serves both.
            self.states.put_rows(model_key(request.keep), clients, {"model": outcome.models}, rows=at)
        for name, table in outcome.kept.items():
            self.states.put_rows(model_key(request.prefix + name), clients, {"model": table}, rows=at)

    def derive(self, request: DeriveRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """What a reference means for each client, kept here, on the device, under `request.handle`."""
        if not self.batched or not request.clients:
            return super().derive(request, *arrays)
        clients = request.clients
        with self._failing_together(clients, request.round, "deriving a model"):
            models = request.models.stack(clients, self._device_side(arrays))
            if not models.present(len(clients)).all():
                raise ValueError("there is nothing to derive it from")
            table = self.parts.memory.empty(len(clients), self.model.spec.size)

            def made(at: Positions) -> Tensor:
                values = models.of(at, self.device)
                table.write(int(at[0]), values)
                return values.abs().amax(dim=1)

            largest = torch.cat(self.pieces.run(len(clients), made)).cpu().numpy().astype(np.float64)
            measured = np.stack([np.zeros(len(clients)), largest], axis=1)
            arrived = np.flatnonzero(np.isfinite(largest))
            there = [clients[i] for i in arrived]
            self._results[request.handle] = SlabResults(there, table, arrived)  # type: ignore[assignment]
            if request.keep is not None and there:
                self.states.put_rows(model_key(request.keep), there, {"model": table}, rows=arrived)
            sent = np.zeros(len(clients))
            if self.outbox.alters and request.leaves:
                sent = self._leave(request, [None] * len(clients), measured)
        return [(row[1], each) for row, each in zip(measured.tolist(), sent.tolist(), strict=True)]

    def forget(self, clients: list[int], name: str) -> None:
        """Drop one entry of these clients' states when the round commits."""
        if not self.batched:
            super().forget(clients, name)
            return
        self.states.drop_rows(name, clients)
        for client in clients:
            if name in self.states.host(client):
                self.states.put_host(client, {k: v for k, v in self.states.host(client).items() if k != name})

    # --- models that stayed here --------------------------------------------------------------------------

    def _held(self, handle: str, clients: Sequence[int]) -> tuple[ClientRows, Positions] | None:
        """(models, row of each client, -1 without one) of a call; None if it went client by client."""
        made: Any = self._results.get(handle)
        if not isinstance(made, SlabResults) or handle in self.outbox.sent:
            return None
        return made.table, np.array([made.row.get(client, -1) for client in clients], np.int64)

    def columns(
        self, handle: str, clients: list[int], columns: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.float32]:
        """(clients, columns) of the models; a client without one has zeros."""
        held = self._held(handle, clients)
        if held is None:
            return super().columns(handle, clients, columns)
        models, rows = held
        found = np.zeros((len(clients), models.width if columns is None else len(columns)), np.float32)
        there = np.flatnonzero(rows >= 0)
        with self._failing_together(clients, self.round, "reading models"):
            chosen = None if columns is None else torch.from_numpy(np.array(columns)).to(self.device)

            def read(at: Positions) -> None:
                values = models.read(rows[there[at]])
                found[there[at]] = (
                    (values if chosen is None else values.index_select(1, chosen)).cpu().numpy()
                )

            self.pieces.run(len(there), read)
        return found

    def distances(
        self, handle: str, clients: list[int], to: Encoded, *arrays: npt.NDArray[Any]
    ) -> list[float]:
        """Euclidean distance of each client's model to its reference, in float64."""
        held = self._held(handle, clients)
        if held is None or not clients:
            return super().distances(handle, clients, to, *arrays)
        models, rows = held
        found = np.full(len(clients), np.nan)
        with self._failing_together(clients, self.round, "computing distances"):
            other = to.stack(clients, self._device_side(arrays))
            there = np.flatnonzero((rows >= 0) & other.present(len(clients)))

            def away(at: Positions) -> Tensor:
                own = models.read(rows[there[at]]).to(torch.float64)
                return row_sums((own - other.of(there[at], self.device)).square()).sqrt()

            if len(there):
                found[there] = torch.cat(self.pieces.run(len(there), away)).cpu().numpy()
        return [float(value) for value in found]

    def combine(
        self,
        handle: str,
        clients: list[int],
        weights: npt.NDArray[np.float64],
        exponents: npt.NDArray[np.int64],
        columns: tuple[int, int],
    ) -> PartialSums:
        """Fixed-point partial sums of this block's models, added on the device: the same integers as anywhere."""
        held = self._held(handle, clients)
        if held is None:
            return super().combine(handle, clients, weights, exponents, columns)
        models, row_of = held
        there = np.flatnonzero(row_of >= 0)
        with self._failing_together(clients, self.round, "averaging models"):
            chunks = Chunks(self.parts.memory, noted=False)
            return fixed_point_sums(models, row_of[there], weights[:, there], exponents, columns, chunks)
