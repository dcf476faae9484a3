"""Robust (TKM): trimmed K-means on client models, trimmed mean inside each cluster.

Ghosh, Hong, Yin, Ramchandran, "Robust Federated Learning in a Heterogeneous Environment", arXiv:1906.06629, 2019, as
the baseline Robust(TKM) of FeSEM (Long, Xie et al.): clients learn alone, the server clusters what they learned
by Lloyd's method with a robust estimate of the centres, and each cluster is trained by an aggregation
that survives faulty clients.

    theta_i   theta (stays with client i)     Theta_k   self.clusters[k]     c   cluster of each client

Each round: local update from the cluster's model; trimmed K-means on the last layer's weights; coordinate-wise
trimmed mean of the whole model inside each cluster.

Readings

When clients are clustered
    paper   once, after every client has minimised its own loss; then clusters train by gradients
    code    FeSEM's: every round, and models are aggregated
    here    as FeSEM's
Aggregate of a cluster
    paper   coordinate-wise trimmed mean of gradients
    code    20% cut from each side of every coordinate; no effect, because all clients shared one model object
    here    20% from each side, and it has one; clients count equally, whatever `weights` says
    option  robust.trim, aggregation
Centres of K-means
    paper   a robust estimate
    code    the median, or the mean with 5% cut from each side
    here    the mean with 5% cut, nobody in a cluster of fewer than 20 clients
    option  robust.centre=median, robust.centre_trim, robust.clustering
Faulty clients that become a centre of their own
    here    the `outliers` clients furthest from their centres move no centre and do not count when starts are compared
            (trimmed K-means of Cuesta-Albertos et al. 1997); they keep the nearest centre's label
    option  robust.outliers
What K-means sees
    paper   the parameters that each client minimised its own loss with
    code    the last layer's weights
    here    as the code; a descriptor of an attacker's data is what the attacker says it is. Where few take part clients
            go back and forth; with `directions` they do not (see FeSEM)
    option  robust.features, robust.distance
Outliers in the aggregate
    here    it trims them, as long as no cluster gets more of them than `trim`, which small clusters soon do; left out
            it is safer against wild clients, one to six percent less accurate where all are honest
    option  robust.exclude
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import Rule, TrimmedMeanOptions, trimmed_means
from archipelago.strategies.base import METHODS, UNASSIGNED
from archipelago.strategies.by_parameters import SIZES, STALE, STRAGGLERS, ByParameters
from archipelago.strategies.clustering import Clustering, ClusteringTask, TrimmedKMeansOptions, clustered
from archipelago.strategies.distances import DISTANCES, Features
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.references import Indices


@dataclass
class RobustOptions:
    """`robust.trim=...`"""

    trim: float = setting(0.2, "share of a cluster's values cut from each side of every coordinate",
                          at_least=0, below=0.5)  # fmt: skip
    centre: str = setting("trimmed_mean", "centres of K-means", choices=("trimmed_mean", "median"))
    centre_trim: float = setting(0.05, "centre=trimmed_mean: share cut from each side", at_least=0, below=0.5,
                                 read_with={"centre": ("trimmed_mean",)})  # fmt: skip
    outliers: float = setting(0.2, "share of the clients, furthest from their centres, that moves no centre",
                              at_least=0, below=0.5)  # fmt: skip
    features: str = setting(
        "classifier",
        "what K-means sees: classifier, head, parameters, updates, directions, or a descriptor (see `list`)",
    )
    distance: str = setting("euclidean", "how far apart clients are", choices=DISTANCES)
    clustering: str = setting("trimmed_kmeans", "clustering rule (see `list`), or an import path")
    exclude: bool = setting(False, "leave the outliers of K-means out of the aggregate")
    starts: int = setting(10, "starts of K-means, of which the best is kept", at_least=1)


@METHODS.register(
    "robust",
    "TKM: trimmed K-means on client models, trimmed mean in clusters (Ghosh et al. 2019)",
    label="Robust",
)
class Robust(ByParameters):
    """Local update, trimmed K-means, trimmed mean."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known("cost", "participation", "a client never seen compares all models, once", limit=3.0),
            *STALE, STRAGGLERS, SIZES,
            Known("oscillation", "participation", "points are of different rounds, and a fifth moves no centre: "
                  "clients go back and forth", limit=0.9),
            Known("accuracy", "stragglers", "a mean without a fifth of the values at each side goes less far", 0.07),
        ),
    )  # fmt: skip

    Options = RobustOptions
    outlying: npt.NDArray[np.bool_]  # of this round's clients that arrived, see `settle`

    @property
    def rule(self) -> Rule:
        chosen = super().rule
        own = Rule("trimmed mean", trimmed_means, TrimmedMeanOptions(self.options.trim))
        return own if chosen.mean else chosen

    def grouped(self, features: Features, weights: npt.NDArray[np.float64] | None, seed: int) -> Clustering:
        options = self.options
        trim = 0.5 if options.centre == "median" else options.centre_trim
        task = ClusteringTask(features, self.K, seed, starts=options.starts, distance=options.distance)
        own = TrimmedKMeansOptions(trim, options.outliers)
        found = clustered(options.clustering, task, self.context, own)
        if found.outlying is not None:
            self.outlying = found.outlying
            self.report["outliers"] = int(found.outlying.sum())
        return found

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        self.outlying = np.zeros(int(theta.arrived.sum()), np.bool_)  # of the clients that arrived
        return super().settle(fleet, theta, c)

    def update(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        by = c.copy()
        if self.options.exclude:
            by[np.flatnonzero(theta.arrived)[self.outlying]] = UNASSIGNED
        self.clusters = self.aggregated(theta, fleet, by, self.clusters)
        self.assign(fleet, c)
