"""finetune: what every client could still gain by training on its own before it predicts.

Thesis section 7.4.4: after training, one extra local training without aggregation, then the test. The base never
sees the fine-tuned models.

Readings. So that the final figure (the mean of the last evaluations) is about fine-tuned models, each of the last
`evaluation.last` evaluations fine-tunes the models of its own round; earlier evaluations show the base as it
is. The optimizer starts afresh. Where predictions add several models (CAM), each is fine-tuned in turn on top
of the others, cluster part first, and the test is on the sum ("the same inference method as before"; the
released code forgets to add the global one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from archipelago.strategies.base import ADDONS, Addon, Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Prediction, Reference


@ADDONS.register(
    "finetune", "an extra local training before the last evaluations (thesis 7.4.4)", label="fine-tuning"
)
class Finetune(Addon):
    """Local training on top of what the base predicts with."""

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if base.__name__ in ("Local", "Ditto", "FedPer", "FeMAM", "FedSoft", "FedEM"):
            return "its clients predict with models of their own, or with a mixture that such a training would break."
        if addons[-1] != "finetune":
            return "fine-tuning comes last; write it at the end of the method."
        return None

    def due(self, base: Any) -> bool:
        """Whether this round's evaluation is one of those that make the final figure."""
        context = self.context
        return base.number >= first_tuned_round(context.rounds, context.evaluate_every, context.evaluate_last)

    def prediction(self, base: Any, fleet: FleetView, prediction: Prediction) -> Prediction:
        return tuned(fleet, prediction) if self.due(base) else prediction


def first_tuned_round(rounds: int, every: int, last: int) -> int:
    """The first of the `last` evaluations, of which there is one every so many rounds and one at the end.

    >>> first_tuned_round(100, 1, 3), first_tuned_round(100, 10, 3), first_tuned_round(25, 10, 2)
    (98, 80, 20)
    """
    evaluated = {round for round in range(1, rounds + 1) if round % every == 0} | {rounds}
    return sorted(evaluated)[-last:][0]


def tuned(fleet: FleetView, prediction: Prediction) -> Prediction:
    """The same prediction after local training of its models, one after the other on top of the rest."""
    models: list[Reference] = list(prediction.models)
    for m in range(len(models)):
        others = [*models[:m], *models[m + 1 :]] if prediction.combine == "logit_sum" else []
        slot = f"finetune {m}"
        models[m] = fleet.train(start=models[m], on_top_of=others, slot=slot, keep=slot, fresh=True)
    return dataclasses.replace(prediction, models=models)
