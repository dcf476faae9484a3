"""FedPer: the clients share a backbone, and each keeps a head of its own.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 2019.

    W_B       self.model, private columns aside       W_P_j     the private columns of Private("personal")
    gamma_j   client_weights / sum                    K_P       fedper.layers

Each client trains both parts together from (W_B, its own W_P_j); the server averages W_B alone.

Readings

The private part
    paper   the last K_P layers, or blocks of a ResNet
    here    the head as the network names it (its fully-connected layers); BatchNorm's running statistics go with the
            layer they belong to
    option  fedper.layers
The first head
    paper   each client draws its own
    here    one common draw, which `self.model` carries for ever
Optimizer state
    here    kept for both parts
    option  local.keep_optimizer=false
A client that never took part
    here    trains as it would in `unseen_rounds` rounds, for itself: each from W_B and its head so far, of which the
            head is kept. It predicts with that head on W_B, the server learns nothing of it, and it does so again for
            the next prediction. With 0 it has the common first head
    option  fedper.unseen_rounds
Networks that are all head (an mlp), or without one
    here    nothing is shared, or nothing private: the run says so
Other rules than the mean
    here    for the backbone; matched averaging is refused, private heads do not follow reordered neurons
    option  aggregation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, Strategy
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import ModelSpec, Vector, merged
from archipelago.strategies.parts import columns_of, last_layers
from archipelago.strategies.references import Indices, Merged, Prediction, Private, Reference

NEW_HEAD = "new head"  # of a client that never took part, for one prediction


@dataclass
class FedPerOptions:
    """`fedper.layers=...`"""

    layers: int | None = setting(
        None, "how many of the last layers are private (null: the network's head)", at_least=1
    )
    unseen_rounds: int = setting(
        5, "local trainings that give a client its head that never took part, before it predicts", at_least=0
    )


@METHODS.register("fedper", "a shared backbone under private heads (Arivazhagan et al. 2019)", label="FedPer")
class FedPer(Strategy):
    """W_B = sum_j gamma_j W_B,j; W_P,j stays with client j."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(Known("accuracy", ALL, "a head learns from the samples of one client alone", limit=0.06),),
    )

    Options = FedPerOptions
    private = True
    state = ("model", "seen")
    per_client: ClassVar[dict[str, float]] = {**Strategy.per_client, "seen": False}
    model: Vector  # W_B, with the head every client starts from
    seen: npt.NDArray[np.bool_]  # by client id: who has a head of its own

    @classmethod
    def check(cls, options: FedPerOptions, context: Context) -> None:
        why = "private heads do not follow reordered neurons"
        refuse_reordering(context.aggregation, "method=fedper", why)

    def setup(self, fleet: FleetView) -> None:
        self.model = fleet.initial(1)[0]
        self.seen = np.zeros(self.context.clients, bool)

    def round(self, fleet: FleetView) -> None:
        theta = fleet.train(start=self.own(fleet), penalties=self.penalties(fleet), keep="personal")
        self.welcome(fleet.select(theta.ids[theta.arrived & ~self.seen[theta.ids]]))
        mean = self.average(theta, fleet, otherwise=self.model)
        columns = private_columns(fleet.spec, self.options.layers)
        self.model = merged(mean, self.model, columns)  # W_B, the first head untouched
        if self.number == 1 and len(columns) in (0, fleet.spec.size):
            self.events.append(_nothing_to_do("shared" if len(columns) else "private"))

    def welcome(self, fleet: FleetView) -> None:
        """These have a head of their own from now on, and need no other."""
        if len(fleet.ids):
            fleet.forget(NEW_HEAD)
            self.seen = self.seen.copy()
            self.seen[fleet.ids] = True

    def own(self, fleet: FleetView) -> Merged:
        """(W_B, W_P_j) of each client."""
        return self.with_head(fleet, Private("personal", default=self.model))

    def with_head(self, fleet: FleetView, head: Reference) -> Merged:
        """W_B under these heads."""
        return Merged(self.model, head, private_columns(fleet.spec, self.options.layers))

    def prediction(self, fleet: FleetView) -> Prediction:
        head = self.new_heads(fleet.select(fleet.ids[~self.seen[fleet.ids]]))
        return Prediction([self.with_head(fleet, Private("personal", default=head))])

    def new_heads(self, fleet: FleetView) -> Reference:
        """Heads of clients that never took part: trained as in a round, again and again, W_B as it is."""
        head: Reference = self.model
        for turn in range(self.options.unseen_rounds if len(fleet.ids) else 0):
            fleet.train(start=self.with_head(fleet, head), slot=f"new head {turn}", keep=NEW_HEAD, fresh=True)
            head = Private(NEW_HEAD, default=self.model)
        return head

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"global": self.model}


def private_columns(spec: ModelSpec, layers: int | None) -> Indices:
    """The columns of the head, or of the last `layers` layers, running statistics included."""
    return columns_of(last_layers(spec, layers))


def _nothing_to_do(missing: str) -> str:
    if missing == "shared":
        return (
            "fedper shares nothing: the whole network is its private part, so every client trains alone; "
            "set fedper.layers to keep only the last layers private."
        )
    return "fedper keeps nothing private: the network names no head, so everything is averaged; set fedper.layers."
