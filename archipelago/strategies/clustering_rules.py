"""Clustering rules beside K-means: hierarchical, density-based, spectral, and affinity propagation.

All are scikit-learn's, on distances in float64, on one thread and seeded by the round. Those that find the number of
clusters themselves never return more than `clusters`: the closest are merged, by average linkage.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from archipelago.core.errors import UserError
from archipelago.core.settings import setting
from archipelago.strategies.clustering import CLUSTERING, ClusteringTask
from archipelago.strategies.distances import Points
from archipelago.strategies.references import Indices


@dataclass
class AgglomerativeOptions:
    """`agglomerative.linkage=...`"""

    linkage: str = setting(
        "average", "distance of two clusters", choices=("average", "complete", "single", "ward")
    )
    cut: float | None = setting(
        None, "merge while clusters are at most this far apart; null: down to `clusters`", at_least=0
    )


@CLUSTERING.register(
    "agglomerative", "merge the closest clusters, down to `clusters` or up to a distance", label="hierarchical",
    options=AgglomerativeOptions, finds=True,
)  # fmt: skip
def agglomerative(task: ClusteringTask) -> Indices:
    """Hierarchical clustering, cut by number or by distance."""
    ward = task.options.linkage == "ward"
    if ward and (task.given is not None or task.distance == "principal_angles"):
        raise UserError(
            "Expected agglomerative.linkage=average, complete or single where clients are compared by angles or by a "
            "distance of the method's own, got ward, which needs points: choose one of those.",
            code="distance", rule="agglomerative", distance="given",
        )  # fmt: skip
    points = task.points if ward else task.distances()
    labels = merged(points, task.options.linkage, clusters=task.clusters)
    if task.options.cut is None:
        return labels
    found = merged(points, task.options.linkage, cut=task.options.cut)
    return found if found.max() < task.clusters else labels


@dataclass
class HDBSCANOptions:
    """`hdbscan.min_size=...`"""

    min_size: int = setting(3, "smallest number of clients that are a cluster", at_least=2)
    samples: int = setting(1, "neighbours that make a point dense, itself included", at_least=1)
    epsilon: float = setting(0.0, "clusters closer than this are not split", at_least=0)


@CLUSTERING.register(
    "hdbscan",
    "dense groups of clients; finds their number",
    label="HDBSCAN",
    options=HDBSCANOptions,
    finds=True,
)
def hdbscan(task: ClusteringTask) -> Indices:
    """Density-based clustering; points that are noise join the cluster they are nearest to on average."""
    from sklearn.cluster import HDBSCAN

    away, options = task.distances(), task.options
    if len(away) < max(options.min_size, options.samples) or not away.any():
        return np.zeros(len(away), np.int64)
    with _alone():
        model = HDBSCAN(
            min_cluster_size=options.min_size, min_samples=options.samples, metric="precomputed", n_jobs=1, copy=True
        )  # fmt: skip
        labels = model.fit(away).labels_.astype(np.int64)
    if options.epsilon and labels.max() > 0:
        labels = rejoined(labels, reachable(away, options.samples), options.epsilon)
    return at_most(task.clusters, with_noise(labels, away), away)


def reachable(away: Points, samples: int) -> Points:
    """Mutual reachability: the distance of two points, or how far either has to go for `samples` of them, itself one.

    >>> reachable(np.array([[0.0, 1.0, 5.0], [1.0, 0.0, 4.0], [5.0, 4.0, 0.0]]), 2).tolist()
    [[1.0, 1.0, 5.0], [1.0, 1.0, 4.0], [5.0, 4.0, 4.0]]
    """
    core = np.sort(away, axis=1)[:, samples - 1]
    return np.maximum(away, np.maximum.outer(core, core))


def rejoined(labels: Indices, reach: Points, epsilon: float) -> Indices:
    """Labels in which clusters that parted at a distance of at most `epsilon` are one; noise (-1) stays noise.

    scikit-learn's own option for it (`cluster_selection_epsilon`) fails with NumPy 2.4.

    >>> reach = np.abs(np.subtract.outer([0.0, 1.0, 3.0, 9.0], [0.0, 1.0, 3.0, 9.0]))
    >>> rejoined(np.array([0, 0, 1, 2]), reach, 2.0).tolist(), rejoined(np.array([0, -1, 1, 2]), reach, 2.0).tolist()
    ([0, 0, 0, 1], [0, -1, 1, 2])
    """
    count = int(labels.max()) + 1
    apart = np.array(
        [[reach[np.ix_(labels == i, labels == j)].min() for j in range(count)] for i in range(count)]
    )
    np.fill_diagonal(apart, 0.0)
    return np.where(labels < 0, -1, merged(apart, "single", cut=epsilon)[labels])


@dataclass
class DBSCANOptions:
    """`dbscan.epsilon=...`"""

    epsilon: float | None = setting(
        None,
        "clients at most this far apart are neighbours; null: by the elbow of nearest distances",
        above=0,
    )
    scale: float = setting(1.0, "times the elbow", above=0, read_with={"epsilon": (None,)})
    samples: int = setting(2, "neighbours that make a point dense, itself included", at_least=1)


@CLUSTERING.register(
    "dbscan", "chains of near clients, others alone; finds their number", label="DBSCAN", options=DBSCANOptions,
    finds=True,
)  # fmt: skip
def dbscan(task: ClusteringTask) -> Indices:
    """DBSCAN; a point that is noise is a cluster of its own."""
    from sklearn.cluster import DBSCAN

    away, options = task.distances(), task.options
    if len(away) < 2 or not away.any():
        return np.zeros(len(away), np.int64)
    near = np.sort(np.where(np.eye(len(away), dtype=bool), np.inf, away).min(axis=1))
    epsilon = options.epsilon or max(options.scale * near[elbow(near)], float(np.finfo(np.float64).tiny))
    with _alone():
        labels = DBSCAN(eps=epsilon, min_samples=options.samples, metric="precomputed").fit(away).labels_
    noise = labels < 0
    labels = np.where(noise, labels.max() + np.cumsum(noise), labels)
    return at_most(task.clusters, labels, away)


def elbow(ascending: Points) -> int:
    """Where a rising curve bends upwards: the point furthest below the line from its first to its last.

    >>> elbow(np.array([1.0, 1.1, 1.2, 1.3, 5.0, 9.0]))
    3
    """
    if ascending[-1] <= ascending[0]:
        return len(ascending) - 1
    x = np.linspace(0.0, 1.0, len(ascending))
    return int(np.argmax(x - (ascending - ascending[0]) / (ascending[-1] - ascending[0])))


@dataclass
class SpectralOptions:
    """`spectral.scale=...`"""

    scale: float | None = setting(
        None, "distance at which clients are no longer alike; null: the median distance", above=0
    )


@CLUSTERING.register(
    "spectral", "K-means on eigenvectors of the similarity graph", label="spectral", options=SpectralOptions
)
def spectral(task: ClusteringTask) -> Indices:
    """Normalised spectral clustering of exp(-d^2 / (2 scale^2))."""
    from sklearn.cluster import SpectralClustering

    away = task.distances()
    distinct = merged(away, "single", cut=0.0)
    if distinct.max() < task.clusters or task.clusters == 1:
        return distinct if distinct.max() < task.clusters else np.zeros(len(away), np.int64)
    scale = task.options.scale or float(np.median(away[away > 0]))
    alike = np.exp(-(away**2) / (2.0 * scale**2))
    with _alone():
        model = SpectralClustering(
            task.clusters, affinity="precomputed", random_state=task.seed % 2**32, n_init=task.starts
        )
        return model.fit(alike).labels_.astype(np.int64)


@dataclass
class AffinityOptions:
    """`affinity.damping=...`"""

    damping: float = setting(0.7, "how slowly messages change", at_least=0.5, below=1)
    preference: float | None = setting(
        None,
        "similarity (minus a squared distance) of a point to itself: the higher, the more clusters; null: the median",
    )


@CLUSTERING.register(
    "affinity", "affinity propagation: clients choose exemplars; finds their number", label="affinity propagation",
    options=AffinityOptions, finds=True,
)  # fmt: skip
def affinity(task: ClusteringTask) -> Indices:
    """Affinity propagation on minus squared distances; where it does not converge, all are one cluster."""
    from sklearn.cluster import AffinityPropagation

    away, options = task.distances(), task.options
    if len(away) < 3 or not away.any():
        return at_most(task.clusters, merged(away, "single", cut=0.0), away)
    with _alone():
        model = AffinityPropagation(
            affinity="precomputed", damping=options.damping, preference=options.preference,
            max_iter=500, random_state=task.seed % 2**32,
        )  # fmt: skip
        labels = model.fit(-(away**2)).labels_.astype(np.int64)
    return at_most(task.clusters, with_noise(labels, away), away)


def merged(points: Points, linkage: str, *, clusters: int | None = None, cut: float | None = None) -> Indices:
    """Agglomerative clustering by number or by distance: of points for ward, else of (n, n) distances.

    Two clusters exactly `cut` apart are merged.

    >>> away = np.abs(np.subtract.outer([0.0, 1.0, 5.0, 7.0], [0.0, 1.0, 5.0, 7.0]))
    >>> merged(away, "single", clusters=2).tolist(), merged(away, "single", cut=1.0).tolist()
    ([0, 0, 1, 1], [0, 0, 1, 2])
    """
    from sklearn.cluster import AgglomerativeClustering

    n = len(points)
    if n == 1 or (clusters is not None and clusters >= n):
        return np.arange(n, dtype=np.int64)
    metric = "euclidean" if linkage == "ward" else "precomputed"
    # scikit-learn merges what is closer than the threshold: the next number above makes it "at most".
    threshold = None if cut is None else float(np.nextafter(cut, np.inf))
    with _alone():
        model = AgglomerativeClustering(
            clusters, metric=metric, linkage=linkage, distance_threshold=threshold
        )
        return in_order(model.fit(points).labels_)


def with_noise(labels: Indices, away: Points) -> Indices:
    """Labels in which the points labelled -1 join the cluster of least mean distance; all noise is one cluster.

    >>> with_noise(np.array([0, 0, 1, -1]), np.abs(np.subtract.outer([0, 1, 9, 7], [0, 1, 9, 7]))).tolist()
    [0, 0, 1, 1]
    """
    if (labels < 0).all():
        return np.zeros(len(labels), np.int64)
    near = mean_distances(away, labels)
    return np.where(labels < 0, near.argmin(axis=1), labels).astype(np.int64)


def mean_distances(away: Points, labels: Indices) -> Points:
    """(n, K): the mean distance of each row of `away` (n, m) to the members of each cluster; `labels` are of the m."""
    clusters = int(labels.max()) + 1
    return np.stack([away[:, labels == k].mean(axis=1) for k in range(clusters)], axis=1)


def at_most(clusters: int, labels: Indices, away: Points) -> Indices:
    """The labels, the closest clusters merged (by mean distance) until there are no more than `clusters`.

    >>> away = np.abs(np.subtract.outer([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]))
    >>> at_most(2, np.array([0, 1, 2]), away).tolist()
    [0, 0, 1]
    """
    labels = in_order(labels)
    if labels.max() < clusters:
        return labels
    rows = mean_distances(away, labels)
    apart = np.stack([rows[labels == k].mean(axis=0) for k in range(rows.shape[1])])
    np.fill_diagonal(apart, 0.0)
    return merged(apart, "average", clusters=clusters)[labels]


def in_order(labels: Any) -> Indices:
    """The same clusters, numbered from 0 by the first point of each.

    >>> in_order([2, 2, 0, 1]).tolist()
    [0, 0, 1, 2]
    """
    _, first, found = np.unique(np.asarray(labels), return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[found].astype(np.int64)


@contextmanager
def _alone() -> Iterator[None]:
    """One thread, and no warnings about few or equal points: the labels say so."""
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
