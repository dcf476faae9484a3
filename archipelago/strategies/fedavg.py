"""FedAvg: one global model, averaged over the clients that took part.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017;
thesis (2.5), (2.6).

    Theta_g   self.model             theta_i   theta (stays with the clients)
    psi_i     client_weights / sum: n_i / n, or uniform with `weights=uniform`

Readings

Who is averaged
    paper   the clients drawn for the round, weighted by n_i / n
    code    FedBase: all clients, every round
    here    the participants of the round, BatchNorm's running statistics included
    option  weights=uniform, participation.fraction
Momentum from round to round
    paper   none: plain SGD
    code    FedBase makes a client's optimizer once: its momentum acts on the next model it receives
    here    as FedBase
    option  local.keep_optimizer=false
"""

from __future__ import annotations

from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import Cost, Expectations
from archipelago.strategies.interface import FleetView


@METHODS.register("fedavg", "one global model, weighted average (McMahan et al. 2017)", label="FedAvg")
class FedAvg(SingleModel):
    """Theta_g = sum_i psi_i theta_i."""

    expects = Expectations(cost=Cost(down=1, up=1, trainings=1))

    def round(self, fleet: FleetView) -> None:
        theta = fleet.train(start=self.model, penalties=self.penalties(fleet))  # (2.5)
        self.model = self.average(theta, fleet, otherwise=self.model)  # (2.6)
