"""FedRep: a shared representation under private heads, trained one after the other.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021 (Algorithm 1).

    phi   self.model, private columns aside      h_i   the private columns of Private("personal")
    tau_h  fedrep.head_steps                     tau_phi  local.steps (or epochs)

Each participant takes tau_h steps on its head with the representation held still, then tau_phi steps on the
representation with its new head held still; the server averages the representations.

    h_i^{t,s} = GRD(f_i(h_i^{t,s-1}, phi^{t-1}), h_i^{t,s-1}, alpha)
    phi_i^{t,s} = GRD(f_i(h_i^{t,tau_h}, phi_i^{t,s-1}), phi_i^{t,s-1}, alpha)

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
Steps on the head
    paper   many (10 epochs), the representation gets 1 to 5; others train as long as the representation does
    code    local_ep - local_rep_ep epochs; FedAvg is given local_rep_ep
    here    as many as on the representation, so that no client's head outruns its samples
    option  fedrep.head_steps
The private part
    paper   the last layer, or layers
    code    the last layer of each network
    here    the head as the network names it (its fully-connected layers); BatchNorm's running statistics go with their
            layer, and move in both phases
    option  fedrep.layers
Weights of the mean
    paper   clients count the same
    code    by n_i
    here    as `weights` says
    option  weights=uniform
Optimizer state
    code    a new optimizer in every round, for both phases
    here    a new one for each phase of each round
The first head
    code    one common draw
    here    as the code; `self.model` carries it for ever
A client that never took part
    paper   learns a head of its own on the representation, which stays as it is
    code    all clients take part in a last round
    here    as the paper, before it predicts: local training of the common first head alone
    option  fedrep.new_heads=false: it predicts with the common first head
Networks that are all head (an mlp), or without one
    here    nothing is shared, or nothing private: the run says so
Other rules than the mean
    here    for the representation; matched averaging is refused, private heads do not follow reordered neurons
    option  aggregation
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, Strategy
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector, merged
from archipelago.strategies.parts import columns_of, last_layers, trained_names
from archipelago.strategies.references import Merged, Prediction, Private, Reference


@dataclass
class FedRepOptions:
    """`fedrep.head_steps=...`"""

    head_steps: int | None = setting(
        None, "mini-batch steps on the head before the representation (null: as many as on it)", at_least=0
    )
    layers: int | None = setting(
        None, "how many of the last layers are private (null: the network's head)", at_least=1
    )
    new_heads: bool = setting(True, "clients that never took part train a head before they predict")


@METHODS.register(
    "fedrep", "a shared representation, then private heads on it (Collins et al. 2021)", label="FedRep"
)
class FedRep(Strategy):
    """h_i by client i on the shared phi, then phi by everybody under their new heads."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=2),
        known=(
            Known("accuracy", ALL, "a head learns from the samples of one client alone", limit=0.1),
            Known("accuracy", "slow", "and momentum starts from zero in every round", limit=0.32),
        ),
    )

    Options = FedRepOptions
    private = True
    state = ("model", "seen")
    per_client = {"seen": 0}  # noqa: RUF012  (a class variable of the base)
    model: Vector  # phi, with the head that every client starts from
    seen: npt.NDArray[np.int64]  # 1 for clients that have a head of their own

    @classmethod
    def check(cls, options: FedRepOptions, context: Context) -> None:
        why = "private heads do not follow reordered neurons"
        refuse_reordering(context.aggregation, "method=fedrep", why)

    def setup(self, fleet: FleetView) -> None:
        self.model = fleet.initial(1)[0]
        self.seen = np.zeros(self.context.clients, np.int64)

    def round(self, fleet: FleetView) -> None:
        private = last_layers(fleet.spec, self.options.layers)
        head = trained_names(private)
        body = trained_names([entry for entry in fleet.spec.entries if entry not in private])
        start, terms, tau = self.own(fleet, self.model), self.penalties(fleet), self.options.head_steps
        if head and tau != 0:
            start = fleet.train(
                start, penalties=terms, only=head, steps=tau, slot="head", keep="personal", restart=True
            )  # h_i^t
        if body:
            phi = fleet.train(start, penalties=terms, only=body, keep="personal", restart=True)  # phi_i^t
            mean = self.average(phi, fleet, otherwise=self.model)
            self.model = merged(mean, self.model, columns_of(private))  # phi^t, the first head untouched
        self.seen = self.seen.copy()
        self.seen[fleet.ids] = 1
        if self.number == 1 and not (head and body):
            self.events.append(_nothing_to_do("shared" if head else "private"))

    def own(self, fleet: FleetView, first: Reference) -> Reference:
        """(phi, h_i) of each client; `first` has the head of a client without one of its own."""
        columns = columns_of(last_layers(fleet.spec, self.options.layers))
        return Merged(self.model, Private("personal", default=first), columns)

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.own(fleet, self.heads_of_new(fleet))])

    def heads_of_new(self, fleet: FleetView) -> Reference:
        """A head for every client that never took part, learned on the representation as it is."""
        head = trained_names(last_layers(fleet.spec, self.options.layers))
        new = fleet.ids[self.seen[fleet.ids] == 0]
        if not (len(new) and head and self.options.new_heads and self.number):
            return self.model
        return fleet.select(new).train(
            self.model, only=head, steps=self.options.head_steps or None, slot="new head", fresh=True
        )

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"global": self.model}


def _nothing_to_do(missing: str) -> str:
    if missing == "shared":
        return (
            "fedrep shares nothing: the whole network is its private part, so every client trains alone; "
            "set fedrep.layers to keep only the last layers private."
        )
    return "fedrep keeps nothing private: the network names no head, so everything is averaged; set fedrep.layers."
