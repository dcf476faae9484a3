"""What FeSEM, WeCFL and Robust share: train first, then cluster what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.base import UNASSIGNED, ClusteredModels, Context
from archipelago.strategies.clustering import (
    Clustering,
    ClusteringTask,
    check_rule,
    clustered,
    finds_number,
    match_labels,
)
from archipelago.strategies.clustering_rules import mean_distances
from archipelago.strategies.descriptors import (
    DIRECTIONS,
    PARTS,
    UPDATES,
    check_features,
    described,
    described_unlabelled,
    directions,
    reads_labels,
    updates,
)
from archipelago.strategies.distances import DISTANCES, Features, between, pairwise
from archipelago.strategies.expectations import Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.references import Indices, Models

NEVER = 0  # no round
FEW = "models that took few steps are near each other, whatever their group"
# Where K-means on models does not find the groups; which of these a method shares, it says.
STALE = (
    Known("groups", "participation", "newest known points are of different rounds, and clusters that part early by "
          "that go their own ways", limit=-0.06),
    Known("oscillation", "participation", "as long as points are of different rounds, clients go back and forth", 0.5),
    Known("accuracy", "participation", "a cluster that is not a group's has fewer clients to learn from", limit=0.05),
)  # fmt: skip
STRAGGLERS = Known("groups", "stragglers", FEW, limit=0.1)
SIZES = Known("groups", "sizes", FEW, limit=-0.05)
ODD = Known("groups", "one_class", "the client of one class is a cluster of its own", limit=-0.05)


@dataclass
class ByParametersOptions:
    """What methods that cluster clients by their models have in common."""

    features: str = setting(
        "classifier",
        "what is clustered: classifier, head, parameters, updates, directions (of models, from the mean of all "
        "clusters: where few take part), or a descriptor (see `list`)",
    )
    clustering: str = setting("kmeans", "clustering rule (see `list`), or an import path")
    distance: str = setting("euclidean", "how far apart clients are", choices=DISTANCES)
    starts: int = setting(20, "K-means++ starts, of which the best is kept", at_least=1)
    warm: bool = setting(False, "start K-means from the last round's centres")


class ByParameters(ClusteredModels):
    """Local update, clusters of what the clients are known by, mean inside each cluster.

    Options of such a method: `features` (a part of the model, its update, or a descriptor), `clustering`, `distance`,
    `starts`, `warm`.
    """

    by_loss = False
    state = ("clusters", "centres", "points", "asked")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "points": np.nan, "asked": NEVER}
    centres: npt.NDArray[np.float64] | None = None
    points: npt.NDArray[np.float32] | None = None  # what K-means last saw of each client, NaN where nothing
    asked: Indices  # the round in which each client last described its data
    outlying: npt.NDArray[np.bool_]  # of this round's clients that arrived, for methods that look for them

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        check_rule(options.clustering, getattr(options, "distance", "euclidean"))
        check_features(options.features)

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.asked = np.full(self.context.clients, NEVER, np.int64)
        # All clusters start from one model: what a client learns, not where it started, decides its cluster.
        self.clusters = Models(np.repeat(fleet.initial(1).values, self.K, axis=0))

    def point_weights(self, fleet: FleetView) -> npt.NDArray[np.float64] | None:
        """How much each client counts in K-means; None means equally."""
        return None

    def expect(self, fleet: FleetView) -> Indices:
        assert self.assignment is not None
        if (self.assignment == UNASSIGNED).all():  # all cluster models are still one and the same
            return np.zeros(len(fleet.ids), np.int64)
        return self.labels(fleet)

    def notice(self, theta: Handle) -> None:
        """Keep the point of every client whose model arrived: the newest is what K-means sees of it."""
        chosen = self.options.features
        if chosen in PARTS:
            self.keep_points(theta.ids[theta.arrived], theta.features(chosen)[theta.arrived])

    def keep_points(self, ids: Indices, features: Features) -> None:
        """Remember the points of these clients."""
        if self.points is None:
            self.points = np.full((self.context.clients, features.shape[1]), np.nan, np.float32)
        self.points = self.points.copy()
        self.points[ids] = features

    def look(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        """Keep the points of this round's clients, which trained under the clusters c."""
        chosen, arrived = self.options.features, theta.arrived
        if chosen in PARTS:
            self.notice(theta)
        elif chosen == UPDATES:
            self.keep_points(
                theta.ids[arrived], updates(theta, self.clusters, c, fleet.spec.parameters)[arrived]
            )
        elif chosen == DIRECTIONS:
            assert self.assignment is not None
            # An empty cluster stays where it is, at the start for ever: it would add that to every direction.
            used = np.unique(self.assignment[self.assignment != UNASSIGNED])
            used = used if len(used) else np.arange(self.K)
            found = directions(theta, self.clusters, used, fleet.spec.parameters)
            self.keep_points(theta.ids[arrived], found[arrived])
        else:
            # Asked once for each state of its data, with the model that all started from.
            since = self.context.since(self.number)
            new = fleet.select(theta.ids[self.asked[theta.ids] < since])
            if len(new.ids):
                self.keep_points(new.ids, described(new, chosen, fleet.initial(1)[0]))
                self.asked = self.asked.copy()
                self.asked[new.ids] = self.number

    def grouped(self, features: Features, weights: npt.NDArray[np.float64] | None, seed: int) -> Clustering:
        """The clusters of this round's points."""
        options = self.options
        warm = self.centres if options.warm else None
        task = ClusteringTask(
            features, self.K, seed, weights, options.starts, warm, distance=options.distance
        )
        return clustered(options.clustering, task, self.context)

    def proximity(self, ids: Indices) -> tuple[Indices, npt.NDArray[np.float64]] | None:
        if self.points is None:
            return None
        seen = ids[~np.isnan(self.points[ids]).any(axis=1)]
        return seen, pairwise(self.points[seen], getattr(self.options, "distance", "euclidean"))

    def adopt_unlabelled(self, fleet: FleetView) -> Indices:
        """By the descriptor that clients are clustered by, where it needs no labels: the cluster nearest on average."""
        assert self.assignment is not None
        if self.points is None or reads_labels(self.options.features):
            return super().adopt_unlabelled(fleet)
        members = np.flatnonzero(~np.isnan(self.points).any(axis=1) & (self.assignment != UNASSIGNED))
        clusters, labels = np.unique(self.assignment[members], return_inverse=True)
        found = described_unlabelled(fleet, self.options.features, fleet.initial(1)[0])
        away = between(found, self.points[members], getattr(self.options, "distance", "euclidean"))
        return np.asarray(clusters[mean_distances(away, labels).argmin(axis=1)], np.int64)

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """K-means on the newest known point of every client seen so far; absent clients keep theirs."""
        if self.frozen or not theta.arrived.any():
            return c
        assert self.assignment is not None
        self.look(fleet, theta, c)
        assert self.points is not None
        seen = np.flatnonzero(~np.isnan(self.points).any(axis=1))
        clients = fleet.select(seen)
        weights = self.additions.point_weights(clients)
        found = self.grouped(
            self.points[seen],
            self.point_weights(clients) if weights is None else weights,
            int(generator(self.context.seed, "k-means", round=self.number).integers(2**31)),
        )
        if found.distinct < self.K and not finds_number(self.options.clustering):
            self.events.append(
                f"Only {found.distinct} distinct models for {self.K} clusters: the rest stays empty."
            )
        renamed = match_labels(self.assignment[seen], found.labels, self.K)
        centres = np.zeros_like(found.centres) if self.centres is None else self.centres.copy()
        centres[renamed[: found.distinct]] = found.centres[
            : found.distinct
        ]  # an empty cluster keeps its centre
        self.centres = centres
        self.report["clustering_objective"] = found.objective
        if found.outlying is not None:
            self.outlying = found.outlying[np.searchsorted(seen, theta.ids[theta.arrived])]
        self.assignment = self.assignment.copy()
        self.assignment[seen] = renamed[found.labels]
        # Whoever has no point yet (its training blew up) stays unassigned: -1 feeds no cluster.
        return self.assignment[theta.ids]
