"""FedProx: FedAvg whose local objective pulls each client towards the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    min_theta  l_i(theta) + (mu / 2) ||theta - Theta_g||^2

Reading: mu = 0.95 with the factor 1/2. The "coefficient of 230" printed in the CAM paper has no counterpart
in any released code and would pin every client to the global model. The term is differentiable and covers the
trainable parameters, not BatchNorm's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.interface import FleetView
from archipelago.strategies.penalties import Proximal


@dataclass
class FedProxOptions:
    """`fedprox.mu=...`"""

    mu: float = setting(0.95, "strength of the pull towards the global model", at_least=0)


@METHODS.register(
    "fedprox", "FedAvg with a proximal term towards the global model (Li et al. 2020)", label="FedProx"
)
class FedProx(SingleModel):
    """FedAvg on l_i + (mu / 2) ||theta - Theta_g||^2."""

    Options = FedProxOptions
    proximal = True

    def round(self, fleet: FleetView) -> None:
        pull = Proximal(self.options.mu, self.model)
        theta = fleet.train(start=self.model, penalties=[pull, *self.penalties(fleet)])
        self.model = self.average(theta, fleet, otherwise=self.model)
