"""SCAFFOLD: every local step is corrected by how a client's gradient differs from the federation's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020 (Algorithm 1).

    x      self.model                y_i     theta (stays with the clients)      eta_l   local.lr
    c      self.control              c_i     Private("control")                  eta_g   server.lr
    K      theta.steps               |S|/N   the participants' share of all client weights

    y_i <- y_i - eta_l (g_i(y_i) - c_i + c)                                     (3)
    c_i+ = g_i(x)  (option I),  or  c_i - c + (x - y_i) / (K eta_l)  (option II)   (4)
    x <- x + eta_g mean_S (y_i - x),    c <- c + (|S| / N) mean_S (c_i+ - c_i)     (5)

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
c_i+
    paper   either option; II in the experiments, as it costs nothing
    code    none by the authors; NIID-Bench and FedRep's have II
    here    II
    option  scaffold.control=gradient is option I, on all of a client's samples, in evaluation mode
Momentum of the local steps
    paper   none
    code    NIID-Bench: the correction is applied beside the optimizer, K eta_l is divided by as without momentum
    here    the correction is part of the gradient; c_i+ divides by the number of learning rates that the steps add up
            to, so that it stays a mean of gradients, and momentum starts from zero in every round
    option  local.momentum=0
Other optimizers
    here    option II is refused: the way that Adam went is no sum of gradients
    option  scaffold.control=gradient
Weights of both means
    paper   clients count the same
    code    NIID-Bench: models by n_i, controls alike
    here    as `weights` says, for models and controls: sum_i p_i (c - c_i) = 0 as in the paper
    option  weights=uniform is the paper's
Other rules than the mean
    here    for the models; controls are averaged whatever `aggregation` says
    option  aggregation
Add-ons' terms
    here    part of g_i, hence of c_i under option II
A client whose training was not finite
    here    keeps its c_i
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, SingleModel
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.local_steps import accumulated_steps, refuse_other_optimizers
from archipelago.strategies.parameters import Vector, summed
from archipelago.strategies.penalties import Linear
from archipelago.strategies.references import Private, Sum, Terms


@dataclass
class ScaffoldOptions:
    """`scaffold.control=...`"""

    control: str = setting(
        "drift",
        "c_i: from the way a client went (option II), or its gradient at the received model (option I)",
        choices=("drift", "gradient"),
    )


@METHODS.register(
    "scaffold", "control variates against client drift (Karimireddy et al. 2020)", label="SCAFFOLD"
)
class Scaffold(SingleModel):
    """FedAvg whose steps are along g_i - c_i + c."""

    expects = Expectations(
        cost=Cost(down=2, up=2, trainings=1),
        known=(
            Known(
                "accuracy",
                "slow",
                "momentum starts from zero in every round, FedAvg's carries on",
                limit=0.32,
            ),
            Known(
                "accuracy", ("sizes", "stragglers"), "controls of few samples or steps are noisy", limit=0.09
            ),
            Known("oscillation", "sizes", "controls of few samples are noisy", limit=0.09),
        ),
    )

    Options = ScaffoldOptions
    state = ("model", "control")
    control: Vector  # c

    @classmethod
    def check(cls, options: ScaffoldOptions, context: Context) -> None:
        why = "control variates do not follow reordered neurons"
        refuse_reordering(context.aggregation, "method=scaffold", why)
        if options.control == "drift":
            instead = "use sgd, or scaffold.control=gradient"
            refuse_other_optimizers(context, "scaffold.control=drift", instead)

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.control = np.zeros_like(self.model)

    def round(self, fleet: FleetView) -> None:
        x, c, n = self.model, self.control, self.client_weights(fleet)
        c_i = Private("control", default=np.zeros_like(x))
        correction = Linear(1.0, Sum(((1.0, c), (-1.0, c_i))), x)
        y = fleet.train(start=x, penalties=[correction, *self.penalties(fleet)], restart=True)  # (3)
        self.model = self.average(y, fleet, otherwise=x)  # (5)
        if not self.lr:  # a schedule may have come to 0: nobody went anywhere
            return
        change = fleet.derive(Sum(self.change(fleet, x, y, c_i)), slot="control")  # c_i+ - c_i
        fleet.derive(Sum(((1.0, c_i), (1.0, change))), slot="kept control", keep="control")  # (4)
        mean = change.average(weights=n, otherwise=np.zeros_like(x))
        share = n[change.arrived].sum() / self.client_weights(fleet.everyone).sum()  # |S| / N
        self.control = summed([c, mean], [1.0, share])

    def change(self, fleet: FleetView, x: Vector, y: Handle, c_i: Private) -> Terms:
        """The terms of c_i+ - c_i, by (4)."""
        if self.options.control == "gradient":
            return (1.0, fleet.gradients(at=x)), (-1.0, c_i)
        steps = self.lr * accumulated_steps(np.maximum(y.steps, 1.0), self.context.momentum)  # K eta_l
        return (-1.0, self.control), (1.0 / steps, x), (-1.0 / steps, y)
