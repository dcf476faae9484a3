"""One more local training of whatever clients predict with, each client for itself."""

from __future__ import annotations

import dataclasses

from archipelago.strategies.base import Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Prediction, Reference


def tuned(fleet: FleetView, prediction: Prediction, *, fresh: bool = False) -> Prediction:
    """The same prediction after local training of its models, one after the other on top of the rest.

    A client's optimizer continues where the model's own training left it (`fresh`: a new one); what it becomes is
    forgotten.
    """
    models: list[Reference] = list(prediction.models)
    for m, trained_in in enumerate(prediction.trained_in):
        others = [*models[:m], *models[m + 1 :]] if prediction.combine == "logit_sum" else []
        slot, continues = f"finetune {m}", None if fresh else trained_in
        models[m] = fleet.train(
            start=models[m], on_top_of=others, slot=slot, keep=slot, fresh=True, continues=continues
        )
    return dataclasses.replace(prediction, models=models)


def why_not_tuned(base: type[Strategy], *, new_clients: bool = False) -> str | None:
    """Why clients of this base have nothing to fine-tune; None if they have.

    A new client has no model of its own yet: it starts from the server's, which leaves mixtures and sums.
    """
    own = base.additive if new_clients else base.private
    if own or base.mixes:
        return "its clients predict with models of their own, or with a mixture that such a training would break."
    return None
