"""finetune: what every client could still gain by training on its own before it predicts.

Thesis section 7.4.4: after training, one extra local training without aggregation, then the test. The base never
sees the fine-tuned models.

Readings. So that the final metric (the mean of the last evaluations) is about fine-tuned models, each of the last
`evaluation.last` evaluations fine-tunes the models of its own round; earlier evaluations show the base as it
is. The optimizer starts afresh. Where predictions add several models (CAM), each is fine-tuned in turn on top
of the others, cluster part first, and the test is on the sum ("the same inference method as before"; the
released code forgets to add the global one).
"""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import Context, Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Prediction
from archipelago.strategies.tuning import tuned, why_not_tuned


@ADDONS.register(
    "finetune", "an extra local training before the last evaluations (thesis 7.4.4)", label="fine-tuning"
)
class Finetune(Addon[Strategy]):
    """Local training on top of what the base predicts with."""

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
        return tuned(fleet, prediction) if self.tunes(base) else prediction


def first_tuned_round(rounds: int, every: int, last: int) -> int:
    """The first of the `last` evaluations, of which there is one every so many rounds and one at the end.

    >>> first_tuned_round(100, 1, 3), first_tuned_round(100, 10, 3), first_tuned_round(25, 10, 2)
    (98, 80, 20)
    """
    evaluated = {round for round in range(1, rounds + 1) if round % every == 0} | {rounds}
    return sorted(evaluated)[-last:][0]
