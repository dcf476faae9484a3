"""MOON: local training whose representations are pulled to the global model's and away from the client's last one.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021 (Algorithm 1).

    w^t       self.model         z_glob   features under w^t            mu    moon.mu
    w_i^t     theta              z_prev   features under w_i^{t-1}      tau   moon.tau
    w_i^{t-1} Private("previous")         z   features under the model being trained

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) )     (3)
    l = l_sup(w_i^t; (x, y)) + mu l_con(w_i^t; w_i^{t-1}; w^t; x)                                           (4)

sim is the cosine, l_con the mean over the batch. mu = 0 is FedAvg, to the last bit.

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
z
    paper   the output of a projection head (two layers, 256 wide) between the backbone and the classifier
    code    as the paper; without the projection head if asked
    here    what enters the classifier: the network is as it is in all other methods
    option  a network of your own with a projection head before its last layer
Other models in the contrast
    paper   one previous model
    code    a buffer of the last few
    here    one
w_i^{t-1} of a client that takes part first
    paper   the first global model
    code    the client's own initial model, from the second round on; in the first there is nothing to contrast
    here    the model that it receives: both similarities are the same then, and the term has no gradient
w_i^{t-1} of a client that was absent
    here    what it came to when it took part last
z_glob, z_prev
    code    in evaluation mode, anew for every batch
    here    in evaluation mode (BatchNorm by its running statistics), once per sample and round
mu, tau
    paper   mu tuned from 0.1 to 10, 1 or 5 at best; tau 0.5
    code    1 and 0.5
    here    1 and 0.5
    option  moon.mu, moon.tau
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Private, Reference


@dataclass
class MOONOptions:
    """`moon.mu=...`"""

    mu: float = setting(1.0, "coefficient of the contrastive term", at_least=0)
    tau: float = setting(0.5, "temperature", above=0)


@METHODS.register(
    "moon", "contrast with the global and the client's last model, on features (Li et al. 2021)", label="MOON"
)
class MOON(SingleModel):
    """FedAvg on l_sup + mu l_con."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known(
                "accuracy",
                "slow",
                "while the loss is hardly falling, the contrast is the larger term",
                limit=0.3,
            ),
        ),
    )

    Options = MOONOptions

    def round(self, fleet: FleetView) -> None:
        previous = Private("previous", default=self.model)  # w_i^{t-1}
        mu, tau = self.options.mu, self.options.tau
        terms = [ModelContrast(mu, tau, self.model, previous)] if mu else []
        theta = fleet.train(
            start=self.model, penalties=[*terms, *self.penalties(fleet)], keep="previous"
        )  # (4)
        self.model = self.average(theta, fleet, otherwise=self.model)
        if self.number == 1 and len(fleet.spec.last_layer()) == fleet.spec.size:
            self.events.append(
                "moon has nothing to contrast: the network is its classifier alone, whose inputs are the samples; "
                "choose a network with hidden layers."
            )


@dataclass(frozen=True)
class ModelContrast:
    """mu l_con: features on the batch, those of the received model against those of the client's last one."""

    per_sample: ClassVar[bool] = True
    mu: float
    tau: float
    received: Reference
    previous: Reference

    @property
    def anchors(self) -> dict[str, Reference]:
        return {}

    @property
    def outputs(self) -> dict[str, Reference]:
        return {}

    @property
    def features(self) -> dict[str, Reference]:
        return {"received": self.received, "previous": self.previous}

    def value(self, parameters: Tensor, anchors: dict[str, Tensor]) -> Tensor:
        z = anchors["own_features"]
        towards, away = (
            torch.nn.functional.cosine_similarity(z, anchors[name], dim=-1) / self.tau
            for name in ("received", "previous")
        )
        # (3): -log softmax of the first of two scores.
        return self.mu * torch.nn.functional.softplus(away - towards).mean()
