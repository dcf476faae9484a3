"""FedProx: FedAvg whose local objective pulls each client towards the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    min_theta  l_i(theta) + (mu / 2) ||theta - Theta_g||^2

Readings

mu
    paper   tuned, from 0.001 to 1; CAM and thesis: "a coefficient of 230 and a regularization of 0.95"
    code    FedBase calls it with 0.1; 0.95 stands where other methods are regularised
    here    0.95: 230 is in no released code and would pin every client to the global model
    option  fedprox.mu
The gradient of the term
    code    FedBase from 0.10.1 and FeSEM's: none, the term is built from detached numbers
    here    it is differentiated, over trainable parameters and not over BatchNorm's buffers
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
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

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known(
                "accuracy", ALL, "a pull of 0.95 towards the start shortens every client's way", limit=0.09
            ),
            Known(
                "accuracy", "slow", "a pull of 0.95 towards the start shortens every client's way", limit=0.11
            ),
        ),
    )

    Options = FedProxOptions
    proximal = True

    def round(self, fleet: FleetView) -> None:
        pull = Proximal(self.options.mu, self.model)
        theta = fleet.train(start=self.model, penalties=[pull, *self.penalties(fleet)])
        self.model = self.average(theta, fleet, otherwise=self.model)
