"""A block of clients in one process: their samples, their private state, one live LightningModule.

The same class serves the in-process fleet and, inside a ClientActor, the Ray fleet. Client state is
transactional: what a round changes is pending until `commit`, and forgotten by `begin`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.block_base import existing
from actors.block_measures import MeasuringBlock
from actors.client_states import State
from actors.requests import DeriveRequest, TrainRequest
from actors.wire import ClientSide, Encoded, model_key, resolved
from archipelago.core.randomness import generator, torch_seed
from archipelago.strategies.parameters import PartialSums, Vector, partial_sums, used_rows
from archipelago.strategies.penalties import Penalty, features_of
from lightning_modules.engines import Term, TrainJob, TrainResult
from lightning_modules.flat import tensor_of, value_of


class ClientBlock(MeasuringBlock):
    """Hosts some clients and does what the fleet asks, for one client after the other."""

    # --- local training ---------------------------------------------------------------------------------

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
            on_top_of=existing(request.on_top_of, client, side),
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
