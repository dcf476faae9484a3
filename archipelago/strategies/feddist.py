"""FedDist and FedDWS: the server takes a part of the way to the mean of the clients' models.

FeSEM's baselines 9 and 10 (Long, Xie et al., "Multi-center federated learning: clients clustering for better
personalization", World Wide Web 2023), after Reptile (Nichol, Achiam, Schulman, "On First-Order Meta-Learning
Algorithms", 2018), whose outer step follows the gradient of a distance, sum_i ||w - w_i||^2 / 2.

    w   self.model     w_i   theta (stays with the clients)     epsilon   feddist.epsilon, feddws.epsilon

    FedDist   w <- w + epsilon sum_i (1 / |S|) (w_i - w)
    FedDWS    w <- w + epsilon sum_i (n_i / n) (w_i - w)

epsilon = 1 is FedAvg, uniform for FedDist and weighted as `weights` says for FedDWS.

Readings

epsilon
    code    0.6, in FeSEM's code, which has no caller for either
    here    0.6; at most 1, so that BatchNorm's variances stay positive
    option  feddist.epsilon, feddws.epsilon
Weights of FedDWS
    paper   "changing the aggregation to weighted averaging"
    code    divides by |S| a second time, and does not run
    here    as the paper
What moves
    here    the whole model, BatchNorm's running statistics included
Other rules than the mean
    here    they make the point that the server moves towards
    option  aggregation
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import moved


@dataclass
class ReptileOptions:
    """`feddist.epsilon=...`, `feddws.epsilon=...`"""

    epsilon: float = setting(
        0.6, "how much of the way to the mean of the clients' models the server goes", above=0, at_most=1
    )


class ReptileStep(SingleModel):
    """w + epsilon (mean of w_i - w)."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known(
                "progress",
                "sizes",
                "the server goes a part of the way, for clients of any size",
                0.01,
            ),
            Known("accuracy", ALL, "the server goes a part of the way", limit=0.06),
            Known(
                "accuracy",
                "slow",
                "the server goes a part of the way, and momentum is for all of it",
                limit=0.27,
            ),
        ),
    )

    Options = ReptileOptions

    def round(self, fleet: FleetView) -> None:
        theta = fleet.train(start=self.model, penalties=self.penalties(fleet))
        mean = self.average(theta, fleet, otherwise=self.model)
        self.model = moved(self.model, mean, self.options.epsilon)


@METHODS.register(
    "feddist", "a part of the way to the plain mean of the models (Reptile; FeSEM's FedDist)", label="FedDist"
)
class FedDist(ReptileStep):
    """Every client counts once, whatever `weights` says."""

    def client_weights(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        return np.ones(len(fleet.ids))


@METHODS.register(
    "feddws", "a part of the way to the weighted mean of the models (FeSEM's FedDist+WS)", label="FedDWS"
)
class FedDWS(ReptileStep):
    """Clients count by n_i, or as `weights` says."""
