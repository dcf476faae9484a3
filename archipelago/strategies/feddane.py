"""FedDANE: local training whose gradient is corrected towards the federation's.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "FedDANE: A Federated Newton-Type Method", Asilomar 2019.

    w^{t-1}   self.model      grad F_k(w^{t-1})   g (stays with the clients)      g_t   mean
    w_k^t     theta           mu                  feddane.mu                      p_k   client_weights / sum

    w_k^t ~ argmin_w  F_k(w) + <g_t - grad F_k(w^{t-1}), w - w^{t-1}> + (mu / 2) ||w - w^{t-1}||^2

Readings

Clients of the second phase
    paper   a second sample
    code    means to draw one, but reseeds its sampler and gets the first one again
    here    the participants of the round, in both phases
Weights of both means
    paper   clients drawn by p_k, plain means
    code    by n_k
    here    as `weights` says; g_t is a mean whatever `aggregation` says: sum_k p_k (g_t - grad F_k) = 0
    option  weights=uniform
The inexact solver
    paper   any; SGD
    here    the experiment's local training, momentum included
    option  local.momentum=0
mu
    code    0 in the authors' commands for this method; 0, 0.5 and 1 in FeSEM's
    here    0
    option  feddane.mu
Gradients
    here    on all of a client's samples, in evaluation mode: with BatchNorm from running statistics; a client whose
            gradient is not finite sits out the second phase

Expected results
    paper   poor on heterogeneous clients: the authors say so
    here    the same
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Linear, Penalty, Proximal


@dataclass
class FedDANEOptions:
    """`feddane.mu=...`"""

    mu: float = setting(0.0, "strength of the pull towards the global model", at_least=0)


@METHODS.register(
    "feddane",
    "local gradients corrected by the federation's, in two phases (Li et al. 2019)",
    label="FedDANE",
)
class FedDANE(SingleModel):
    """FedProx plus the linear term <g_t - grad F_k(w^{t-1}), w - w^{t-1}>."""

    expects = Expectations(
        cost=Cost(down=2, up=2, trainings=1.4),
        known=(
            Known("accuracy", ALL, "a correction by full gradients does not fit a local model that has moved on: the "
                  "authors report poor results on heterogeneous clients", limit=0.17),
            Known("accuracy", "one_class", "the client of one class pulls against all others", limit=0.36),
            Known("oscillation", ALL, "the correction is as long however far the local model has moved", limit=0.3),
            Known("progress", ("one_class", "dirichlet"), "the correction is as long however far the local model is",
                  limit=0.2),
        ),
    )  # fmt: skip

    Options = FedDANEOptions
    corrected = True

    def round(self, fleet: FleetView) -> None:
        g = fleet.gradients(at=self.model)  # phase 1: grad F_k(w^{t-1})
        mean = g.average(weights=self.client_weights(fleet), otherwise=np.zeros_like(self.model))  # g_t
        fleet = fleet.select(fleet.ids[g.arrived])
        terms = [*self.correction(g, mean), *self.penalties(fleet)]
        theta = fleet.train(start=self.model, penalties=terms)  # phase 2: w_k^t
        self.model = self.average(theta, fleet, otherwise=self.model)  # w^t

    def correction(self, g: Handle, mean: Vector) -> list[Penalty]:
        """<g_t - grad F_k(w^{t-1}), w - w^{t-1}> + (mu / 2) ||w - w^{t-1}||^2."""
        here = self.model
        return [Linear(1.0, mean, here), Linear(-1.0, g, here), Proximal(self.options.mu, here)]
