"""finetune: what every client could still gain by training on its own before it predicts.

Thesis section 7.4.4: after training, one extra local training without aggregation, then the test. The base never
sees the fine-tuned models.

    theta_i   what client i predicts with under the base: a model, or parts that add up
    theta_i'  theta_i after one more local training on (X_i, Y_i), each part on top of the others; nothing is averaged
    F_i(x) = f(x; theta_i')

Readings

When
    paper   after training
    here    at each of the last `evaluation.last` evaluations, so that the final metric is about fine-tuned models;
            earlier ones show the base as it is
    option  evaluation.last
Optimizer
    code    continues where the model's own training left it
    here    the same, and the round does not keep what it became. After FedDANE it begins anew: its momentum is of
            gradients with a correction that this training has not (with BatchNorm on digits 44 % instead of 91 %)
    option  finetune.fresh=true
Several models that add up (CAM)
    paper   "the same inference method as before"
    code    tests the cluster part alone
    here    each is fine-tuned on top of the others, cluster part first; the test is on the sum
    option  finetune.predict=cluster
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import Context, Strategy
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Prediction
from archipelago.strategies.tuning import tuned, why_not_tuned

STATISTICS = (
    "only the last evaluations are of tuned models, whose running statistics are of one client's few batches"
)


@dataclass
class FinetuneOptions:
    """`finetune.fresh=...`"""

    fresh: bool = setting(False, "start with an empty optimizer instead of the momentum that clients have")
    predict: str = setting(
        "sum",
        "compat: cluster tests the cluster part alone where predictions add a shared one (released code)",
        choices=("sum", "cluster"),
    )


@ADDONS.register(
    "finetune", "an extra local training before the last evaluations (thesis 7.4.4)", label="fine-tuning"
)
class Finetune(Addon[Strategy]):
    """Local training on top of what the base predicts with."""

    expects = Expectations(
        cost=Cost(),
        known=(
            Known(
                "accuracy",
                ALL,
                "a model tuned on the samples of one client forgets what others had",
                limit=0.08,
            ),
            Known("oscillation", ALL, "only the last evaluations are of tuned models", limit=0.09),
            Known("progress", ALL, "only the last evaluations are of tuned models", limit=0.06),
            Known("oscillation", "batchnorm", STATISTICS, limit=0.11),
            Known("progress", "batchnorm", STATISTICS, limit=0.07),
        ),
    )

    Options = FinetuneOptions
    late = True

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        why_not = why_not_tuned(base)
        if why_not is None and not issubclass(ADDONS.find(addons[-1]), cls):
            why_not = "fine-tuning comes last; write it at the end of the method."
        return why_not

    @classmethod
    def first_round(cls, context: Context) -> int:
        """The first of the evaluations that make the final metric."""
        return first_tuned_round(context.rounds, context.evaluate_every, context.evaluate_last)

    def tunes(self, base: Strategy) -> bool:
        return base.number >= self.first_round(self.context)

    def prediction(self, base: Strategy, fleet: FleetView, prediction: Prediction) -> Prediction:
        if not self.tunes(base):
            return prediction
        found = tuned(fleet, prediction, fresh=self.options.fresh or base.corrected)
        if self.options.predict == "cluster":
            return dataclasses.replace(found, models=found.models[:1], weights=None, slots=None, names=None)
        return found


def first_tuned_round(rounds: int, every: int, last: int) -> int:
    """The first of the `last` evaluations, of which there is one every so many rounds and one at the end.

    >>> first_tuned_round(100, 1, 3), first_tuned_round(100, 10, 3), first_tuned_round(25, 10, 2)
    (98, 80, 20)
    """
    evaluated = {round for round in range(1, rounds + 1) if round % every == 0} | {rounds}
    return sorted(evaluated)[-last:][0]
