"""FedBN: FedAvg whose clients keep their BatchNorm layers to themselves.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021
(Algorithm 1).

    w_k^(l), l a BatchNorm layer     the private columns of Private("personal")
    w^(l), l any other layer         self.model, averaged

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
What a BatchNorm layer is
    paper   its trainable scale and shift, and its statistics
    code    every tensor with "bn" in its name
    here    every tensor of a layer that keeps running statistics, whatever it is called
Weights of the mean
    paper   clients count the same
    code    the same: its clients have equally many samples
    here    as `weights` says
    option  weights=uniform
A client that never took part
    paper   not in Algorithm 1
    here    has the mean of the others' BatchNorm layers
    option  fedbn.unseen=initial: BatchNorm as it was initialised
Networks without BatchNorm
    here    nothing is private: it is FedAvg, and the run says so
Other rules than the mean
    here    for the shared layers; matched averaging is refused, private layers do not follow reordered neurons
    option  aggregation
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, Strategy
from archipelago.strategies.expectations import Cost, Expectations
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector, merged
from archipelago.strategies.parts import batch_norms, columns_of
from archipelago.strategies.references import Merged, Prediction, Private


@dataclass
class FedBNOptions:
    """`fedbn.unseen=...`"""

    unseen: str = setting(
        "mean",
        "BatchNorm of a client that never took part: the mean of the others', or as it was initialised",
        choices=("mean", "initial"),
    )


@METHODS.register("fedbn", "FedAvg with private BatchNorm layers (Li et al. 2021)", label="FedBN")
class FedBN(Strategy):
    """w^(l) = mean_k w_k^(l) for every layer l but BatchNorm."""

    expects = Expectations(cost=Cost(down=1, up=1, trainings=1))

    Options = FedBNOptions
    private = True
    state = ("model",)
    model: Vector  # the shared layers, with BatchNorm for clients that never took part

    @classmethod
    def check(cls, options: FedBNOptions, context: Context) -> None:
        why = "private layers do not follow reordered neurons"
        refuse_reordering(context.aggregation, "method=fedbn", why)

    def setup(self, fleet: FleetView) -> None:
        self.model = fleet.initial(1)[0]

    def round(self, fleet: FleetView) -> None:
        theta = fleet.train(start=self.own(fleet), penalties=self.penalties(fleet), keep="personal")
        mean, columns = self.average(theta, fleet, otherwise=self.model), columns_of(batch_norms(fleet.spec))
        self.model = mean if self.options.unseen == "mean" else merged(mean, self.model, columns)
        if self.number == 1 and not len(columns):
            self.events.append(
                "fedbn keeps nothing private: the network has no BatchNorm, so this is FedAvg; choose one that has "
                "some, as model=cnn_fashion."
            )

    def own(self, fleet: FleetView) -> Merged:
        """The shared layers with each client's own BatchNorm."""
        columns = columns_of(batch_norms(fleet.spec))
        return Merged(self.model, Private("personal", default=self.model), columns)

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.own(fleet)])

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"global": self.model}
