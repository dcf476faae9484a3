"""pFedMe: every client solves for a personal model near its own copy of the global one, which follows it slowly.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020 (Algorithm 1).

    w^t     self.model               theta_i   Private("personal")      lambda   pfedme.lam      K   pfedme.inner
    w_i,r   the model that a client trains     R   local.steps          eta      pfedme.eta      beta   pfedme.beta

    F_i(w) = min_theta f_i(theta) + (lambda / 2) ||theta - w||^2,   grad F_i(w) = lambda (w - theta_i(w))

    solve   theta_i(w_i,r) ~ argmin of that over theta on a mini-batch, by K gradient steps
    step    w_i,r+1 = w_i,r - eta lambda (w_i,r - theta_i(w_i,r))
    server  w^{t+1} = (1 - beta) w^t + beta mean_i w_i,R

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
The inner solver
    paper   any that is accurate enough
    code    K steps of gradient descent on f + (lambda / 2) ||theta - w||^2, with a learning rate of its own
    here    K proximal gradient steps with local.lr: theta <- (theta - lr grad f + lr lambda w) / (1 + lr lambda), the
            code's to first order in lr lambda, and stable for every lambda
    option  pfedme.inner is K
Where theta starts
    code    at the received w in every round, then where the last mini-batch left it
    here    as the code
The step of w_i
    paper   eta lambda (w - theta), eta = 0.005 and lambda = 15: 0.075 of the way
    here    the same, never past theta: min(1, eta lambda) of the way; eta is local.lr where it is not given, as clients
            of other methods have it
    option  pfedme.eta
Settings that do not count
    code    theta has a weight decay of its own, 0.001
    here    momentum, weight decay and the optimizer: both steps are plain, as in the paper
Who trains
    code    everybody in every round; the server averages a sample
    here    the participants of the round
Weights of the mean
    paper   clients count the same
    code    by n_i
    here    as `weights` says
    option  weights=uniform
BatchNorm
    here    running statistics move with every inner step
A client that never took part
    here    predicts with the global model; one that was absent with its last theta_i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import moved
from archipelago.strategies.references import Prediction, Private, Reference
from archipelago.strategies.rules import Gradient, Memory


@dataclass
class PFedMeOptions:
    """`pfedme.lam=...`"""

    lam: float = setting(15.0, "lambda: pull of a personal model towards the client's copy", at_least=0)
    inner: int = setting(5, "K: steps of the inner solver on a mini-batch", at_least=1)
    eta: float | None = setting(None, "learning rate of the client's copy (null: local.lr)", above=0)
    beta: float = setting(1.0, "how far the server goes to the clients' mean", above=0)


@METHODS.register(
    "pfedme", "personal models by Moreau envelopes around the global one (Dinh et al. 2020)", label="pFedMe"
)
class PFedMe(SingleModel):
    """w_i by steps of eta lambda (w_i - theta_i); theta_i by an inner solver around w_i."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=5),
        known=(
            Known("accuracy", ALL, "plain steps near the global model: slower than momentum", limit=0.42),
            Known("accuracy", "slow", "plain steps near the global model hardly begin", limit=0.6),
        ),
    )

    Options = PFedMeOptions
    private = True
    proximal = True

    def round(self, fleet: FleetView) -> None:
        options, lr = self.options, self.lr
        eta = lr if options.eta is None else options.eta
        rule = MoreauStep(options.lam, options.inner, lr, min(1.0, eta * options.lam), self.model)
        w = fleet.train(start=self.model, penalties=self.penalties(fleet), rule=rule, restart=True)  # w_i,R
        mean = self.average(w, fleet, otherwise=self.model)
        self.model = moved(self.model, mean, options.beta)  # server

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([Private("personal", default=self.model)])


@dataclass(frozen=True)
class MoreauStep:
    """A step of w along the gradient of its Moreau envelope, `share` of the way to the personal model."""

    keeps: ClassVar[tuple[str, ...]] = ("personal",)
    moves: ClassVar[bool] = True
    lam: float
    inner: int
    lr: float
    share: float
    personal: Reference

    @property
    def passes(self) -> tuple[int, ...]:
        return (self.inner,)

    @property
    def remembers(self) -> dict[str, Reference]:
        return {"personal": self.personal}

    def step(self, model: Tensor, memory: Memory, gradient: Gradient) -> tuple[Tensor, Memory]:
        theta, pull = memory["personal"], self.lr * self.lam
        for _ in range(self.inner):
            theta = (theta - self.lr * gradient(theta) + pull * model) / (1.0 + pull)  # solve
        return model - self.share * (model - theta), {"personal": theta}  # step
