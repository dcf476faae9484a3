"""What a block of the engine `stacked` has besides every block's: samples, states and frozen outputs on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.block import ClientBlock
from actors.compute import Committed
from actors.device_states import DeviceStates
from actors.devices import effective_tier, free_memory
from actors.requests import BlockSetup, ClientSamples, ModelRequest, TrainRequest
from actors.stacked_outputs import PlacesOf, StackedOutputs
from actors.stacked_tables import StackedTables
from actors.stacking import DeviceSide, Uploads
from lightning_modules.engines.stacked import StackedEngine, StackedParts
from lightning_modules.engines.stacked.samples import DeviceSamples


class StackedBase(ClientBlock):
    """A block whose clients are computed together, if its module can be batched."""

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

    def commit(self) -> Committed:
        """Make the round's changes permanent, release its models."""
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

    def _measured(self, objective: Tensor, models: Tensor) -> npt.NDArray[np.float64]:
        """(n, 2): mean objective and largest absolute value. The stage's one synchronisation."""
        largest = models.abs().amax(dim=1).to(torch.float64)
        return torch.stack([objective, largest], dim=1).cpu().numpy()

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

    def _failing_together(self, clients: Sequence[int], round: int, stage: str) -> Any:
        """Whatever goes wrong says which round and stage; the client is the first of those computed together."""
        first = clients[0] if clients else -1
        others = f" (with {len(clients) - 1} others as one batched model)" if len(clients) > 1 else ""
        return self._failing(first, round, f"{stage}{others}")
