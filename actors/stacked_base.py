"""What a block of the engine `stacked` has besides every block's: samples, states and frozen outputs on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.block import ClientBlock
from actors.client_states import Changes
from actors.compute import Committed
from actors.device_states import DeviceStates
from actors.devices import effective_tier
from actors.requests import BlockSetup, ClientSamples, ModelRequest, TrainRequest
from actors.stacked_outputs import PlacesOf, StackedOutputs
from actors.stacked_tables import StackedTables
from actors.stacking import DeviceSide, Uploads
from archipelago.core.causes import USERS
from archipelago.core.errors import ClientFailure, UserError
from lightning_modules.engines.stacked import StackedEngine, StackedParts
from lightning_modules.engines.stacked.chunks import Chunks
from lightning_modules.engines.stacked.device_memory import free_memory
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
                self.states = DeviceStates(clients, parts.optimizer, parts.memory)
                self.places = PlacesOf(clients, parts.model)
                self.outputs = StackedOutputs(parts.model, parts.memory)
                self.features = StackedOutputs(parts.model, parts.memory, features=True)
                parameters = self.model.spec.parameters
                self.tables = StackedTables(self.outputs, self.features, self.states, parameters)
                self.uploads = Uploads(parts.memory)
                self.pieces = Chunks(parts.memory, noted=False)  # of what is done row by row
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
            noting = (
                self.parts.training.chunks,
                self.outputs.chunks,
                self.features.chunks,
                self.parts.memory,
            )
            for each in noting:
                self.engine.notes += each.notes
                each.notes = []
        with self._failing_together(list(self.clients), self.round, "committing"):
            return super().commit()

    def changes(self) -> Changes:
        """What the running round changes in the states of clients, before it commits."""
        with self._failing_together(list(self.clients), self.round, "copying states"):
            return super().changes()

    def _release(self) -> None:
        super()._release()
        if self.batched:
            self.outputs.forget()
            self.features.forget()
            self.uploads.clear()

    def _device_side(self, arrays: tuple[npt.NDArray[Any], ...]) -> DeviceSide:
        return DeviceSide(self._side(arrays), self.states, self.uploads, self.device, self.model.spec.size)

    def _leave(
        self,
        request: TrainRequest | ModelRequest,
        starts: Sequence[Any],
        measured: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Results through the outbox, on the host: the bytes sent of each; their magnitudes become those sent."""
        results: Any = self._results[request.handle]
        made, sent = results.together(request.clients), np.zeros(len(request.clients))
        for at, client in enumerate(request.clients):
            if client in made:
                measured[at, 1], sent[at] = self.outbox.put(
                    request.handle, client, request.round, starts[at], made[client], self.states
                )
        return sent

    @contextmanager
    def _failing_together(self, clients: Sequence[int], round: int, stage: str) -> Iterator[None]:
        """Whatever goes wrong says which clients, which round and which stage."""
        training = self.parts.training.chunks if self.batched else None
        if training is not None:
            training.under_way = None
        try:
            yield
        except (ClientFailure, UserError):
            raise
        except USERS as error:
            under_way = None if training is None else training.under_way
            inside = list(clients) if under_way is None else [clients[i] for i in under_way]
            with self._failing(inside[0] if inside else -1, round, stage + _beside(inside, len(clients))):
                raise error


def _beside(clients: Sequence[int], count: int) -> str:
    """Who was computed together with the first of some clients.

    >>> _beside([4], 1), _beside([4, 5], 2), _beside([4, 5, 8], 20)
    ('', ' (with 1 others as one batched model)', ' (with clients 5, 8 as one batched model)')
    """
    if len(clients) <= 1:
        return ""
    if len(clients) == count:
        return f" (with {count - 1} others as one batched model)"
    listed = ", ".join(str(client) for client in clients[1:21]) + (", ..." if len(clients) > 21 else "")
    return f" (with clients {listed} as one batched model)"
