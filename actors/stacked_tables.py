"""What the local training of many clients needs beside their samples: tables by place, constants of penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.device_states import DeviceStates
from actors.requests import TrainRequest
from actors.stacked_outputs import Places, StackedOutputs
from actors.stacking import DeviceSide, Stacked
from actors.wire import Encoded
from archipelago.strategies.penalties import Penalty, features_of


class StackedTables:
    """Makes the tables of a request."""

    def __init__(
        self, outputs: StackedOutputs, features: StackedOutputs, states: DeviceStates, parameters: int
    ) -> None:
        self._outputs, self._features = outputs, features
        self._states, self._parameters = states, parameters
        self._device = outputs.model.device

    def of_training(self, request: TrainRequest, side: DeviceSide, places: Places) -> dict[str, Tensor]:
        """Frozen outputs, outputs for penalties and sample weights of every place."""
        clients, tables = request.clients, {}
        frozen = self.sum_of_outputs(request.on_top_of, clients, side, places)
        if frozen is not None:
            tables["frozen"] = frozen
        for number, penalty in enumerate(request.penalties):
            for name, encoded in penalty.outputs.items():
                models = encoded.stack(clients, side)  # type: ignore[union-attr]  # references travel encoded
                _require(models, clients, name)
                shared = models.rows is None and models.values.dim() == 2
                tables[f"{number}.{name}"] = (
                    torch.stack(self._outputs.of_each(models, places), dim=1)
                    if shared
                    else self._outputs.of(models, places)
                )
            for name, encoded in features_of(penalty).items():
                models = encoded.stack(clients, side)  # type: ignore[union-attr]
                _require(models, clients, name)
                tables[f"{number}.{name}"] = self._features.of(models, places)
        if request.sample_weights is not None:
            name, column = request.sample_weights
            columns = [np.asarray(self._states.host(client)[name])[:, column] for client in clients]
            weights = np.concatenate(columns).astype(np.float32)
            tables["sample_weights"] = torch.from_numpy(weights).to(self._device)
        return tables

    def sum_of_outputs(
        self, references: Sequence[Encoded], clients: list[int], side: DeviceSide, places: Places
    ) -> Tensor | None:
        """The outputs of several references, added; None if they point at nothing for anybody."""
        total = None
        for encoded in references:
            models = encoded.stack(clients, side)
            if models.present(len(clients)).any():
                outputs = self._outputs.of(models, places)
                total = outputs if total is None else total + outputs
        return total

    def frozen_models(self, request: TrainRequest, side: DeviceSide) -> npt.NDArray[np.int64]:
        """(n,) how many models a client's samples go forward through, besides the one that is trained."""
        clients = request.clients
        count = np.zeros(len(clients), np.int64)
        for encoded in request.on_top_of:
            count += encoded.stack(clients, side).present(len(clients))
        for penalty in request.penalties:
            for encoded in penalty.outputs.values():  # type: ignore[assignment]
                models = encoded.stack(clients, side)
                count += len(models.values) if models.rows is None and models.values.dim() == 2 else 1
            count += len(features_of(penalty))
        return count

    def anchors(
        self, penalty: Penalty, clients: list[int], side: DeviceSide
    ) -> dict[str, tuple[Tensor, bool]]:
        """What a penalty holds constant. Models come without their buffers, which no penalty covers."""
        found: dict[str, tuple[Tensor, bool]] = {}
        for name, encoded in penalty.anchors.items():
            models = encoded.stack(clients, side)  # type: ignore[union-attr]
            _require(models, clients, name)
            shared = models.rows is None
            value = models.values if shared else models.of(np.arange(len(clients)), self._device)
            is_model = encoded.is_model  # type: ignore[union-attr]
            found[name] = (value[..., : self._parameters] if is_model else value, shared)
        return found


def _require(models: Stacked, clients: Sequence[int], what: str) -> None:
    """A reference of a penalty means something for every client."""
    missing = np.flatnonzero(~models.present(len(clients)))
    if len(missing):
        raise ValueError(f"client {clients[int(missing[0])]} has no model for '{what}' of a penalty")
