"""Methods that misbehave on purpose, as a third party might register them: the suite of behaviour has to notice."""

from __future__ import annotations

import numpy as np

from archipelago.core.randomness import generator
from archipelago.strategies.base import METHODS, ClusteredModels, SingleModel
from archipelago.strategies.references import Models, Prediction


@METHODS.register("splits_at_random", "says how many clusters there are, and makes them up", label="Splits")
class SplitsAtRandom(ClusteredModels):
    """FedAvg in clusters that are drawn, whatever the clients are like."""

    grows = True

    def setup(self, fleet):
        super().setup(fleet)
        self.clusters = Models(np.repeat(fleet.initial(1).values, self.K, axis=0))

    def expect(self, fleet):
        drawn = generator(self.context.seed, "a split").integers(self.K, size=self.context.clients)
        return drawn[fleet.ids]


@METHODS.register("dead_part", "adds a model up that nobody ever trains", label="Dead part")
class DeadPart(SingleModel):
    """FedAvg beside a random model."""

    additive = True
    state = ("model", "other")

    def setup(self, fleet):
        super().setup(fleet)
        self.other = fleet.initial(1, "another model")[0] * np.float32(0.1)

    def round(self, fleet):
        self.model = self.average(fleet.train(start=self.model), fleet, otherwise=self.model)

    def prediction(self, fleet):
        return Prediction([self.model, self.other])
