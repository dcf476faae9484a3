"""What a block measures for its clients: losses, gradients, metrics, and what client functions ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.best import Negative, Search, best_of_all
from actors.block_base import BlockBase, existing
from actors.client_views import LocalView
from actors.metrics import client_metrics
from actors.requests import BestRequest, EvaluateRequest, MapRequest, ModelRequest
from actors.wire import Encoded
from archipelago.strategies.parameters import Vector


class MeasuringBlock(BlockBase):
    """Answers for one client after the other."""

    def losses(self, request: ModelRequest, *arrays: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(clients, K): mean training loss under each of K models, all on the same samples."""
        side, table = self._side(arrays), []
        for client in request.clients:
            with self._asking(client, request.round, "computing losses"):
                index = self.clients[client].train
                under = self.forward.sum_of_outputs(existing(request.on_top_of, client, side), index)
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
                under = self.forward.sum_of_outputs(existing(request.on_top_of, client, side), index)
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
                under = existing(request.on_top_of, client, side)
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
