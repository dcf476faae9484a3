"""A block whose clients are computed together on one device: the engine `stacked`.

The same requests and answers as `ClientBlock`. Samples, models, optimizer states and frozen outputs stay on the
device; for each stage one table of places goes in and one result comes out. Whatever cannot be batched goes client by
client, as in any other block, and the run says what and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.best import best_of_all
from actors.block import ClientBlock
from actors.client_states import State
from actors.device_states import DeviceStates, Positions, taken
from actors.devices import effective_tier, free_memory
from actors.metrics import client_metrics
from actors.requests import (
    BestRequest,
    BlockSetup,
    ClientSamples,
    DeriveRequest,
    EvaluateRequest,
    MapRequest,
    ModelRequest,
    TrainRequest,
)
from actors.stacked_outputs import Places, PlacesOf, StackedOutputs
from actors.stacked_prediction import predicted
from actors.stacked_tables import StackedTables
from actors.stacked_views import LossesOfAll, StackedView
from actors.stacking import DeviceSide, SlabResults, Stacked, Uploads, fixed_point_sums, row_sums
from actors.wire import Encoded, model_key
from archipelago.core.errors import ClientFailure, UserError
from archipelago.core.randomness import torch_seed
from archipelago.strategies.parameters import PartialSums
from archipelago.strategies.penalties import features_of
from lightning_modules.engines.stacked import StackedEngine, StackedParts
from lightning_modules.engines.stacked.batched import frozen_and_augmented, is_per_sample
from lightning_modules.engines.stacked.samples import DeviceSamples
from lightning_modules.engines.stacked.training import Outcome, Work


class StackedBlock(ClientBlock):
    """All clients of a block at once."""

    engine: StackedEngine
    states: DeviceStates
    parts: StackedParts

    def __init__(
        self,
        setup: BlockSetup,
        clients: dict[int, ClientSamples],
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        device: str = "cpu",
    ) -> None:
        super().__init__(setup, clients, x, y, device)
        where = self.model.device
        lists = [samples.every() for samples in clients.values()]
        used = np.concatenate([*lists, *setup.holdout, np.zeros(0, np.int64)])
        self.device = where
        self.batched = False  # whether all of this is used; else the block is one like any other
        if not self.engine.why_not and len(used):
            samples = DeviceSamples(
                x,
                self.labels,
                used=used,
                mean=setup.mean,
                std=setup.std,
                classes=setup.classes,
                device=where,
                room=free_memory(where) if where.type == "cuda" else None,
            )
            tier = effective_tier(setup.determinism, device, exact_engine=False)
            exact = (setup.local.batch, setup.evaluation.batch) if tier == "exact" else None
            parts = self.engine.make_parts(samples, bf16=setup.precision == "bf16", exact=exact)
            if parts is not None:
                self.parts, self.batched = parts, True
                self.states = DeviceStates(clients, parts.optimizer, where)
                self.places = PlacesOf(clients, parts.model)
                self.outputs = StackedOutputs(parts.model)
                self.features = StackedOutputs(parts.model, features=True)
                parameters = self.model.spec.parameters
                self.tables = StackedTables(self.outputs, self.features, self.states, parameters)
                self.uploads = Uploads(where)
        elif self.engine.why_not:
            self.engine.say(self.engine.why_not)

    def _hold(self, round: int) -> None:
        """Give every client the samples that it has in this round."""
        before = self.clients
        super()._hold(round)
        if self.batched and self.clients is not before:
            self.places = PlacesOf(self.clients, self.parts.model)

    def commit(self) -> list[str]:
        """Make the round's changes permanent, release its models; returns notes for the user."""
        if self.batched:
            for chunks in (self.parts.training.chunks, self.outputs.chunks, self.features.chunks):
                self.engine.notes += chunks.notes
                chunks.notes = []
        return super().commit()

    def _release(self) -> None:
        super()._release()
        if self.batched:
            self.outputs.forget()
            self.features.forget()
            self.uploads.clear()

    def _device_side(self, arrays: tuple[npt.NDArray[Any], ...]) -> DeviceSide:
        return DeviceSide(self._side(arrays), self.states, self.uploads, self.device, self.model.spec.size)

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
            measured = self._measured(self._objective(request, outcome), outcome.models)
            arrived = np.asarray(np.isfinite(measured).all(axis=1))
            leaves = self.outbox.alters and request.leaves
            # Before results are kept: a private model may be the start and the result.
            starts = [request.start.resolve(client, side.side) for client in clients] if leaves else []
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

    def _objective(self, request: TrainRequest, outcome: Outcome) -> Tensor:
        """(n,) mean objectives; not finite where a private model that the rule made is not."""
        objective = outcome.objective
        for name in request.rule.keeps if request.rule is not None else ():
            finite = torch.isfinite(outcome.memory[name]).all(dim=1)
            objective = torch.where(finite, objective, torch.nan)
        return objective

    def _leave(
        self,
        request: TrainRequest | ModelRequest,
        starts: Sequence[Any],
        measured: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Results through the outbox, on the host: the bytes sent of each; their magnitudes become those sent."""
        made, sent = self._results[request.handle], np.zeros(len(request.clients))
        for at, client in enumerate(request.clients):
            if client in made:
                measured[at, 1], sent[at] = self.outbox.put(
                    request.handle, client, request.round, starts[at], made[client], self.states
                )
        return sent

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
        slabs = {
            part: self.states.values(memory, part, clients, width)
            if memory is not None
            else torch.zeros(len(clients), width, device=self.device)
            for part in self.parts.optimizer.names
        }
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
            anchors=[self.tables.anchors(penalty, clients, side) for penalty in request.penalties],
            only=request.only,
            rule=request.rule,
            memory=self._memories(request, side),
            rate=request.rate,
        )

    def _memories(self, request: TrainRequest, side: DeviceSide) -> dict[str, Tensor]:
        """What the rule of a training remembers of all clients at its beginning."""
        if request.rule is None:
            return {}
        everyone, width = np.arange(len(request.clients)), self.model.spec.parameters
        found = {}
        for name, encoded in request.rule.remembers.items():
            value = encoded.stack(request.clients, side).of(everyone, self.device)  # type: ignore[union-attr]
            found[name] = (value[:, :width] if encoded.is_model else value).to(torch.float32)  # type: ignore[union-attr]
        return found

    def _seed(self, client: int, request: TrainRequest) -> int:
        return torch_seed(self.setup.seed, "training", slot=request.slot, round=request.round, client=client)

    def _positions(self, client: int, request: TrainRequest, side: DeviceSide) -> list[npt.NDArray[np.int64]]:
        """The batches of `ClientBlock._batches` as positions in the client's list of samples."""
        count = len(self.clients[client].train)
        return self._batches(client, request, side.side, np.arange(count))

    def _measured(self, objective: Tensor, models: Tensor) -> npt.NDArray[np.float64]:
        """(n, 2): mean objective and largest absolute value. The stage's one synchronisation."""
        largest = models.abs().amax(dim=1).to(torch.float64)
        return torch.stack([objective, largest], dim=1).cpu().numpy()

    def _store(self, request: TrainRequest, outcome: Outcome, arrived: npt.NDArray[np.bool_]) -> None:
        """Keep what is finite: results under the handle, states for the next round."""
        at = np.flatnonzero(arrived)
        clients = [request.clients[i] for i in at]
        whole = len(at) == len(arrived)
        models = outcome.models if whole else taken(outcome.models, at, self.device)
        self._results[request.handle] = SlabResults(clients, models)  # type: ignore[assignment]
        if not clients:
            return
        if request.remembers(self.setup.local.keep_optimizer):
            slabs = outcome.slabs
            if not whole:
                slabs = {name: taken(slab, at, self.device) for name, slab in slabs.items()}
            self.states.put_rows(f"optimizer/{request.slot}", clients, slabs, outcome.steps[at])
        if request.keep is not None:
            # Nobody writes to results, and states are copied when they are read: one tensor serves both.
            self.states.put_rows(model_key(request.keep), clients, {"model": models})
        for name in request.rule.keeps if request.rule is not None else ():
            made = torch.cat([outcome.memory[name], outcome.models[:, self.model.spec.parameters :]], dim=1)
            kept = made if whole else taken(made, at, self.device)
            self.states.put_rows(model_key(request.prefix + name), clients, {"model": kept})

    def derive(self, request: DeriveRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """What a reference means for each client, kept here, on the device, under `request.handle`."""
        if not self.batched or not request.clients:
            return super().derive(request, *arrays)
        clients = request.clients
        with self._failing_together(clients, request.round, "deriving a model"):
            models = request.models.stack(clients, self._device_side(arrays))
            if not models.present(len(clients)).all():
                raise ValueError("there is nothing to derive it from")
            values = models.of(np.arange(len(clients)), self.device)
            measured = self._measured(
                torch.zeros(len(clients), dtype=torch.float64, device=self.device), values
            )
            arrived = np.flatnonzero(np.isfinite(measured[:, 1]))
            kept = values if len(arrived) == len(clients) else taken(values, arrived, self.device)
            there = [clients[i] for i in arrived]
            self._results[request.handle] = SlabResults(there, kept)  # type: ignore[assignment]
            if request.keep is not None and there:
                self.states.put_rows(model_key(request.keep), there, {"model": kept})
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

    # --- losses, gradients, metrics -----------------------------------------------------------------------

    def losses(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(clients, K): mean training loss under each of K models, all on the same samples."""
        if not self.batched or not request.clients:
            return super().losses(request, *arrays)
        with self._failing_together(request.clients, request.round, "computing losses"):
            side = self._device_side(arrays)
            places = self.places.get(request.clients, "train")
            models = request.models.stack(request.clients, side)
            under = self.tables.sum_of_outputs(request.on_top_of, request.clients, side, places)
            table = self.sample_losses(models, places, under)
            sums = torch.segment_reduce(table.to(torch.float64), "sum", lengths=places.lengths, unsafe=True)
            return (sums / places.lengths[:, None]).cpu().numpy()

    def best(self, request: BestRequest, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The model of least loss for each client: here, all losses at once cost less than a search."""
        if not self.batched:
            return super().best(request, *arrays)
        sizes = np.array([len(self.clients[client].train) for client in request.clients])
        return best_of_all(self.losses(request, *arrays), sizes)

    def sample_losses(self, models: Stacked, places: Places, under: Tensor | None = None) -> Tensor:
        """(places, K) losses under each of K models that all clients share."""
        self._check_loss()
        y = self.parts.model.samples.targets(places.rows)
        columns = []
        for k in range(len(models.values)):
            outputs = self.outputs.of_one(models, k, places)
            columns.append(self.parts.model.losses(outputs if under is None else outputs + under, y))
        return torch.stack(columns, dim=1)

    def _check_loss(self) -> None:
        if not callable(getattr(self.model.module, "loss", None)):
            raise UserError(
                "Expected a module with loss(outputs, y, reduction) to compare models by their loss."
            )

    def gradients(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """Full-batch gradients of the mean training loss, kept here under `request.handle`."""
        if not self.batched or not request.clients:
            return super().gradients(request, *arrays)
        clients, width = request.clients, self.setup.evaluation.batch
        with self._failing_together(clients, request.round, "computing gradients"):
            side = self._device_side(arrays)
            places = self.places.get(clients, "train")
            at = request.models.stack(clients, side)
            missing = np.flatnonzero(~at.present(len(clients)))
            if len(missing):
                raise ValueError(f"client {clients[int(missing[0])]} has no model to take a gradient at")
            under = self.tables.sum_of_outputs(request.on_top_of, clients, side, places)
            batches = [
                [places.starts[i] + np.arange(a, min(a + width, size)) for a in range(0, int(size), width)]
                for i, size in enumerate(places.sizes)
            ]
            work = Work(
                start=lambda some: at.of(some, self.device),
                batches=batches,
                rows=places.rows,
                seeds=[0] * len(clients),
                tables={} if under is None else {"frozen": under},
            )
            gradient, objective = self.parts.training.gradients(work)
            measured = self._measured(objective, gradient)
            arrived = np.flatnonzero(np.isfinite(measured).all(axis=1))
            kept = gradient if len(arrived) == len(clients) else taken(gradient, arrived, self.device)
            self._results[request.handle] = SlabResults([clients[i] for i in arrived], kept)  # type: ignore[assignment]
            sent = np.zeros(len(clients))
            if self.outbox.alters and request.leaves:
                sent = self._leave(request, [None] * len(clients), measured)
        return [(*row, each) for row, each in zip(measured.tolist(), sent.tolist(), strict=True)]

    def evaluate(self, request: EvaluateRequest, *arrays: npt.NDArray[Any]) -> list[dict[str, float]]:
        """Per-client metrics; a client without samples in this split has none."""
        if not self.batched:
            return super().evaluate(request, *arrays)
        clients = request.clients
        with self._failing_together(clients, request.round, f"evaluation on {request.split} data"):
            side = self._device_side(arrays)
            places = self.places.get(clients, request.split)
            rows: list[dict[str, float]] = [{"samples": int(size)} for size in places.sizes]
            if not len(places):
                return rows
            outputs = predicted(request, side, places, self.outputs, self.setup.classes)
            y = self.parts.model.samples.targets(places.rows)
            losses = self.forward.losses_of_prediction(outputs, y, request.combine)
            losses = losses.reshape(len(losses), -1).mean(dim=1) if losses.dim() > 1 else losses
            flat = outputs.reshape(len(outputs), -1)
            # One copy; metrics are computed by the processor, from a few numbers a sample.
            found = torch.cat([flat, losses[:, None].to(flat.dtype)], dim=1).cpu()
            targets = self.samples.host_targets(places.index)
            for row, start, size in zip(rows, places.starts, places.sizes, strict=True):
                own = slice(int(start), int(start + size))
                if size:
                    said = found[own, :-1].reshape(int(size), *outputs.shape[1:])
                    row |= client_metrics(
                        said,
                        targets[own],
                        found[own, -1],
                        self.setup.classes,
                        self.setup.plugins,
                        self.setup.evaluation,
                    )
        return rows

    def map(self, request: MapRequest, *arrays: npt.NDArray[Any]) -> list[Any]:
        """Run a pure client function; losses that it asks for are computed for all clients at once."""
        if not self.batched:
            return super().map(request, *arrays)
        side, prefix, results = self._device_side(arrays), request.prefix, []
        together = LossesOfAll(request.clients, arrays, self.places.get, self.uploads, self.sample_losses)
        for at, client in enumerate(request.clients):
            with self._failing(client, request.round, request.stage):
                inputs = {
                    name: value.resolve(client, side.side) if isinstance(value, Encoded) else value
                    for name, value in request.inputs.items()
                }
                whole, view = self.states.host(client), StackedView(self.view(client, request), together, at)
                own = {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)}
                state, result = request.function(view, own, **inputs)
                others: State = {k: v for k, v in whole.items() if not k.startswith(prefix)}
                self.states.put_host(client, others | {f"{prefix}{k}": v for k, v in state.items()})
                results.append((result, view.forwards))
        return results

    # --- models that stayed here --------------------------------------------------------------------------

    def _held(self, handle: str, clients: Sequence[int]) -> tuple[Tensor, Positions] | None:
        """(models, row of each client, -1 without one) of a call; None if it went client by client."""
        made: Any = self._results.get(handle)
        if not isinstance(made, SlabResults) or handle in self.outbox.sent:
            return None
        return made.values_on_device, np.array([made.row.get(client, -1) for client in clients], np.int64)

    def columns(
        self, handle: str, clients: list[int], columns: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.float32]:
        """(clients, columns) of the models; a client without one has zeros."""
        held = self._held(handle, clients)
        if held is None:
            return super().columns(handle, clients, columns)
        models, rows = held
        chosen = models
        if columns is not None:
            chosen = chosen.index_select(1, torch.from_numpy(np.array(columns)).to(self.device))
        table = np.zeros((len(clients), chosen.shape[1]), np.float32)
        there = np.flatnonzero(rows >= 0)
        if len(there):
            table[there] = taken(chosen, rows[there], self.device).cpu().numpy()
        return table

    def distances(
        self, handle: str, clients: list[int], to: Encoded, *arrays: npt.NDArray[Any]
    ) -> list[float]:
        """Euclidean distance of each client's model to its reference, in float64."""
        held = self._held(handle, clients)
        if held is None or not clients:
            return super().distances(handle, clients, to, *arrays)
        models, rows = held
        other = to.stack(clients, self._device_side(arrays))
        found = np.full(len(clients), np.nan)
        there = np.flatnonzero((rows >= 0) & other.present(len(clients)))
        if len(there):
            own = taken(models, rows[there], self.device).to(torch.float64)
            away = own - other.of(there, self.device)
            found[there] = row_sums(away.square()).sqrt().cpu().numpy()
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
        return fixed_point_sums(models, row_of[there], weights[:, there], exponents, columns)

    def _failing_together(self, clients: Sequence[int], round: int, stage: str) -> Any:
        """Whatever goes wrong says which round and stage; the client is the first of those computed together."""
        first = clients[0] if clients else -1
        others = f" (with {len(clients) - 1} others as one batched model)" if len(clients) > 1 else ""
        return self._failing(first, round, f"{stage}{others}")
