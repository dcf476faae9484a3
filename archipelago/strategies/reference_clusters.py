"""Oracle and random clusters: the upper and the lower reference of a clustered method.

`oracle` is FedAvg inside the ground-truth groups of the data; `random` is FedAvg inside groups drawn once. Neither
ever re-clusters. What a method gains over `random` is due to its clusters, what it lacks to `oracle` is what
better clusters could still bring.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.strategies.base import METHODS, ClusteredModels, Context
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Models


class FixedClusters(ClusteredModels):
    """Clusters that are known before the first round; all start from one model."""

    fixed = True

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.clusters = Models(np.repeat(fleet.initial(1).values, self.K, axis=0))


@METHODS.register(
    "oracle",
    "FedAvg inside the ground-truth groups: the upper reference of clustered methods",
    label="Oracle",
)
class Oracle(FixedClusters):
    """c(i) is the ground-truth group of client i."""

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        if context.groups is None:
            raise UserError(
                "The oracle needs data with ground-truth groups, got none: use a cluster-wise partition, "
                "data.rotations or the synthetic data set, or another method."
            )
        found = len(np.unique(context.groups))
        if found > context.clusters:
            raise UserError(
                f"The oracle needs a cluster for each of the {found} ground-truth groups, got "
                f"clusters={context.clusters}: set clusters={found}."
            )

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        assert self.context.groups is not None, "seen by `check`"
        _, labels = np.unique(self.context.groups, return_inverse=True)
        self.assignment = labels.astype(np.int64)


@METHODS.register(
    "random",
    "FedAvg inside clusters drawn at random: the lower reference of clustered methods",
    label="Random clusters",
)
class RandomClusters(FixedClusters):
    """c(i) is drawn once, clusters as equal in size as they can be."""

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        even = np.arange(self.context.clients) % self.K
        self.assignment = generator(self.context.seed, "random clusters").permutation(even).astype(np.int64)
