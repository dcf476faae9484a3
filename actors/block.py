"""A block of clients in one process: their samples, their private state, one live LightningModule.

The same class serves the in-process fleet and, inside a ClientActor, the Ray fleet. Client state is
transactional: what a round changes is pending until `commit`, and forgotten by `begin`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.metrics import client_metrics
from actors.requests import (
    BlockSetup,
    ClientSamples,
    Encoded,
    EvaluateRequest,
    MapRequest,
    ModelRequest,
    TrainRequest,
)
from archipelago.core.errors import ClientFailure, UserError
from archipelago.core.plugins import load_plugins
from archipelago.core.randomness import generator, torch_seed
from archipelago.strategies.parameters import Vector, merged, mixed, partial_sums
from lightning_modules.base import build_module, default_losses, follows_contract
from lightning_modules.executors import PenaltyJob, TrainJob, TrainResult, make_executor, outputs_of
from lightning_modules.flat import FlatModel
from lightning_modules.samples import Samples

State = dict[str, Any]


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
        self.clients = clients
        used = [np.concatenate([c.train, c.validation, c.test]) for c in clients.values()]
        used += list(setup.holdout)
        self.model = FlatModel(self._fresh_module(torch_seed(setup.seed, "template")), device)
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
        self.executor = make_executor(
            setup.local.executor, self.model, self.samples, dict(setup.local.trainer)
        )
        self._committed: dict[int, State] = {client: {} for client in clients}
        self._pending: dict[int, State] = {}
        self._results: dict[str, dict[int, Vector]] = {}
        self._round = 0

    def _fresh_module(self, seed: int) -> Any:
        setup = self.setup
        return build_module(setup.model, setup.local, setup.input_shape, setup.classes, seed)

    # --- transactions -----------------------------------------------------------------------------------

    def begin(self, round: int) -> None:
        """Start a round from the committed state: whatever an aborted attempt left is forgotten."""
        self._pending.clear()
        self._results.clear()
        self.samples.forget()
        self._round = round

    def commit(self) -> list[str]:
        """Make the round's changes permanent, release its models; returns notes for the user."""
        self._committed.update(self._pending)
        self._pending.clear()
        self._results.clear()
        self.samples.forget()
        notes, self.executor.notes = self.executor.notes, []
        return notes

    def snapshot(self) -> dict[int, State]:
        """The committed state of every client: values that nobody writes to."""
        return dict(self._committed)

    def restore(self, states: dict[int, State]) -> None:
        """Take over committed states, from a checkpoint or from another block."""
        self._committed = {client: states.get(client, {}) for client in self.clients}
        self.begin(self._round)

    def _state(self, client: int) -> State:
        return self._pending.get(client, self._committed[client])

    def _change(self, client: int, **values: Any) -> None:
        self._pending[client] = {**self._state(client), **values}

    # --- references -------------------------------------------------------------------------------------

    def _resolve(self, reference: Encoded, client: int, arrays: tuple[npt.NDArray[Any], ...]) -> Any:
        kind = reference.kind
        if kind in ("vector", "models"):
            return arrays[reference.array]
        if kind == "rows":
            row = reference.per_client[client]
            return None if row < 0 else arrays[reference.array][row]
        if kind == "private":
            own = self._state(client).get(f"model/{reference.name}")
            if own is None and reference.default is not None:
                return self._resolve(reference.default, client, arrays)
            return own
        if kind == "result":
            made = self._results.get(reference.name, {}).get(client)
            if made is None and reference.default is not None:
                return self._resolve(reference.default, client, arrays)
            return made
        if kind == "merged":
            assert reference.default is not None and reference.other is not None
            base = self._resolve(reference.default, client, arrays)
            other = self._resolve(reference.other, client, arrays)
            return base if other is None else merged(base, other, arrays[reference.array])
        if kind == "mixture":
            return mixed(arrays[reference.array], reference.per_client[client])
        return np.asarray(reference.per_client[client])

    def _resolve_all(
        self, references: list[Encoded], client: int, arrays: tuple[npt.NDArray[Any], ...]
    ) -> list[Vector]:
        found = [self._resolve(reference, client, arrays) for reference in references]
        return [vector for vector in found if vector is not None]

    def _anchors(
        self, anchors: dict[str, Encoded], client: int, arrays: tuple[npt.NDArray[Any], ...]
    ) -> dict[str, npt.NDArray[Any]]:
        """Anchors of a penalty: models without their buffers, which no penalty covers."""
        trainable = self.model.spec.parameters
        resolved = {name: self._resolve(reference, client, arrays) for name, reference in anchors.items()}
        return {
            name: value[..., :trainable] if anchors[name].is_model else value
            for name, value in resolved.items()
        }

    # --- what a fleet asks for --------------------------------------------------------------------------

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

        Returns, per client: mean objective, largest absolute value, samples backward, samples only forward, and
        whether it started from the server's model for want of one of its own.
        The first two are not finite for a client whose training blew up; its private state then stays.
        """
        results = self._results.setdefault(request.handle, {})
        jobs, outcome = [], []
        private = request.start.kind == "private"
        own = f"model/{request.start.name}"
        received = {c: private and self._state(c).get(own) is None for c in request.clients}
        for client in request.clients:
            with self._failing(client, request.round, f"preparing '{request.slot}' training"):
                jobs.append(self._job(client, request, arrays))
        stage = f"local training ('{request.slot}')"
        trained = self.executor.train(jobs)
        for job in jobs:
            with self._failing(job.client, request.round, stage):
                result = next(trained)
            magnitude = float(np.max(np.abs(result.model), initial=0.0))
            outcome.append((result.objective, magnitude, *work_of(job), received[job.client]))
            if np.isfinite(result.objective) and np.isfinite(magnitude):
                results[job.client] = result.model
                self._keep(result, request)
        return outcome

    def _job(self, client: int, request: TrainRequest, arrays: tuple[npt.NDArray[Any], ...]) -> TrainJob:
        local = self.setup.local
        start = self._resolve(request.start, client, arrays)
        if start is None:
            raise ValueError("there is no model to start from")
        remembers = local.keep_optimizer and not request.fresh
        kept = self._state(client).get(f"optimizer/{request.slot}") if remembers else None
        return TrainJob(
            client=client,
            start=start,
            batches=self._batches(client, request),
            seed=torch_seed(
                self.setup.seed, "training", slot=request.slot, round=request.round, client=client
            ),
            optimizer_state=kept,
            on_top_of=self._resolve_all(request.on_top_of, client, arrays),
            penalties=[
                PenaltyJob(
                    term.penalty,
                    self._anchors(term.anchors, client, arrays),
                    {name: self._resolve(models, client, arrays) for name, models in term.outputs.items()},
                )
                for term in request.penalties
            ],
            sample_weights=self._sample_weights(client, request),
            scale=1.0 if request.scale is None else float(self._resolve(request.scale, client, arrays)),
        )

    def _sample_weights(
        self, client: int, request: TrainRequest
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        if request.sample_weights is None:
            return None
        name, column = request.sample_weights
        table = self._state(client)[name]
        return self.clients[client].train, np.ascontiguousarray(table[:, column], np.float32)

    def _batches(self, client: int, request: TrainRequest) -> list[npt.NDArray[np.int64]]:
        """Shuffled passes over the client's training samples, cut into batches; the last of a pass is short.

        Every round draws fresh permutations, so that no cursor has to be remembered (DECISIONS.md, entry 7).
        """
        local, indices = self.setup.local, self.clients[client].train
        per_pass = -(-len(indices) // local.batch)
        steps = local.steps if local.epochs is None else local.epochs * per_pass
        steps = max(1, int(steps * request.step_share.get(client, 1.0)))
        rng = generator(self.setup.seed, "batches", slot=request.slot, round=request.round, client=client)
        batches: list[npt.NDArray[np.int64]] = []
        while len(batches) < steps:
            order = rng.permutation(indices)
            batches += [order[at : at + local.batch] for at in range(0, len(order), local.batch)]
        return batches[:steps]

    def _keep(self, result: TrainResult, request: TrainRequest) -> None:
        changes: State = {}
        if self.setup.local.keep_optimizer and not request.fresh:
            changes[f"optimizer/{request.slot}"] = result.optimizer_state
        if request.keep is not None:
            changes[f"model/{request.keep}"] = result.model
        if changes:
            self._change(result.client, **changes)

    def forget(self, clients: list[int], name: str) -> None:
        """Drop one entry of these clients' states when the round commits."""
        for client in clients:
            self._pending[client] = {key: value for key, value in self._state(client).items() if key != name}

    def losses(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(clients, K): mean training loss under each of K models, all on the same samples."""
        table = []
        for client in request.clients:
            with self._failing(client, request.round, "computing losses"):
                index = self.clients[client].train
                under = self._sum_of_outputs(self._resolve_all(request.on_top_of, client, arrays), index)
                models = self._resolve(request.models, client, arrays)
                y = self.samples.targets(index)
                row = []
                for k in range(len(models)):
                    outputs = outputs_of(self.model, self.samples, models[k], index)
                    total = outputs if under is None else outputs + under
                    row.append(float(self._sample_losses(total, y).to(torch.float64).mean()))
                table.append(row)
        return np.asarray(table, np.float64).reshape(len(request.clients), -1)

    def gradients(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> list[tuple[float, float]]:
        """Full-batch gradients of the mean training loss, kept here under `request.handle`."""
        results, outcome = self._results.setdefault(request.handle, {}), []
        chunk = self.setup.evaluation.batch
        for client in request.clients:
            with self._failing(client, request.round, "computing gradients"):
                index = self.clients[client].train
                under = self._sum_of_outputs(self._resolve_all(request.on_top_of, client, arrays), index)
                self.model.load(self._resolve(request.models, client, arrays))
                # Evaluation mode: a gradient must not move BatchNorm's statistics.
                self.model.module.eval()
                self.model.zero_grad()
                total = 0.0
                for at in range(0, len(index), chunk):
                    x, y = self.samples.batch(index[at : at + chunk])
                    outputs = self.model.module(x)
                    outputs = outputs if under is None else outputs + under[at : at + chunk]
                    loss = self._sample_losses(outputs, y).sum() / len(index)
                    loss.backward()
                    total += float(loss.detach())
                gradient = self.model.flat_gradient()
                self.model.zero_grad()
                magnitude = float(np.max(np.abs(gradient), initial=0.0))
                outcome.append((total, magnitude))
                if np.isfinite(total) and np.isfinite(magnitude):
                    results[client] = gradient
        return outcome

    def evaluate(self, request: EvaluateRequest, *arrays: npt.NDArray[Any]) -> list[dict[str, float]]:
        """Per-client metrics; a client without samples in this split has none."""
        rows = []
        for client in request.clients:
            with self._failing(client, request.round, f"evaluation on {request.split} data"):
                index = getattr(self.clients[client], request.split)
                row: dict[str, float] = {"samples": len(index)}
                if len(index):
                    outputs, y = self._predict(client, request, index, arrays), self.samples.targets(index)
                    losses = self._prediction_losses(outputs, y, request.combine)
                    row |= client_metrics(outputs, y, losses, self.setup.classes, self.setup.plugins)
                rows.append(row)
        return rows

    def measure(
        self, distributions: list[int], models: npt.NDArray[np.float32]
    ) -> list[list[dict[str, float]]]:
        """For each of some held-out sets, the figures of each centre; `models` is (centres, parts, P)."""
        found = []
        for number in distributions:
            index = self.setup.holdout[number]
            y, rows = self.samples.targets(index), []
            for parts in models:
                outputs = self._sum_of_outputs(list(parts), index)
                assert outputs is not None
                losses = self._prediction_losses(outputs, y, "logit_sum")
                figures = client_metrics(outputs, y, losses, self.setup.classes, self.setup.plugins)
                rows.append({"samples": len(index), **figures})
            found.append(rows)
        return found

    def _predict(
        self,
        client: int,
        request: EvaluateRequest,
        index: npt.NDArray[np.int64],
        arrays: tuple[npt.NDArray[Any], ...],
    ) -> Tensor:
        models = [(m, self._resolve(e, client, arrays)) for m, e in enumerate(request.models)]
        weights = np.ones(len(models)) if request.weights is None else request.weights[client]
        held = [(m, vector) for m, vector in models if vector is not None and weights[m] != 0.0]
        total: Tensor | None = None
        for m, vector in held:
            outputs = outputs_of(self.model, self.samples, vector, index)
            # A regression has no probabilities: there, both are the mean of the outputs.
            if request.combine == "probability_mean" and self.setup.classes is not None:
                outputs = outputs.softmax(dim=-1)
            elif request.combine == "vote" and self.setup.classes is not None:
                outputs = torch.nn.functional.one_hot(outputs.argmax(dim=-1), outputs.shape[-1]).float()
            term = outputs if weights[m] == 1.0 else outputs * float(weights[m])
            total = term if total is None else total + term
        if total is None:
            raise ValueError("there is no model to predict with")
        count = float(sum(weights[m] for m, _ in held))
        return total if request.combine == "logit_sum" or count == 1.0 else total / count

    def _prediction_losses(self, outputs: Tensor, y: Tensor, combine: str) -> Tensor:
        if combine in ("probability_mean", "vote") and self.setup.classes is not None:
            return torch.nn.functional.nll_loss(outputs.clamp_min(1e-12).log(), y, reduction="none")
        if not callable(getattr(self.model.module, "loss", None)):  # a module that only has a training_step
            return default_losses(outputs, y, self.setup.classes)
        return self._sample_losses(outputs, y)

    def _sum_of_outputs(self, vectors: list[Vector], index: npt.NDArray[np.int64]) -> Tensor | None:
        total = None
        for vector in vectors:
            outputs = outputs_of(self.model, self.samples, vector, index)
            total = outputs if total is None else total + outputs
        return total

    def _sample_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        module = self.model.module
        if not follows_contract(module):
            raise UserError(
                f"Expected a module with loss(outputs, y, reduction), got {type(module).__name__} which has "
                "none: add it (see lightning_modules/base.py) to use methods that compare models by their loss."
            )
        return module.loss(outputs, y, reduction="none")  # type: ignore[operator]

    def map(self, request: MapRequest, *arrays: npt.NDArray[Any]) -> list[Any]:
        """Run a pure client function; the state it returns is pending until the round commits.

        Returns, for each client, what the function did and how many samples went forward for it.
        """
        results = []
        for client in request.clients:
            with self._failing(client, request.round, request.stage):
                inputs = {
                    name: self._resolve(value, client, arrays) if isinstance(value, Encoded) else value
                    for name, value in request.inputs.items()
                }
                whole = self._state(client)
                own = {
                    k.removeprefix(request.prefix): v
                    for k, v in whole.items()
                    if k.startswith(request.prefix)
                }
                view = self.view(client)
                state, result = request.function(view, own, **inputs)
                others = {k: v for k, v in whole.items() if not k.startswith(request.prefix)}
                self._pending[client] = others | {f"{request.prefix}{k}": v for k, v in state.items()}
                results.append((result, view.forwards))
        return results

    def view(self, client: int) -> ClientView:
        """What a client function may see of its client."""
        return ClientView(self, client)

    # --- models that stayed here ------------------------------------------------------------------------

    def combine(
        self,
        handle: str,
        clients: list[int],
        weights: npt.NDArray[np.float64],
        exponents: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """(K, P) fixed-point partial sums of this block's models."""
        results = self._results.get(handle, {})
        present = [j for j, client in enumerate(clients) if client in results]
        values = [results[clients[j]] for j in present]
        return partial_sums(values, weights[:, present], exponents, self.model.spec.size)

    def columns(
        self, handle: str, clients: list[int], columns: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.float32]:
        """(clients, columns) of the models; a client without one has zeros."""
        results, size = self._results.get(handle, {}), self.model.spec.size
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
        results, found = self._results.get(handle, {}), []
        for client in clients:
            own, other = results.get(client), self._resolve(to, client, arrays)
            if own is None or other is None:
                found.append(float("nan"))
            else:
                difference = own.astype(np.float64) - other.astype(np.float64)
                found.append(float(np.sqrt(np.add.reduce(difference * difference))))
        return found

    @contextmanager
    def _failing(self, client: int, round: int, stage: str) -> Any:
        """Whatever goes wrong inside a client says which client, which round and which stage."""
        try:
            yield
        except (ClientFailure, UserError):
            raise
        except Exception as error:
            raise ClientFailure(client, round, stage, f"{type(error).__name__}: {error}") from error


class ClientView:
    """A client as its own code sees it: its samples' losses and nothing of the others."""

    def __init__(self, block: ClientBlock, client: int) -> None:
        self._block, self.id = block, client
        self.forwards = 0  # samples that went through a model

    @property
    def size(self) -> int:
        """n_i."""
        return len(self._block.clients[self.id].train)

    def sample_losses(self, models: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(samples, K) training losses under each model."""
        block, index = self._block, self._block.clients[self.id].train
        y = block.samples.targets(index)
        self.forwards += len(index) * len(models)
        columns = [
            block._sample_losses(outputs_of(block.model, block.samples, models[k], index), y)
            for k in range(len(models))
        ]
        return torch.stack(columns, dim=1).cpu().numpy()


def work_of(job: TrainJob) -> tuple[int, int]:
    """(samples that go backward, samples that frozen models see) in a job."""
    frozen = len(job.on_top_of)
    frozen += sum(len(np.atleast_2d(models)) for term in job.penalties for models in term.outputs.values())
    distinct = len(np.unique(np.concatenate(job.batches))) if frozen else 0
    return sum(len(batch) for batch in job.batches), frozen * distinct


ClientFunction = Callable[..., tuple[State, Any]]
