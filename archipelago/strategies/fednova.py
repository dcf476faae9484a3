"""FedNova: clients that take different numbers of local steps, averaged by the direction in which they went.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020.

    x        self.model              x_i        theta (stays with the clients)      p_i   client_weights / sum
    tau_i    theta.steps             ||a_i||_1  accumulated_steps                   eta   local.lr

    d_i = (x - x_i) / (eta ||a_i||_1),   tau_eff = sum_i p_i ||a_i||_1
    x <- x - tau_eff sum_i p_i eta d_i = x + sum_i p_i (tau_eff / ||a_i||_1) (x_i - x)

With as many steps everywhere it is FedAvg, to the last bit; with unequal ones FedAvg converges to the minimum of an
objective in which p_i is weighted by tau_i, this to that of sum_i p_i F_i.

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
a_i
    paper   of any local solver; with momentum m: [1 - m^tau, ..., 1 - m] / (1 - m)
    code    SGD, momentum and FedProx's pull, counted step by step
    here    SGD and momentum, in closed form; terms of add-ons are taken for a part of the gradient
Momentum from round to round
    code    zero at the beginning of every round, as a_i assumes
    here    as the code, whatever local.keep_optimizer says
Other optimizers
    here    refused: their steps are no sum of gradients
tau_eff
    paper   free; the weighted mean of ||a_i||_1 in the experiments
    code    as the experiments (with FedProx, of tau_i)
    here    as the experiments
    option  server.lr scales it
Clients of the sums
    paper   p_i over all clients, or over those that were drawn
    here    the participants of the round
BatchNorm
    code    none in its networks
    here    running statistics are FedAvg's mean: they are no steps
Other rules than the mean
    here    refused: normalised averaging is the rule
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.strategies.aggregation import Rule
from archipelago.strategies.base import METHODS, Context, SingleModel
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.local_steps import accumulated_steps, refuse_other_optimizers
from archipelago.strategies.parameters import merged, moved
from archipelago.strategies.references import Models


@METHODS.register(
    "fednova", "averages of normalised updates where local steps differ (Wang et al. 2020)", label="FedNova"
)
class FedNova(SingleModel):
    """x + tau_eff sum_i p_i (x_i - x) / ||a_i||_1."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known("progress", "stragglers", "a single mini-batch is scaled to everybody's steps", limit=0.06),
            Known(
                "accuracy",
                "slow",
                "momentum starts from zero in every round, FedAvg's carries on",
                limit=0.32,
            ),
            Known(
                "accuracy",
                "batchnorm",
                "momentum starts from zero in every round, FedAvg's carries on",
                limit=0.05,
            ),
            Known("accuracy", "stragglers", "a single mini-batch is scaled to everybody's steps", limit=0.15),
            Known(
                "oscillation", "stragglers", "a single mini-batch is scaled to everybody's steps", limit=0.28
            ),
        ),
    )

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        refuse_other_optimizers(context, "method=fednova")
        rule = Rule.chosen(context.aggregation)
        if not rule.mean:
            raise UserError(
                f"Expected aggregation=mean for method=fednova, got {rule.name}: normalised averaging is a rule of its "
                "own; leave it out, or use another method.",
                code="aggregation",
                rule=rule.name,
            )

    def round(self, fleet: FleetView) -> None:
        x = self.model
        theta = fleet.train(start=x, penalties=self.penalties(fleet), restart=True)  # x_i
        if not theta.arrived.any():
            return
        p = self.client_weights(fleet) * theta.arrived
        a = accumulated_steps(np.maximum(theta.steps, 1.0), self.context.momentum)  # ||a_i||_1
        a = a / a[theta.arrived].max()  # what all have in common cancels, and equal ones are 1
        # sum_i p_i (tau_eff / a_i) (x_i - x) is so many times the mean with weights p_i / a_i, minus x:
        far = math.fsum(p * a) * math.fsum(p / a) / math.fsum(p) ** 2
        mean = theta.average(weights=p / a, otherwise=x)
        step = moved(x, mean, far)
        buffers = fleet.spec.columns("buffers")
        if len(buffers) and far != 1.0:
            step = merged(step, theta.average(weights=p, otherwise=x), buffers)
        fed = np.ones(1, bool)
        self.model = self.stepped(theta, Models(x[None]), Models(step[None]), fed, fleet, "/all")[0]
        self.report["effective_steps"] = float(np.average(theta.steps, weights=p))
