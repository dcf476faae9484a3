"""WeCFL: weighted clustered federated learning.

Ma, Long, Zhou, Jiang, Zhang, "On the convergence of clustered federated learning", 2022; thesis chapter 3,
(3.3a), (3.3b), Algorithm 1.

    theta_i   theta (stays with client i)   Theta_k   self.clusters[k]   psi_i   n_i / n   r_ik   c

    min over r, Theta of sum_k sum_i psi_i r_ik d(theta_i, Theta_k)

E-step: the nearest centre (psi_i is irrelevant to one client's argmin, and weighs it in the centres); M-step: the
psi-weighted centroid, which is FedAvg inside the cluster; distribute; Q local steps.

Readings

What comes first
    paper   an E-step on random centres
    code    the local update, from one common model
    here    as the code: from one start all theta_i would be equal
What K-means sees
    paper   theta_i
    code    the last layer's weight matrix, fitted afresh each round
    here    as the code
    option  wecfl.features=head|parameters|updates|directions, or a descriptor; wecfl.warm
The difference to FeSEM
    code    K-means' sample weights psi_i alone
    here    as the code: with equal n_i both are the same
Absent clients
    paper   all take part
    here    K-means sees the newest known point of every client, as FeSEM's code does
    option  wecfl.features=directions, see FeSEM
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.strategies.base import METHODS
from archipelago.strategies.by_parameters import ODD, STALE, STRAGGLERS, ByParameters, ByParametersOptions
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView


@dataclass
class WeCFLOptions(ByParametersOptions):
    """`wecfl.features=...`"""


@METHODS.register(
    "wecfl", "K-means weighted by data size, FedAvg inside each cluster (Ma et al. 2022)", label="WeCFL"
)
class WeCFL(ByParameters):
    """Local update, weighted E-step, weighted M-step."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known("cost", "participation", "a client never seen compares all models, once", limit=3.0),
            *STALE,
            STRAGGLERS,
            ODD,
        ),
    )

    Options = WeCFLOptions

    def point_weights(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        return self.client_weights(fleet)  # psi_i of (3.3b)
