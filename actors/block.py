"""A block of clients in one process: their samples, their private state, one live LightningModule.

The same class serves the in-process fleet and, inside a ClientActor, the Ray fleet. Client state is
transactional: what a round changes is pending until `commit`, and forgotten by `begin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.best import Negative, Search, best_of_all
from actors.client_states import Changes, ClientStates, State
from actors.client_views import LocalView
from actors.compute import BlockDevice
from actors.devices import effective_tier, mps_directory, refused_by_tier, torch_has_cuda
from actors.forward import Forward
from actors.metrics import client_metrics
from actors.outbox import Outbox
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
from actors.wire import ClientSide, Encoded, model_key, resolved
from archipelago.core.causes import USERS, refuse_end, said, where_in_users_code
from archipelago.core.errors import ClientFailure, UserError
from archipelago.core.plugins import load_plugins
from archipelago.core.randomness import generator, torch_seed
from archipelago.strategies.parameters import PartialSums, Vector, partial_sums, used_rows
from archipelago.strategies.penalties import Penalty, features_of
from lightning_modules.base import build_module
from lightning_modules.engines import (
    Term,
    TrainJob,
    TrainResult,
    check_precision,
    engine_entry,
    make_engine,
)
from lightning_modules.flat import FlatModel, tensor_of, value_of
from lightning_modules.samples import Samples


class ClientBlock:
    """Hosts some clients and does what the fleet asks, for one client after the other."""

    def __init__(
        self,
        setup: BlockSetup,
        clients: dict[int, ClientSamples],
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        device: str = "cpu",
    ) -> None:
        # One thread: a sum inside a kernel must not depend on how many cores a node has.
        torch.set_num_threads(1)
        load_plugins(setup.plugins)
        self.setup = setup
        self.clients = clients  # as they are in the round under way
        self._over_rounds = clients
        self._changes = any(samples.later for samples in clients.values())
        self.outbox = Outbox(setup)
        self.labels = y = self.outbox.relabelled(y, clients, setup.classes)
        used = [samples.every() for samples in clients.values()]
        used += list(setup.holdout)
        module = self._fresh_module(torch_seed(setup.seed, "template"))
        self.model = FlatModel(module, device, setup.precision)
        check_precision(setup.precision, setup.local.engine, self.model.device.type)
        self.samples = Samples(
            x,
            y,
            mean=setup.mean,
            std=setup.std,
            classes=setup.classes,
            device=device,
            normalise=setup.local.normalise,
            chunk=setup.evaluation.batch,
            used=np.concatenate(used) if used else None,
            channels_last=getattr(self.model.module, "channels_last", False),
        )
        self.forward = Forward(self.model, self.samples, setup.classes)
        self.engine = make_engine(setup.local.engine, self.model, self.samples, setup.local)
        self.states = ClientStates(clients)
        self._results: dict[str, dict[int, Vector]] = {}  # by handle and client, until the round ends
        self._searches: dict[str, Search] = {}  # by the owner of the models

    def _fresh_module(self, seed: int) -> Any:
        setup = self.setup
        return build_module(setup.model, setup.local, setup.input_shape, setup.classes, seed)

    def computes_on(self, name: str, identity: str = "") -> BlockDevice:
        """The device that this block is on, by its name and which of the cluster's it is."""
        device = str(self.model.device)
        entry = engine_entry(self.setup.local.engine, self.model.device.type)
        tier = effective_tier(self.setup.determinism, device, bool(entry.capabilities.get("exact")))
        mps = mps_directory() is not None
        return BlockDevice(device, name, identity, entry.name, tier, mps, torch_has_cuda())

    # --- transactions -----------------------------------------------------------------------------------

    def begin(self, round: int) -> None:
        """Start a round from the committed state: whatever an aborted attempt left is forgotten."""
        if self._changes:
            self._hold(round)
        self.states.abort()
        self._release()

    def _hold(self, round: int) -> None:
        """Give every client the samples that it has in this round."""
        now = {client: samples.at(round) for client, samples in self._over_rounds.items()}
        if any(now[client] is not self.clients[client] for client in now):
            self.clients = now
            self._searches.clear()

    def changes(self) -> Changes:
        """What the running round changes in the states of clients, before it commits."""
        return self.states.changes()

    def commit(self) -> list[str]:
        """Make the round's changes permanent, release its models; returns notes for the user."""
        self.states.commit()
        self._release()
        notes, self.engine.notes = self.engine.notes, []
        return notes

    def snapshot(self) -> dict[int, State]:
        """The committed state of every client: values that nobody writes to."""
        return self.states.snapshot()

    def restore(self, states: dict[int, State]) -> None:
        """Take over committed states, from a checkpoint or from another block."""
        self.states.restore(states)
        self._release()

    def _release(self) -> None:
        self._results.clear()
        self.outbox.clear()
        self.samples.forget()

    # --- local training ---------------------------------------------------------------------------------

    def spec(self) -> Any:
        """The layout of a model value."""
        return self.model.spec

    def initial(self, count: int, purpose: str) -> npt.NDArray[np.float32]:
        """(count, P) independently initialised models, the same in every block."""
        vectors = []
        for index in range(count):
            seed = torch_seed(self.setup.seed, purpose, client=index)
            vectors.append(FlatModel(self._fresh_module(seed)).vector())
        return np.stack(vectors)

    def train(self, request: TrainRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """Local training; the models stay here under `request.handle`.

        Returns, per client: mean objective, largest absolute value, samples backward, samples only forward, whether it
        started from the server's model for want of one of its own, bytes sent (0: the model as it is), steps, and
        samples in their mini-batches.
        The first two are not finite for a client whose training blew up; its private state then stays.
        """
        side, results = self._side(arrays), self._results.setdefault(request.handle, {})
        jobs = []
        outcome: list[tuple[float, ...]] = []
        received = {client: request.start.is_received(client, side) for client in request.clients}
        for client in request.clients:
            with self._failing(client, request.round, f"preparing '{request.slot}' training"):
                jobs.append(self._job(client, request, side))
        stage = f"local training ('{request.slot}')"
        trained = self.engine.train(jobs)
        for job in jobs:
            with self._failing(job.client, request.round, stage):
                result = next(trained)
            magnitude = float(np.max(np.abs(result.model), initial=0.0))
            sent = 0
            objective = result.objective if result.is_finite else float("nan")
            if np.isfinite(objective) and np.isfinite(magnitude):
                results[job.client] = result.model
                self._keep(result, request)
                if self.outbox.alters and request.leaves:
                    magnitude, sent = self.outbox.put(
                        request.handle, job.client, request.round, job.start, result.model, self.states
                    )
            steps = (len(job.batches), sum(len(batch) for batch in job.batches))
            outcome.append((objective, magnitude, *job.work(), received[job.client], sent, *steps))
        return outcome

    def updates(self, handle: str, clients: list[int], columns: tuple[int, int]) -> npt.NDArray[np.float32]:
        """(clients, columns) of what clients would have sent, for attackers who know it."""
        made, part = self._results[handle], slice(*columns)
        return np.stack([self.outbox.update_of(handle, client, made[client])[part] for client in clients])

    def collude(
        self, handle: str, round: int, clients: list[int], rows: list[int], crafted: npt.NDArray[np.float32]
    ) -> list[tuple[float, int]]:
        """Attackers send what they agreed on: (largest absolute value, bytes) of each."""
        made = self._results[handle]
        return [
            self.outbox.put_crafted(handle, client, round, made[client], self.states, crafted[row])
            for client, row in zip(clients, rows, strict=True)
        ]

    def _job(self, client: int, request: TrainRequest, side: ClientSide) -> TrainJob:
        start = request.start.resolve(client, side)
        if start is None:
            raise ValueError("there is no model to start from")
        memory = request.memory(self.setup.local.keep_optimizer)
        kept = None if memory is None else self.states.of(client).get(memory)
        batches, several = (
            self._batches(client, request, side, self.clients[client].train),
            len(request.passes),
        )
        return TrainJob(
            client=client,
            start=start,
            batches=batches[::several],
            more=[batches[at + 1 : at + several] for at in range(0, len(batches), several)],
            rule=request.rule,
            memory=self._memory(client, request, side),
            seed=torch_seed(
                self.setup.seed, "training", slot=request.slot, round=request.round, client=client
            ),
            optimizer_state=kept,
            on_top_of=_existing(request.on_top_of, client, side),
            penalties=[self._term(penalty, client, side) for penalty in request.penalties],
            sample_weights=self._sample_weights(client, request),
            scale=1.0 if request.scale is None else float(request.scale.resolve(client, side)),
            only=request.only,
            rate=request.rate,
        )

    def _term(self, penalty: Penalty, client: int, side: ClientSide) -> Term:
        """A penalty for one client. Its anchors are models without their buffers, which no penalty covers."""
        anchors = resolved(penalty.anchors, client, side, self.model.spec.parameters)
        tensors = {name: tensor_of(np.asarray(value)) for name, value in anchors.items()}
        features = resolved(features_of(penalty), client, side)
        return Term(penalty, tensors, resolved(penalty.outputs, client, side), features)

    def _memory(self, client: int, request: TrainRequest, side: ClientSide) -> dict[str, torch.Tensor]:
        """What the rule of a training remembers of a client at its beginning."""
        if request.rule is None:
            return {}
        found = resolved(request.rule.remembers, client, side, self.model.spec.parameters)
        return {name: tensor_of(np.asarray(value, np.float32)) for name, value in found.items()}

    def _sample_weights(
        self, client: int, request: TrainRequest
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        if request.sample_weights is None:
            return None
        name, column = request.sample_weights
        table = self.states.of(client)[name]
        return self.clients[client].train, np.ascontiguousarray(table[:, column], np.float32)

    def _batches(
        self, client: int, request: TrainRequest, side: ClientSide, indices: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.int64]]:
        """Shuffled passes over the client's training samples, cut into batches; the last of a pass is short.

        Every round draws fresh permutations, so that no cursor has to be remembered (DECISIONS.md, B2).
        """
        local = self.setup.local
        per_pass = -(-len(indices) // local.batch)
        steps = local.steps if local.epochs is None else local.epochs * per_pass
        steps = steps if request.steps is None else request.steps
        if request.step_share is not None:
            steps = max(1, int(steps * float(request.step_share.resolve(client, side))))
        steps *= len(request.passes)
        rng = generator(self.setup.seed, "batches", slot=request.slot, round=request.round, client=client)
        batches: list[npt.NDArray[np.int64]] = []
        while len(batches) < steps:
            order = rng.permutation(indices)
            batches += [order[at : at + local.batch] for at in range(0, len(order), local.batch)]
        return batches[:steps]

    def _keep(self, result: TrainResult, request: TrainRequest) -> None:
        changes: State = {}
        if request.remembers(self.setup.local.keep_optimizer):
            changes[f"optimizer/{request.slot}"] = result.optimizer_state
        if request.keep is not None:
            changes[model_key(request.keep)] = result.model
        for name, model in result.kept.items():
            changes[model_key(request.prefix + name)] = model
        if changes:
            self.states.put(result.client, {**self.states.of(result.client), **changes})

    def derive(self, request: DeriveRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """What a reference means for each client, kept here under `request.handle`; (largest value, bytes sent)."""
        side, results = self._side(arrays), self._results.setdefault(request.handle, {})
        outcome: list[tuple[float, ...]] = []
        for client in request.clients:
            with self._failing(client, request.round, "deriving a model"):
                found = request.models.resolve(client, side)
                if found is None:
                    raise ValueError("there is nothing to derive it from")
                value: Vector = value_of(found)
                magnitude, sent = float(np.max(np.abs(value), initial=0.0)), 0
                if np.isfinite(magnitude):
                    results[client] = value
                    if request.keep is not None:
                        state = {**self.states.of(client), model_key(request.keep): value}
                        self.states.put(client, state)
                    if self.outbox.alters and request.leaves:
                        magnitude, sent = self.outbox.put(
                            request.handle, client, request.round, None, value, self.states
                        )
                outcome.append((magnitude, sent))
        return outcome

    def forget(self, clients: list[int], name: str) -> None:
        """Drop one entry of these clients' states when the round commits."""
        for client in clients:
            kept = {key: value for key, value in self.states.of(client).items() if key != name}
            self.states.put(client, kept)

    # --- losses, gradients, metrics ---------------------------------------------------------------------

    def losses(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(clients, K): mean training loss under each of K models, all on the same samples."""
        side, table = self._side(arrays), []
        for client in request.clients:
            with self._asking(client, request.round, "computing losses"):
                index = self.clients[client].train
                under = self.forward.sum_of_outputs(_existing(request.on_top_of, client, side), index)
                models = request.models.resolve(client, side)
                y = self.samples.targets(index)
                row = []
                for k in range(len(models)):
                    outputs = self.forward.outputs(models[k], index)
                    total = outputs if under is None else outputs + under
                    row.append(float(self.forward.losses(total, y).to(torch.float64).mean()))
                table.append(row)
        return np.asarray(table, np.float64).reshape(len(request.clients), -1)

    def best(self, request: BestRequest, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(clients, 3): the model of least mean training loss, that loss, and how many samples went forward.

        The same answer as from `losses`, which an engine that has all losses at once may give it from.
        """
        side, sizes = self._side(arrays), np.array([len(self.clients[c].train) for c in request.clients])
        if not request.clients or not self.forward.never_negative:
            return best_of_all(self.losses(request, *arrays), sizes)
        search = self._searches.setdefault(request.owner, Search(self.forward))
        search.start(request.models.resolve(request.clients[0], side), plain=not request.on_top_of)
        table = []
        for client in request.clients:
            with self._asking(client, request.round, "computing losses"):
                index = self.clients[client].train
                under = self.forward.sum_of_outputs(_existing(request.on_top_of, client, side), index)
                first = -1 if request.first is None else int(request.first.resolve(client, side))
                try:
                    table.append(search.best(client, index, under, first))
                except Negative:  # its module said that there are none
                    return best_of_all(self.losses(request, *arrays), sizes)
        return np.asarray(table, np.float64)

    def gradients(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, ...]]:
        """Full-batch gradients of the mean training loss, kept here under `request.handle`."""
        side, results = self._side(arrays), self._results.setdefault(request.handle, {})
        outcome: list[tuple[float, ...]] = []
        for client in request.clients:
            with self._asking(client, request.round, "computing gradients"):
                under = _existing(request.on_top_of, client, side)
                total, gradient = self._gradient(client, request.models.resolve(client, side), under)
                magnitude, sent = float(np.max(np.abs(gradient), initial=0.0)), 0
                if np.isfinite(total) and np.isfinite(magnitude):
                    results[client] = gradient
                    if self.outbox.alters and request.leaves:
                        magnitude, sent = self.outbox.put(
                            request.handle, client, request.round, None, gradient, self.states
                        )
                outcome.append((total, magnitude, sent))
        return outcome

    def _gradient(self, client: int, at: Vector, on_top_of: list[Vector]) -> tuple[float, Vector]:
        """(mean training loss, its gradient) of a client at a model."""
        chunk, index = self.setup.evaluation.batch, self.clients[client].train
        under = self.forward.sum_of_outputs(on_top_of, index)
        self.model.load(at)
        # Evaluation mode: a gradient must not move BatchNorm's statistics.
        self.model.module.eval()
        self.model.zero_grad()
        total = 0.0
        for start in range(0, len(index), chunk):
            x, y = self.samples.batch(index[start : start + chunk])
            with self.model.autocast():
                outputs = self.model.module(x).float()
            outputs = outputs if under is None else outputs + under[start : start + chunk]
            loss = self.forward.losses(outputs, y).sum() / len(index)
            loss.backward()
            total += float(loss.detach())
        gradient = self.model.flat_gradient()
        self.model.zero_grad()
        return total, gradient

    def evaluate(self, request: EvaluateRequest, *arrays: npt.NDArray[Any]) -> list[dict[str, float]]:
        """Per-client metrics; a client without samples in this split has none."""
        side, rows = self._side(arrays), []
        for client in request.clients:
            with self._asking(client, request.round, f"evaluation on {request.split} data"):
                index = getattr(self.clients[client], request.split)
                row: dict[str, float] = {"samples": len(index)}
                if len(index):
                    models = [encoded.resolve(client, side) for encoded in request.models]
                    each = request.weights
                    weights = np.ones(len(models)) if each is None else each.resolve(client, side)
                    outputs = self.forward.combined(models, weights, request.combine, index)
                    y = self.samples.targets(index)
                    losses = self.forward.losses_of_prediction(outputs, y, request.combine)
                    row |= client_metrics(
                        outputs, y, losses, self.setup.classes, self.setup.plugins, self.setup.evaluation
                    )
                rows.append(row)
        return rows

    def measure(
        self, distributions: list[int], models: npt.NDArray[np.float32]
    ) -> list[list[dict[str, float]]]:
        """For each of some held-out sets, the metrics of each centre; `models` is (centres, parts, P)."""
        found = []
        for number in distributions:
            index = self.setup.holdout[number]
            y, rows = self.samples.targets(index), []
            for parts in models:
                outputs = self.forward.sum_of_outputs(list(parts), index)
                assert outputs is not None
                losses = self.forward.losses_of_prediction(outputs, y, "logit_sum")
                metrics = client_metrics(
                    outputs, y, losses, self.setup.classes, self.setup.plugins, self.setup.evaluation
                )
                rows.append({"samples": len(index), **metrics})
            found.append(rows)
        return found

    def map(self, request: MapRequest, *arrays: npt.NDArray[Any]) -> list[Any]:
        """Run a pure client function; the state it returns is pending until the round commits.

        Returns, for each client, what the function did and how many samples went forward for it.
        """
        side, prefix, results = self._side(arrays), request.prefix, []
        for client in request.clients:
            with self._asking(client, request.round, request.stage):
                inputs = {
                    name: value.resolve(client, side) if isinstance(value, Encoded) else value
                    for name, value in request.inputs.items()
                }
                whole, view = self.states.of(client), self.view(client, request)
                own = {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)}
                state, result = request.function(view, own, **inputs)
                others = {k: v for k, v in whole.items() if not k.startswith(prefix)}
                self.states.put(client, others | {f"{prefix}{k}": v for k, v in state.items()})
                results.append((result, view.forwards))
        return results

    def view(self, client: int, request: MapRequest) -> LocalView:
        """What a client function may see of its client."""
        key = (self.setup.seed, request.prefix + request.stage, request.round)
        return LocalView(client, self.clients[client], self.forward, key)

    # --- models that stayed here ------------------------------------------------------------------------

    def combine(
        self,
        handle: str,
        clients: list[int],
        weights: npt.NDArray[np.float64],
        exponents: npt.NDArray[np.int64],
        columns: tuple[int, int],
    ) -> PartialSums:
        """Fixed-point partial sums of this block's models in the columns from the first to before the second.

        (rows of `weights` that one of these clients feeds, ascending; an int64 row of sums for each of them)
        """
        results, (start, stop) = self.outbox.delivered(handle, self._results), columns
        present = [j for j, client in enumerate(clients) if client in results]
        rows = used_rows(weights[:, present])
        values = [results[clients[j]][start:stop] for j in present]
        return rows, partial_sums(values, weights[rows][:, present], exponents[rows], stop - start)

    def columns(
        self, handle: str, clients: list[int], columns: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.float32]:
        """(clients, columns) of the models; a client without one has zeros."""
        results, size = self.outbox.delivered(handle, self._results), self.model.spec.size
        nothing = np.zeros(size, np.float32)
        chosen = slice(None) if columns is None else columns
        rows = [results.get(client, nothing)[chosen] for client in clients]
        return (
            np.stack(rows) if rows else np.zeros((0, size if columns is None else len(columns)), np.float32)
        )

    def distances(
        self, handle: str, clients: list[int], to: Encoded, *arrays: npt.NDArray[Any]
    ) -> list[float]:
        """Euclidean distance of each client's model to its reference, in float64."""
        # Measured by the server: between what it has of the clients.
        known = {**self._results, **self.outbox.sent}
        side, results, found = ClientSide(arrays, self.states.of, known), known.get(handle, {}), []
        for client in clients:
            own, other = results.get(client), to.resolve(client, side)
            if own is None or other is None:
                found.append(float("nan"))
            else:
                difference = own.astype(np.float64) - other.astype(np.float64)
                found.append(float(np.sqrt(np.add.reduce(difference * difference))))
        return found

    def _side(self, arrays: tuple[npt.NDArray[Any], ...]) -> ClientSide:
        return ClientSide(arrays, self.states.of, self._results)

    @contextmanager
    def _asking(self, client: int, round: int, stage: str) -> Iterator[None]:
        """`_failing`, and what a user's module draws is drawn for this client: the same on any packing."""
        with self._failing(client, round, stage), ExitStack() as stack:
            if self.model.of_users:
                seed = torch_seed(self.setup.seed, "forward", slot=stage, round=round, client=client)
                stack.enter_context(self.model.seeded(seed))
            yield

    @contextmanager
    def _failing(self, client: int, round: int, stage: str) -> Iterator[None]:
        """Whatever goes wrong inside a client says which client, which round and which stage."""
        try:
            yield
        except (ClientFailure, UserError):
            raise
        except USERS as error:  # a module of the user's own may call sys.exit
            refuse_end(error)
            failure = ClientFailure(client, round, stage, said(error) + where_in_users_code(error))
            raise refused_by_tier(error, self.setup.determinism) or failure from error


def _existing(references: list[Encoded], client: int, side: ClientSide) -> list[Vector]:
    """The models that references mean for a client, without those that point at nothing."""
    found = [reference.resolve(client, side) for reference in references]
    return [vector for vector in found if vector is not None]
