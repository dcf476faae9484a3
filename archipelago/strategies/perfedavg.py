"""Per-FedAvg: a global model from which one gradient step of its own takes every client far.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020 (Algorithm 1).

    w     self.model         alpha   perfedavg.alpha      beta   local.lr, by the local optimizer
    w_i   theta              delta   perfedavg.delta      D, D', D''   mini-batches of one step

    min_w  mean_i f_i(w - alpha grad f_i(w))

    inner   w~ = w - alpha grad f_i(w, D)
    meta    w <- w - beta (I - alpha Hess f_i(w, D'')) grad f_i(w~, D')

    perfedavg.form=fo   the Hessian is left out
    perfedavg.form=hf   Hess v = (grad f_i(w + delta v, D'') - grad f_i(w - delta v, D'')) / (2 delta)

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
Which form
    paper   HF is better and costs twice as much as FO
    code    none by the authors; pFedMe's and FedRep's have FO
    here    FO, as it is compared elsewhere
    option  perfedavg.form=hf
alpha, beta
    paper   0.001 to 0.01 and 0.001
    here    alpha is local.lr where it is not given, but at most the paper's 0.01: with 0.05 and a pull (`+prox`)
            training diverges on digits. beta and momentum are those of the experiment's local training
    option  perfedavg.alpha
The step before a client predicts
    paper   one, on a mini-batch of the client's data
    code    pFedMe's: one step of alpha and one of beta, on mini-batches of the test data
    here    one of alpha, on all of its training samples, in evaluation mode
A client that never took part
    here    the same: the global model and its own step
Weights of the mean
    paper   clients count the same
    here    as `weights` says
    option  weights=uniform
Add-ons' terms
    here    part of f_i in training, not in the step before a client predicts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Prediction, Reference, Sum
from archipelago.strategies.rules import Gradient, Memory

LARGEST = 0.01  # alpha, of the paper's


@dataclass
class PerFedAvgOptions:
    """`perfedavg.alpha=...`"""

    form: str = setting("fo", "first order, or with the Hessian by differences", choices=("fo", "hf"))
    alpha: float | None = setting(
        None, "learning rate of a client's own step (null: local.lr, but at most 0.01)", at_least=0
    )
    delta: float = setting(1e-3, "hf: how far apart the differences are taken", above=0)


@METHODS.register(
    "perfedavg", "meta-learning: a model that is one step from every client (Fallah et al. 2020)",
    label="Per-FedAvg",
)  # fmt: skip
class PerFedAvg(SingleModel):
    """FedAvg on f_i(w - alpha grad f_i(w))."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=2),
        known=(
            Known("accuracy", "stragglers", "a step takes two batches: fewer steps are left", limit=0.04),
        ),
    )

    Options = PerFedAvgOptions
    private = True

    @property
    def alpha(self) -> float:
        """How far a client's own step goes."""
        return min(self.lr, LARGEST) if self.options.alpha is None else float(self.options.alpha)

    def round(self, fleet: FleetView) -> None:
        step = (
            MetaStep(self.alpha, self.options.delta) if self.options.form == "hf" else FirstOrder(self.alpha)
        )
        theta = fleet.train(start=self.model, penalties=self.penalties(fleet), rule=step)  # inner, meta
        self.model = self.average(theta, fleet, otherwise=self.model)

    def prediction(self, fleet: FleetView) -> Prediction:
        if not self.alpha:
            return super().prediction(fleet)
        g = fleet.gradients(at=self.model)
        return Prediction([Sum(((1.0, self.model), (-self.alpha, g)))])  # w - alpha grad f_i(w)


class _Stateless:
    """A rule that remembers nothing of a client."""

    keeps: ClassVar[tuple[str, ...]] = ()
    moves: ClassVar[bool] = False

    @property
    def remembers(self) -> dict[str, Reference]:
        return {}


@dataclass(frozen=True)
class FirstOrder(_Stateless):
    """grad f(w - alpha grad f(w, D), D')."""

    passes: ClassVar[tuple[int, ...]] = (1, 1)
    alpha: float

    def step(self, model: Tensor, memory: Memory, gradient: Gradient) -> tuple[Tensor, Memory]:
        return gradient(model - self.alpha * gradient(model, 0), 1), memory


@dataclass(frozen=True)
class MetaStep(_Stateless):
    """(I - alpha Hess f(w, D'')) grad f(w - alpha grad f(w, D), D'), the Hessian by central differences."""

    passes: ClassVar[tuple[int, ...]] = (1, 1, 2)
    alpha: float
    delta: float

    def step(self, model: Tensor, memory: Memory, gradient: Gradient) -> tuple[Tensor, Memory]:
        v = gradient(model - self.alpha * gradient(model, 0), 1)
        there, back = gradient(model + self.delta * v, 2), gradient(model - self.delta * v, 2)
        return v - self.alpha * (there - back) / (2.0 * self.delta), memory
