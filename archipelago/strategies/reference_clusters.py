"""Oracle and random clusters: the upper and the lower reference of a clustered method.

`oracle` is FedAvg inside the ground-truth groups of the data, of every round where data changes during a run (the
oracle per time step); `random` is FedAvg inside groups drawn once. Neither ever re-clusters by itself. What a method
gains over `random` is due to its clusters, what it lacks to `oracle` is what better clusters could still bring. They
are the platform's own references: there is no paper.

Readings

Where clusters start
    here    all from one model
Random clusters
    here    as equal in size as they can be, drawn once from the seed
More clusters than ground-truth groups
    here    the rest stays empty; fewer are refused
    option  clusters
Where the model of a group starts that appears during a run
    here    from the one model that all started from, as if it had been there and without clients
"""

from __future__ import annotations

from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels, Context
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Indices, Models


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
                "data.rotations or the synthetic data set, or another method.",
                code="needs-groups", setting="method=oracle",
            )  # fmt: skip
        known = context.groups if context.known_groups is None else context.known_groups
        found = len(np.unique(known))
        if found > context.clusters:
            raise UserError(
                f"The oracle needs a cluster for each of the {found} ground-truth groups, got "
                f"clusters={context.clusters}: set clusters={found}.",
                code="too-few-clusters", clusters=context.clusters, groups=found,
            )  # fmt: skip

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.assignment = self._of_round(1)

    def start_round(self, number: int) -> None:
        super().start_round(number)
        self.assignment = self._of_round(number)

    def _of_round(self, number: int) -> Indices:
        """c(i) in a round; clients that are away have none."""
        context = self.context
        groups = context.groups if context.truth is None else context.truth(number)
        assert groups is not None, "seen by `check`"
        known = np.unique(groups) if context.known_groups is None else context.known_groups
        return np.where(groups < 0, UNASSIGNED, np.searchsorted(known, groups)).astype(np.int64)


@METHODS.register(
    "random",
    "FedAvg inside clusters drawn at random: the lower reference of clustered methods",
    label="Random clusters",
)
class RandomClusters(FixedClusters):
    """c(i) is drawn once, clusters as equal in size as they can be."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known(
                "accuracy",
                ALL,
                "the lower reference: a model for clients drawn at random",
                limit=0.08,
            ),
        ),
    )

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        even = np.arange(self.context.clients) % self.K
        self.assignment = generator(self.context.seed, "random clusters").permutation(even).astype(np.int64)
