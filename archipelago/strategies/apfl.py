"""APFL: every client predicts with a mixture of the global model and one of its own, trained as that mixture.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv 2020 (Algorithm 1).

    w^t     self.model       v_i       Private("personal")      alpha_i   self.alpha
    w_i^t   theta            vbar_i    alpha_i v_i + (1 - alpha_i) w_i  (the model that client i predicts with)

    w_i <- w_i - eta grad f_i(w_i; xi)
    v_i <- v_i - eta grad_v f_i(vbar_i; xi),   grad_v f_i(vbar_i) = alpha_i grad f_i(vbar_i)
    alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(vbar_i)>     once a round, with apfl.adaptive=true

The global model is FedAvg's, to the last bit (BatchNorm's statistics aside): v_i never enters it. alpha = 0 is FedAvg,
alpha = 1 local training.

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
The mixture
    paper   of parameters
    code    of outputs
    here    of parameters, for training and prediction
alpha
    paper   fixed in the analysis, then adaptive
    code    0.5 and fixed, unless asked
    here    0.5 and fixed
    option  apfl.alpha, apfl.adaptive=true
The step of alpha
    paper   along the gradient of one mini-batch
    code    at the first mini-batch of a round, with grad_v and grad_w mixed and 0.02 alpha added; clipped to 0..1
    here    along the gradient on all of the client's samples, before the round's training; clipped to 0..1
w_i in the mixture of a step
    paper   that of before the step
    code    that of after it
    here    as the paper
w_i in the mixture that predicts
    paper   the client's
    code    the client's, before the server averages
    here    the global model as it is now, as absent clients have it too
Momentum
    code    an optimizer of its own for v_i
    here    local.momentum for both; that of v_i starts from zero in every round
Other optimizers, weight decay
    here    for w_i; the steps of v_i are SGD's, with local.lr
Weights of the mean
    paper   clients count the same
    here    as `weights` says
    option  weights=uniform
Add-ons' terms
    here    part of f_i, at both points
BatchNorm
    here    running statistics move with both passes of a step, and are mixed as parameters are
A client that never took part
    here    v_i = w: it predicts with the global model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import ClientView, FleetView
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import PerClient, Prediction, Private, Reference, Sum
from archipelago.strategies.rules import Gradient, Memory

ALPHA = 0.5


@dataclass
class APFLOptions:
    """`apfl.alpha=...`"""

    alpha: float = setting(ALPHA, "share of a client's own model in its mixture", at_least=0, at_most=1)
    adaptive: bool = setting(False, "clients learn their alpha, one step a round")


@METHODS.register(
    "apfl", "mixtures of the global model and one of the client's own (Deng et al. 2020)", label="APFL"
)
class APFL(SingleModel):
    """w by FedAvg; v_i on f_i(alpha_i v_i + (1 - alpha_i) w_i)."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=2),
        known=(
            Known(
                "accuracy", ALL, "half of the mixture learns from the samples of one client alone", limit=0.06
            ),
        ),
    )

    Options = APFLOptions
    private = True
    state = ("model", "alpha")
    per_client = {"alpha": ALPHA}  # noqa: RUF012  (a class variable of the base)
    alpha: npt.NDArray[np.float64]  # alpha_i of every client

    @classmethod
    def check(cls, options: APFLOptions, context: Context) -> None:
        why = "private models do not follow reordered neurons"
        refuse_reordering(context.aggregation, "method=apfl", why)

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.alpha = np.full(self.context.clients, self.options.alpha)

    def round(self, fleet: FleetView) -> None:
        if self.options.adaptive:
            self.adapt(fleet)
        alpha = PerClient(self.alpha[fleet.ids])
        still = Sum(((0.0, self.model),))
        rule = MixedSteps(self.lr, self.context.momentum, alpha, self.own(), still)
        theta = fleet.train(start=self.model, penalties=self.penalties(fleet), rule=rule)  # w_i^t, and v_i
        self.model = self.average(theta, fleet, otherwise=self.model)  # w^{t+1}

    def own(self) -> Private:
        """v_i."""
        return Private("personal", default=self.model)

    def mixture(self, fleet: FleetView) -> Sum:
        """vbar_i."""
        alpha = self.alpha[fleet.ids]
        return Sum(((alpha, self.own()), (1.0 - alpha, self.model)))

    def adapt(self, fleet: FleetView) -> None:
        """alpha_i - eta <v_i - w_i, grad f_i(vbar_i)>, between 0 and 1."""
        g = fleet.gradients(at=self.mixture(fleet))
        slopes = fleet.map(slope_of_alpha, stage="alpha", v=self.own(), w=self.model, g=g)
        self.alpha = self.alpha.copy()
        self.alpha[fleet.ids] = np.clip(self.alpha[fleet.ids] - self.lr * np.array(slopes), 0.0, 1.0)
        self.report["alpha"] = float(self.alpha[fleet.ids].mean())

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.mixture(fleet)])


def slope_of_alpha(
    client: ClientView, state: dict[str, Any], v: Vector, w: Vector, g: Vector | None
) -> tuple[dict[str, Any], float]:
    """<v - w, g>; 0 for a client whose gradient was not finite."""
    if g is None:
        return state, 0.0
    difference = v.astype(np.float64) - w.astype(np.float64)
    return state, float(np.add.reduce(difference * g.astype(np.float64)))


@dataclass(frozen=True)
class MixedSteps:
    """The gradient of w, and beside it a step of v along that of the mixture."""

    passes: ClassVar[tuple[int, ...]] = (2,)
    keeps: ClassVar[tuple[str, ...]] = ("personal",)
    moves: ClassVar[bool] = False
    lr: float
    momentum: float
    alpha: Reference
    personal: Reference
    speed: Reference

    @property
    def remembers(self) -> dict[str, Reference]:
        return {"alpha": self.alpha, "personal": self.personal, "speed": self.speed}

    def step(self, model: Tensor, memory: Memory, gradient: Gradient) -> tuple[Tensor, Memory]:
        alpha, v = memory["alpha"], memory["personal"]
        slope = gradient(model)
        speed = self.momentum * memory["speed"] + alpha * gradient(alpha * v + (1.0 - alpha) * model)
        return slope, {"alpha": alpha, "personal": v - self.lr * speed, "speed": speed}
