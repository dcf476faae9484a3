"""What a block of the engine `stacked` measures for its clients: model by model over everybody's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.best import best_of_all
from actors.client_states import State
from actors.metrics import client_metrics
from actors.requests import BestRequest, EvaluateRequest, MapRequest, ModelRequest
from actors.stacked_base import StackedBase
from actors.stacked_outputs import Places
from actors.stacked_prediction import predicted
from actors.stacked_views import LossesOfAll, StackedView
from actors.stacking import SlabResults, Stacked
from actors.wire import Encoded
from archipelago.core.errors import UserError
from lightning_modules.engines.stacked.work import Work


class StackedMeasures(StackedBase):
    """Answers for all clients at once, with one synchronisation a stage."""

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
        for k in range(len(models.shared)):
            outputs = self.outputs.of_one(models, k, places)
            columns.append(self.parts.model.losses(outputs if under is None else outputs + under, y))
        return torch.stack(columns, dim=1)

    def _check_loss(self) -> None:
        if not callable(getattr(self.model.module, "loss", None)):
            raise UserError(
                "Expected a module with loss(outputs, y, reduction) to compare models by their loss.",
                code="incomplete-module", lacks="loss",
            )  # fmt: skip

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
            gradient, measured = self.parts.training.gradients(work)
            arrived = np.flatnonzero(np.isfinite(measured).all(axis=1))
            there = [clients[i] for i in arrived]
            self._results[request.handle] = SlabResults(there, gradient, arrived)  # type: ignore[assignment]
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
