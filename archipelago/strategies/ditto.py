"""Ditto: a global model by FedAvg, and beside it a personal model per client that is pulled towards it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

    w^t   self.model              w_k^t    theta (stays with the clients)
    v_k   Private("personal")     lambda   ditto.lam

    v_k ~ argmin_v  F_k(v) + (lambda / 2) ||v - w^t||^2

The pull is towards w^t, the global model a client received in this round, not the one it helps to make. lambda =
0 is local training. The global model is FedAvg's, to the last bit: v_k never enters it.

Readings

Where v_k starts
    paper   any
    code    w^0
    here    w^0, whenever a client takes part first
Batches of v_k
    paper   s local steps of its own
    code    the same batches for both models
    here    as many steps as the global model, with batches and optimizer state of their own
Weights of the global mean
    paper   any aggregation
    code    clients drawn by size, then a plain mean
    here    as `weights` says
    option  weights=uniform
lambda
    paper   tuned, also by each client on its validation data
    code    1 in the scripts
    here    1; the choice by each client is not offered
    option  ditto.lam
Add-ons' terms
    here    they enter the global objective only
A client that never took part
    here    has no v_k and predicts with the global model
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, SingleModel
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Proximal
from archipelago.strategies.references import Prediction, Private


@dataclass
class DittoOptions:
    """`ditto.lam=...`"""

    lam: float = setting(1.0, "lambda: pull of a personal model towards the global one", at_least=0)


@METHODS.register(
    "ditto", "FedAvg plus a personal model per client pulled towards it (Li et al. 2021)", label="Ditto"
)
class Ditto(SingleModel):
    """w by FedAvg; v_k on F_k(v) + (lambda / 2) ||v - w||^2."""

    expects = Expectations(
        cost=Cost(down=2, up=1, trainings=2),
        known=(
            Known(
                "oscillation", "stragglers", "a personal model takes steps of different number", limit=0.06
            ),
            Known(
                "accuracy", ALL, "a personal model learns from the samples of one client alone", limit=0.06
            ),
            Known(
                "accuracy",
                "sizes",
                "a client with few samples has a personal model of few samples",
                limit=0.1,
            ),
            Known(
                "oscillation",
                "sizes",
                "a client with few samples has a personal model of few samples",
                limit=0.1,
            ),
        ),
    )

    Options = DittoOptions
    private = True
    state = ("model", "start")
    start: Vector  # v_k^0

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.start = self.model

    def round(self, fleet: FleetView) -> None:
        theta = fleet.train(start=self.model, penalties=self.penalties(fleet))  # w_k^t
        v = fleet.train(
            start=Private("personal", default=self.start),
            penalties=[Proximal(self.options.lam, self.model)],
            slot="personal",
            keep="personal",
        )  # v_k
        self.model = self.average(theta, fleet, otherwise=self.model)  # w^{t+1}
        if v.arrived.any():
            n = fleet.sizes[v.arrived]
            self.report["personal_objective"] = float(np.average(v.objective[v.arrived], weights=n))

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([Private("personal", default=self.model)])
