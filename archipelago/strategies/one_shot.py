"""What FL+HC, FedClust, PACFL and FLUX share: clients are clustered once, then each cluster is trained by FedAvg.

They differ in when that is (`due`), in what a client is known by (`points`), and in the distance and the rule. Until
then there is one model; afterwards every cluster starts from it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.strategies.base import UNASSIGNED, ClusteredModels, Context
from archipelago.strategies.clustering import ClusteringTask, check_rule, clustered
from archipelago.strategies.clustering_rules import in_order, mean_distances
from archipelago.strategies.distances import Features, Points, between, pairwise
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Indices, Models


class OneShot(ClusteredModels):
    """One model, a division of the clients, and from then on a model for each part.

    `clusters` is the number of parts, or the most there may be where the rule finds it. Options of such a method:
    `clustering`, and `distance` unless the method compares points in a way of its own (`apart`).
    """

    by_loss = False
    state: ClassVar[tuple[str, ...]] = ("clusters", "K", "points", "divided")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "points": np.nan}
    points: npt.NDArray[np.float64] | None = (
        None  # what clients were clustered by, a row by id; NaN: never seen
    )
    divided = False

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        check_rule(options.clustering, getattr(options, "distance", "euclidean"))

    def setup(self, fleet: FleetView) -> None:
        self.K = 1
        super().setup(fleet)

    # --- what a method may say otherwise ----------------------------------------------------------------

    def apart(self, rows: Features, others: Features | None = None) -> Points:
        """(n, m) distances of points, or (n, n) among themselves."""
        distance = self.options.distance
        return pairwise(rows, distance) if others is None else between(rows, others, distance)

    def rule_options(self) -> Any:
        """The method's own options for the rule that its paper uses."""
        return None

    # --- the division -----------------------------------------------------------------------------------

    def divide(self, ids: Indices, points: Features) -> None:
        """Cluster these clients by their points, for good; whoever is not among them is adopted when it comes."""
        assert self.assignment is not None
        seed = int(generator(self.context.seed, "one-shot clustering", round=self.number).integers(2**31))
        distance = getattr(self.options, "distance", "euclidean")
        own = None if hasattr(self.options, "distance") else self.apart(points)
        task = ClusteringTask(points, self.context.clusters, seed, distance=distance, given=own)
        found = clustered(self.options.clustering, task, self.context, self.rule_options())
        labels = in_order(found.labels)
        self.K, self.divided = int(labels.max()) + 1, True
        self.clusters = Models(np.repeat(self.clusters.values[:1], self.K, axis=0))
        self.assignment = np.full(self.context.clients, UNASSIGNED, np.int64)
        self.assignment[ids] = labels
        self.points = np.full((self.context.clients, points.shape[1]), np.nan)
        self.points[ids] = points
        self.report["clustering_objective"] = found.objective
        sizes = ", ".join(map(str, np.bincount(labels).tolist()))
        self.events.append(f"Clients were clustered, once and for all: {sizes} clients.")

    def nearest(self, points: Features) -> Indices:
        """The cluster whose members are nearest to each point on average."""
        assert self.points is not None and self.assignment is not None
        members = np.flatnonzero(~np.isnan(self.points).any(axis=1) & (self.assignment != UNASSIGNED))
        away = self.apart(points, self.points[members])
        return mean_distances(away, self.assignment[members]).argmin(axis=1).astype(np.int64)

    def labels(self, fleet: FleetView) -> Indices:
        """The cluster of each client of `fleet`: one and the same before the division."""
        return super().labels(fleet) if self.divided else np.zeros(len(fleet.ids), np.int64)

    def proximity(self, ids: Indices) -> tuple[Indices, Points] | None:
        if self.points is None:
            return None
        seen = ids[~np.isnan(self.points[ids]).any(axis=1)]
        return seen, self.apart(self.points[seen])
