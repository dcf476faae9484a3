"""What a prediction of several models says about the samples of many clients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.forward import ballot
from actors.requests import EvaluateRequest
from actors.stacked_outputs import Places, StackedOutputs
from actors.stacking import DeviceSide, Stacked
from archipelago.core.errors import ClientFailure


def predicted(
    request: EvaluateRequest,
    side: DeviceSide,
    places: Places,
    outputs_of: StackedOutputs,
    classes: int | None,
) -> Tensor:
    """(places, outputs) of the prediction, as `Forward.combined` has it client by client."""
    clients, count = request.clients, len(request.models)
    each = [encoded.stack(clients, side) for encoded in request.models]
    weights = np.ones((len(clients), count))
    if request.weights is not None:
        weights = np.array([request.weights.resolve(client, side.side) for client in clients])
    weights = weights * np.stack([models.present(len(clients)) for models in each], axis=1)
    empty = np.flatnonzero((weights == 0).all(axis=1) & (places.sizes > 0))
    if len(empty):
        raise ClientFailure(
            clients[int(empty[0])], request.round, f"evaluation on {request.split} data",
            "ValueError: there is no model to predict with",
        )  # fmt: skip
    sums = weights.sum(axis=1)
    plain = bool(np.isin(weights, (0.0, 1.0)).all())
    divides = request.combine != "logit_sum" and not (sums == 1.0).all()
    sent = torch.from_numpy(np.concatenate([weights, np.where(sums == 0, 1.0, sums)[:, None]], axis=1)).to(
        side.device
    )
    by_place = sent.to(torch.float32).index_select(0, places.owner)
    total: Tensor | None = None
    for m, models in enumerate(each):
        used = weights[:, m] != 0
        if not used.any():
            continue
        outputs = _as_combined(_outputs_where(models, used, places, outputs_of), request.combine, classes)
        if not (plain and used.all()):
            weight = by_place[:, m : m + 1].reshape([-1] + [1] * (outputs.dim() - 1))
            # A model that counts for nothing may say anything, also what is not finite.
            outputs = torch.where(weight != 0, outputs * weight, 0.0)
        total = outputs if total is None else total + outputs
    assert total is not None
    return total / by_place[:, -1:].reshape([-1] + [1] * (total.dim() - 1)) if divides else total


def _outputs_where(
    models: Stacked, used: npt.NDArray[np.bool_], places: Places, outputs_of: StackedOutputs
) -> Tensor:
    """Outputs for clients that use a model; the others' are not computed where that spares much."""
    if used.mean() > 0.5:
        return outputs_of.of(models, places)
    rows = np.zeros(len(used), np.int64) if models.rows is None else models.rows
    source = models.shared[None] if models.rows is None else models.source
    return outputs_of.of(Stacked(source, np.where(used, rows, -1)), places)


def _as_combined(outputs: Tensor, combine: str, classes: int | None) -> Tensor:
    # A regression has no probabilities: there, all are the mean of the outputs.
    if classes is None:
        return outputs
    if combine == "probability_mean":
        return outputs.softmax(dim=-1)
    if combine == "vote":
        return ballot(outputs)
    return outputs
