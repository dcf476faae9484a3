"""FedSGD: one full-batch gradient per client and round, one step of the server.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017;
FeSEM's second baseline.

    w_t       self.model                  g_k   g (stays with the clients)
    n_k / n   client_weights / sum        eta   local.lr

    w_{t+1} = w_t - eta sum_k (n_k / n) g_k,     g_k = grad F_k(w_t)

It equals averaging the models of one full-batch SGD step without momentum.

Readings. n runs over the participants of the round. Of the `local` settings only `lr` counts: there are no local
steps, hence no batches, momentum, weight decay or stragglers. Gradients are taken in evaluation mode, so a
network's BatchNorm keeps the running statistics it was initialised with (the run says so). `aggregation` applies
to the gradients, which for coordinate-wise rules is the same as applying it to the one-step models; matched
averaging permutes neurons, and a gradient has none: refused. FeSEM's released code uses the first two samples of
a client and no others: not followed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, SingleModel
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import descended


@METHODS.register(
    "fedsgd", "one full-batch gradient per client, one server step (McMahan et al. 2017)", label="FedSGD"
)
class FedSGD(SingleModel):
    """w - eta sum_k (n_k / n) grad F_k(w)."""

    takes_steps = False

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        refuse_reordering(context.aggregation, "method=fedsgd", "gradients have no neurons to match")

    def round(self, fleet: FleetView) -> None:
        self.refuse_penalties(fleet)
        g = fleet.gradients(at=self.model)  # g_k = grad F_k(w_t)
        mean = self.average(g, fleet, otherwise=np.zeros_like(self.model))
        self.model = descended(self.model, mean, self.context.lr)  # w_t - eta sum_k (n_k / n) g_k
        if g.arrived.any():
            n = fleet.sizes[g.arrived]
            self.report["federated_objective"] = float(np.average(g.objective[g.arrived], weights=n))
        if self.number == 1 and len(fleet.spec.columns("buffers")):
            self.events.append(
                "fedsgd takes gradients in evaluation mode: BatchNorm's running statistics stay as they were "
                "initialised."
            )

    def refuse_penalties(self, fleet: FleetView) -> None:
        """There is no local objective that an add-on could add a term to."""
        if self.penalties(fleet):
            raise UserError(
                "Expected fedsgd without add-ons that change local training, got one: its clients take a "
                "gradient and no steps; leave it out, or use a method that trains with local.steps=1 instead."
            )
