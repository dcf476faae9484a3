"""What the local training of many clients needs beside their samples: tables by place, constants of penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from lightning_modules.engines.stacked.batched import Anchors
from lightning_modules.engines.stacked.device_memory import Positions


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
                tables[f"{number}.{name}"] = (
                    torch.stack(self._outputs.of_each(models, places), dim=1)
                    if models.is_several
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
                count += len(models.shared) if models.is_several else 1
            count += len(features_of(penalty))
        return count

    def anchors(
        self, penalties: Sequence[Penalty], clients: list[int], side: DeviceSide
    ) -> Callable[[Positions], Anchors]:
        """What penalties hold constant, of clients at some positions.

        Models come without their buffers, which no penalty covers.
        """
        known: list[dict[str, tuple[Stacked, bool]]] = []
        for penalty in penalties:
            known.append({})
            for name, encoded in penalty.anchors.items():
                models = encoded.stack(clients, side)  # type: ignore[union-attr]
                _require(models, clients, name)
                known[-1][name] = (models, encoded.is_model)  # type: ignore[union-attr]

        def at_positions(at: Positions) -> Anchors:
            return [
                {name: self._anchor(models, at, is_model) for name, (models, is_model) in each.items()}
                for each in known
            ]

        return at_positions

    def _anchor(self, models: Stacked, at: Positions, is_model: bool) -> tuple[Tensor, bool]:
        shared = models.rows is None
        value = models.shared if shared else models.of(at, self._device)
        return (value[..., : self._parameters] if is_model else value, shared)


def _require(models: Stacked, clients: Sequence[int], what: str) -> None:
    """A reference of a penalty means something for every client."""
    missing = np.flatnonzero(~models.present(len(clients)))
    if len(missing):
        raise ValueError(f"client {clients[int(missing[0])]} has no model for '{what}' of a penalty")
