"""prox and few_shots: two small add-ons that any method they fit can take.

`prox` adds (mu / 2) ||theta - start||^2 to the local objective, start being the model the client received: the
global one, or its cluster's (FedProx's term, Li et al. 2020, inside clusters). `few_shots` clusters in the first
`few_shots.rounds` rounds only and holds the assignment still afterwards (thesis, Algorithms 2 to 4).

    prox        min over theta   F_i(theta) + (mu / 2) ||theta - start||^2      mu  `prox.mu`
    few_shots   c_t(i) as the base assigns, t <= R;  c_t(i) = c_R(i), t > R     R   `few_shots.rounds`

Readings

prox: where the pull leads
    paper   FedProx: the global model; thesis: every client is regularised towards its cluster's model
    code    FedBase: the global model, by detached numbers from 0.9.12 on
    here    the model that the client started the round from; differentiated
    option  prox.mu
few_shots: rounds that cluster
    paper   the first 10
    code    every round, in all released versions
    here    the first 10, then the assignment is held still
    option  few_shots.rounds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import UNASSIGNED, ClusteredModels, SingleModel, Strategy, bases_of
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices


@dataclass
class ProxOptions:
    """`prox.mu=...`"""

    mu: float = setting(0.95, "strength of the pull towards the model a client received", at_least=0)


@ADDONS.register("prox", "a proximal term towards the model a client received (Li et al. 2020)", label="Prox")
class Prox(Addon[SingleModel | ClusteredModels]):
    """(mu / 2) ||theta - start||^2."""

    expects = Expectations(
        cost=Cost(),
        known=(
            Known(
                "groups", "stragglers", "updates that are pulled back are harder to tell apart", limit=0.25
            ),
            Known(
                "accuracy", ALL, "a pull of 0.95 towards the start shortens every client's way", limit=0.09
            ),
            Known(
                "progress",
                "batchnorm",
                "a pull of 0.95 towards the start holds clients where they are",
                limit=0.005,
            ),
            Known("progress", "fast", "at ten times the rate a step with such a pull overshoots", limit=0.95),
            Known(
                "accuracy", "slow", "a pull of 0.95 towards the start shortens every client's way", limit=0.11
            ),
        ),
    )

    Options = ProxOptions

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if not base.takes_steps:
            return "its clients take no local steps."
        if base.proximal:
            return "it has this term already; set its own mu instead."
        if not issubclass(base, ClusteredModels | SingleModel):
            return (
                "its clients do not start a round from one model of the server; use one of "
                f"{bases_of(SingleModel)}, or {bases_of(ClusteredModels)}."
            )
        return None

    def penalties(
        self, base: SingleModel | ClusteredModels, fleet: FleetView, c: Indices | None
    ) -> list[Penalty]:
        if isinstance(base, SingleModel):
            return [Proximal(self.options.mu, base.model)]
        return [] if c is None else [Proximal(self.options.mu, base.clusters[c])]


@dataclass
class FewShotsOptions:
    """`few_shots.rounds=...`"""

    rounds: int = setting(10, "rounds after which the assignment is held still", at_least=1)


@ADDONS.register(
    "few_shots",
    "cluster in the first rounds only, then hold the assignment (thesis ch. 4-6)",
    label="few shots",
)
class FewShots(Addon[ClusteredModels]):
    """Clustering frozen after n rounds."""

    expects = Expectations(
        cost=Cost(),
        known=(
            Known(
                "groups",
                "stragglers",
                "a method that splits late has not split when it is held still",
                limit=-0.05,
            ),
            Known(
                "groups",
                "participation",
                "whoever has not taken part when it is held still joins by loss, for good",
                limit=0.75,
            ),
        ),
    )

    Options = FewShotsOptions
    state = ("clustered",)
    clustered = 0  # rounds that ended with an assignment (of a warm-up at most the last, where it assigns)

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if not issubclass(base, ClusteredModels):
            return "it holds an assignment to clusters still, which this base does not have."
        if base.fixed:
            return "its clusters never change anyway."
        return None

    def freezes(self, base: ClusteredModels) -> bool:
        return self.clustered >= self.options.rounds

    def after_round(self, base: ClusteredModels, fleet: FleetView) -> None:
        assert base.assignment is not None
        self.clustered += bool((base.assignment != UNASSIGNED).any())
