"""FedSGD: one full-batch gradient per client and round, one step of the server.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017;
FeSEM's second baseline.

    w_t       self.model                  g_k   g (stays with the clients)
    n_k / n   client_weights / sum        eta   local.lr

    w_{t+1} = w_t - eta sum_k (n_k / n) g_k,     g_k = grad F_k(w_t)

It equals averaging the models of one full-batch SGD step without momentum.

Readings

Samples of a gradient
    paper   all of a client's samples (E = 1, B = infinity)
    code    FeSEM's: the client's first two samples
    here    all of them; n runs over the participants of the round
Settings that count
    here    local.lr alone: no local steps, hence no batches, momentum, weight decay or stragglers
BatchNorm
    here    gradients are taken in evaluation mode: running statistics stay as initialised, and the run says so
    option  a network without BatchNorm
Other rules than the mean
    here    they are applied to the gradients; matched averaging is refused, a gradient has no neurons
    option  aggregation
"""

from __future__ import annotations

from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import descended


@METHODS.register(
    "fedsgd", "one full-batch gradient per client, one server step (McMahan et al. 2017)", label="FedSGD"
)
class FedSGD(SingleModel):
    """w - eta sum_k (n_k / n) grad F_k(w)."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known(
                "progress", "one_class", "one step of the server a round hardly begins to learn", limit=0.01
            ),
            Known(
                "accuracy",
                ALL,
                "one step of the server a round, where others take ten at every client",
                limit=0.89,
            ),
        ),
    )

    takes_steps = False

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        refuse_reordering(context.aggregation, "method=fedsgd", "gradients have no neurons to match")

    def round(self, fleet: FleetView) -> None:
        self.refuse_penalties(fleet)
        g = fleet.gradients(at=self.model)  # g_k = grad F_k(w_t)
        mean = self.average(g, fleet, otherwise=np.zeros_like(self.model))
        eta = self.lr
        self.model = descended(self.model, mean, eta)  # w_t - eta sum_k (n_k / n) g_k
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
                "gradient and no steps; leave it out, or use a method that trains with local.steps=1 instead.",
                code="add-on", base="fedsgd",
            )  # fmt: skip
