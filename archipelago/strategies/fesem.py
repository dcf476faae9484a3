"""FeSEM: multi-center federated learning by stochastic expectation maximisation over model parameters.

Long, Xie, Shen, Zhou, Wang, Jiang, "Multi-center federated learning: clients clustering for better
personalization", World Wide Web 2023; thesis (3.2a), (3.2b).

    W_i   theta (stays with client i)     W~(k)   self.clusters[k]     r_ik   c

Each round: local update from the cluster's model (Alg. 2), E-step (8): nearest centre by K-means on model
parameters, M-step (9): the mean inside each cluster.

Readings. Eq. (7)'s factors alpha_i and 1/m are used nowhere: the local objective is l_i + (lambda/2) ||W_i -
W~(c)||^2 on trainable parameters (lambda = 0 in the CAM paper's and the thesis's tables). K-means sees the
last layer's weight matrix, as all released code does, not "the flattened parameters"; `features=head` is every
fully-connected layer. (9) is the uniform mean: `weights=uniform`; by default the mean is weighted by
n_i, as in the tables of the CAM paper and the thesis, so that K = 1 is FedAvg. Centres: the best of
`starts` K-means++ starts every round (the paper: best of 20 once), or `warm`: from the last centres.
K-means sees the newest known model of every client seen so far, as the paper's own code
does; clients that were never seen join the cluster of least loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.clustering import ByParameters
from archipelago.strategies.interface import FleetView
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices


@dataclass
class FeSEMOptions:
    """`fesem.lam=...`"""

    lam: float = setting(0.0, "pull of the local objective towards the own centre, Eq. (7)", at_least=0)
    features: str = setting(
        "classifier", "what K-means sees of a model", choices=("classifier", "head", "parameters")
    )
    clustering: str = setting("kmeans", "clustering rule (see `list`), or an import path")
    starts: int = setting(20, "K-means++ starts, of which the best is kept", at_least=1)
    warm: bool = setting(False, "start K-means from the last round's centres")


@METHODS.register(
    "fesem", "K-means on client models, mean inside each cluster (Long, Xie et al. 2023)", label="FeSEM"
)
class FeSEM(ByParameters):
    """Local update, E-step, M-step."""

    Options = FeSEMOptions

    def penalties(self, fleet: FleetView, c: Indices | None = None) -> list[Penalty]:
        terms = super().penalties(fleet, c)
        if self.options.lam and c is not None:
            terms.append(Proximal(self.options.lam, self.clusters[c]))  # (7)
        return terms
