"""FeSEM: multi-center federated learning by stochastic expectation maximisation over model parameters.

Long, Xie, Shen, Zhou, Wang, Jiang, "Multi-center federated learning: clients clustering for better
personalization", World Wide Web 2023; thesis (3.2a), (3.2b).

    W_i   theta (stays with client i)     W~(k)   self.clusters[k]     r_ik   c

Each round: local update from the cluster's model (Alg. 2), E-step (8): nearest centre by K-means on model
parameters, M-step (9): the mean inside each cluster.

Readings

Local objective
    paper   (7), with factors alpha_i and 1/m on its parts
    code    the loss alone; FedBase, where asked to: l_i plus a pull whose gradient is 0
    here    l_i + (lambda / 2) ||W_i - W~(c)||^2 on trainable parameters, lambda = 0 as in the CAM paper's and the
            thesis's tables
    option  fesem.lam
What K-means sees
    paper   the flattened parameters
    code    the last layer's weight matrix
    here    as the code
    option  fesem.features=head|parameters|updates|directions, or a descriptor
Mean of a cluster
    paper   (9): uniform
    code    FedBase: by n_i
    here    by n_i, so that K = 1 is FedAvg
    option  weights=uniform
Centres of K-means
    paper   the best of 20 starts, once
    code    its own: warm; FedBase: new starts every round
    here    the best of 20 K-means++ starts, every round
    option  fesem.warm, fesem.starts, fesem.clustering, fesem.distance
Clients unlike all others, of few samples or few steps
    here    K-means spends a cluster on one client of one class, or on those whose models have hardly moved
    option  method=wecfl (weighs by size), method=robust
New clients without labels
    here    by the entropy of predictions; where clients are known by a descriptor that reads no labels, the cluster
            whose members are nearest to theirs on average
    option  adoption=entropy
Absent clients
    paper   all take part
    code    their last point
    here    K-means sees the newest known point of every client, which is of another round than others': clusters may
            part by that at first, and stay apart; those never seen join the cluster of least loss. Directions from the
            mean of the clusters of the same round do not depend on the round: two rotations are found at 20 %
    option  fesem.features=directions
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.by_parameters import (
    ODD,
    SIZES,
    STALE,
    STRAGGLERS,
    ByParameters,
    ByParametersOptions,
)
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices


@dataclass
class FeSEMOptions(ByParametersOptions):
    """`fesem.lam=...`"""

    lam: float = setting(0.0, "pull of the local objective towards the own centre, Eq. (7)", at_least=0)


@METHODS.register(
    "fesem", "K-means on client models, mean inside each cluster (Long, Xie et al. 2023)", label="FeSEM"
)
class FeSEM(ByParameters):
    """Local update, E-step, M-step."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known("cost", "participation", "a client never seen compares all models, once", limit=3.0),
            *STALE,
            STRAGGLERS,
            SIZES,
            ODD,
        ),
    )

    Options = FeSEMOptions

    def penalties(self, fleet: FleetView, c: Indices | None = None) -> list[Penalty]:
        terms = super().penalties(fleet, c)
        if self.options.lam and c is not None:
            terms.append(Proximal(self.options.lam, self.clusters[c]))  # (7)
        return terms
