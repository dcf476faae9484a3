"""WeCFL: weighted clustered federated learning.

Ma, Long, Zhou, Jiang, Zhang, "On the convergence of clustered federated learning", 2022; thesis chapter 3,
(3.3a), (3.3b), Algorithm 1.

    theta_i   theta (stays with client i)   Theta_k   self.clusters[k]   psi_i   n_i / n   r_ik   c

    min over r, Theta of sum_k sum_i psi_i r_ik d(theta_i, Theta_k)

E-step: the nearest centre (psi_i is irrelevant to one client's argmin, and weighs it in the centres); M-step: the
psi-weighted centroid, which is FedAvg inside the cluster; distribute; Q local steps.

Readings. Algorithm 1 starts with an E-step on random centres; with one common start all theta_i would be equal,
so a round starts with the local update. K-means sees the last layer's weight matrix (`wecfl.features`) and is
fitted afresh each round. The only difference to FeSEM with `weights=size` is K-means' sample weights:
with equal n_i both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.clustering import ByParameters
from archipelago.strategies.interface import FleetView


@dataclass
class WeCFLOptions:
    """`wecfl.features=...`"""

    features: str = setting(
        "classifier", "what K-means sees of a model", choices=("classifier", "head", "parameters")
    )
    clustering: str = setting("kmeans", "clustering rule (see `list`), or an import path")
    starts: int = setting(20, "K-means++ starts, of which the best is kept", at_least=1)
    warm: bool = setting(False, "start K-means from the last round's centres")


@METHODS.register(
    "wecfl", "K-means weighted by data size, FedAvg inside each cluster (Ma et al. 2022)", label="WeCFL"
)
class WeCFL(ByParameters):
    """Local update, weighted E-step, weighted M-step."""

    Options = WeCFLOptions

    def point_weights(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        return self.client_weights(fleet)  # psi_i of (3.3b)
