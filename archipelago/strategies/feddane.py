"""FedDANE: local training whose gradient is corrected towards the federation's.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "FedDANE: A Federated Newton-Type Method", Asilomar 2019.

    w^{t-1}   self.model      grad F_k(w^{t-1})   g (stays with the clients)      g_t   mean
    w_k^t     theta           mu                  feddane.mu                      p_k   client_weights / sum

    w_k^t ~ argmin_w  F_k(w) + <g_t - grad F_k(w^{t-1}), w - w^{t-1}> + (mu / 2) ||w - w^{t-1}||^2

Readings. Both phases ask the same clients, the participants of the round. (The paper draws a second sample; the
authors' code means to, but reseeds its sampler and gets the first one again.) Both means are weighted as
`weights` says. The inexact solver is the experiment's local training, momentum included. Gradients are taken on
all of a client's samples and in evaluation mode, so with BatchNorm the correction uses running, not batch,
statistics. g_t is a mean whatever `aggregation` says, so that the corrections cancel: sum_k p_k (g_t - grad F_k) =
0. mu = 0 by default, as in the authors' own commands for this method; FeSEM's code has 0, 0.5 and 1. A client
whose gradient is not finite sits out the second phase. Expect poor results on heterogeneous clients: the authors
say so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
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

    Options = FedDANEOptions

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
