"""Clustering of clients: K-means that repeats itself, and cluster ids that mean the same from round to round.

Everything is float64, single-threaded and seeded, so that the same features give the same labels anywhere.

A clustering rule is a function of a `ClusteringTask` that is registered, or named by its import path. It returns a
label for each point, or a whole `Clustering`: `method=fesem fesem.clustering=my_module.my_rule`. One registered with
`finds=True` finds the number of clusters itself: `clusters` is then the most there may be. `distances=(...)` names
those that it can work with, if not all. Hierarchical, density-based and spectral rules are in `clustering_rules.py`,
distances in `distances.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import Registry
from archipelago.core.settings import setting
from archipelago.strategies.aggregation import trimmed_mean
from archipelago.strategies.base import UNASSIGNED, Context
from archipelago.strategies.distances import DISTANCES, Features, Points, normalised, pairwise
from archipelago.strategies.references import Indices


@dataclass(frozen=True)
class Clustering:
    """Labels, centres in feature space, and the weighted mean of squared distances to the own centre."""

    labels: Indices
    centres: npt.NDArray[np.float64]
    objective: float
    distinct: int  # how many clusters the points could fill
    outlying: npt.NDArray[np.bool_] | None = None  # points that moved no centre


@dataclass(frozen=True)
class ClusteringTask:
    """What a clustering rule sees: points, and on request how far apart they are."""

    features: Features  # (n, d)
    clusters: int  # for a rule that finds their number: the most there may be
    seed: int  # of this round: the only source of randomness
    weights: npt.NDArray[np.float64] | None = None  # how much each point counts; None: equally
    starts: int = 10  # of which the best is kept
    centres: Points | None = None  # (clusters, d) to start from, where the method keeps the last round's
    options: Any = None  # of the rule
    distance: str = "euclidean"  # one of `distances.DISTANCES`
    vectors: int = 1  # distance=principal_angles: how many columns a point's basis has
    given: Points | None = None  # (n, n) distances, where the method has its own

    @property
    def points(self) -> Points:
        """(n, d) in float64, of length 1 where the distance is the cosine's."""
        return normalised(self.features, "l2" if self.distance == "cosine" else "none")

    def distances(self) -> Points:
        """(n, n), symmetric, 0 on the diagonal."""
        return pairwise(self.features, self.distance, self.vectors) if self.given is None else self.given


ClusteringRule = Callable[[ClusteringTask], "Clustering | Indices"]
CLUSTERING: Registry[ClusteringRule] = Registry("clustering rule")


def clustered(rule: str, task: ClusteringTask, context: Context, own: Any = None) -> Clustering:
    """What `rule` makes of the points; `own` are a method's options for the rule that is its own."""
    entry = CLUSTERING.entry(rule)
    options = own if isinstance(own, entry.options) else context.options.get(entry.section)
    found = entry.value(replace(task, options=options if options is not None else entry.options()))
    return found if isinstance(found, Clustering) else from_labels(task, np.asarray(found, np.int64))


def check_rule(rule: str, distance: str = "euclidean") -> None:
    """Refuse a rule that is not there, or that cannot work with this distance."""
    can = CLUSTERING.entry(rule).capabilities.get("distances", DISTANCES)
    if distance not in can:
        raise UserError(
            f"Expected a distance that '{rule}' can work with ({', '.join(can)}), got {distance}: choose one of these, "
            "or a rule that works with any, as agglomerative.",
            code="distance", rule=rule, distance=distance,
        )  # fmt: skip


def finds_number(rule: str) -> bool:
    """Whether a rule finds the number of clusters itself."""
    return bool(CLUSTERING.entry(rule).capabilities.get("finds", False))


def from_labels(task: ClusteringTask, labels: Indices) -> Clustering:
    """The clustering of these labels, used ones first numbered from 0, with weighted means as centres.

    >>> found = from_labels(ClusteringTask(np.array([[0.0], [2.0], [9.0]]), 3, seed=0), np.array([2, 2, 0]))
    >>> found.labels.tolist(), found.centres.ravel().tolist(), found.distinct
    ([1, 1, 0], [9.0, 1.0, 0.0], 2)
    """
    points = np.ascontiguousarray(task.points)
    weights = np.ones(len(points)) if task.weights is None else task.weights
    used, labels = np.unique(labels, return_inverse=True)
    if len(used) > task.clusters or len(labels) != len(points):
        raise ValueError(
            f"expected {len(points)} labels of at most {task.clusters} clusters, got {len(labels)} of {len(used)}"
        )
    centres = np.zeros((task.clusters, points.shape[1]))
    for k in range(len(used)):
        centres[k] = np.average(points[labels == k], axis=0, weights=weights[labels == k])
    away = np.add.reduce((points - centres[labels]) ** 2, axis=1)
    return Clustering(labels.astype(np.int64), centres, float(np.average(away, weights=weights)), len(used))


@CLUSTERING.register(
    "kmeans",
    "weighted K-means, the best of several starts",
    label="K-means",
    distances=("euclidean", "cosine"),
)
def kmeans_rule(task: ClusteringTask) -> Clustering:
    """K-means by scikit-learn, in float64; of directions (rows of length 1) where the distance is the cosine's."""
    return kmeans(
        task.points,
        task.clusters,
        seed=task.seed,
        weights=task.weights,
        starts=task.starts,
        centres=task.centres,
    )


@dataclass
class TrimmedKMeansOptions:
    """`trimmed_kmeans.outliers=...`"""

    trim: float = setting(0.05, "share cut from each side of every coordinate of a centre; 0.5: the median",
                          at_least=0, at_most=0.5)  # fmt: skip
    outliers: float = setting(0.0, "share of the points, furthest from their centres, that moves no centre",
                              at_least=0, below=0.5)  # fmt: skip


@CLUSTERING.register(
    "trimmed_kmeans",
    "K-means that odd points cannot lead astray; counts points equally",
    label="trimmed K-means",
    options=TrimmedKMeansOptions,
    distances=("euclidean", "cosine"),
)
def trimmed_kmeans_rule(task: ClusteringTask) -> Clustering:
    """Lloyd's method with trimmed means as centres."""
    trim, outliers = task.options.trim, task.options.outliers
    return trimmed_kmeans(
        task.points, task.clusters, seed=task.seed, trim=trim, outliers=outliers, starts=task.starts
    )


def kmeans(
    features: Features,
    clusters: int,
    *,
    seed: int,
    weights: npt.NDArray[np.float64] | None = None,
    starts: int = 10,
    centres: npt.NDArray[np.float64] | None = None,
) -> Clustering:
    """Weighted K-means: the best of `starts` k-means++ starts, or one run from the given `centres`.

    Fewer distinct points than clusters leave the last clusters empty.

    >>> found = kmeans(np.array([[0.0], [0.1], [5.0]]), 2, seed=0)
    >>> bool(found.labels[0] == found.labels[1] != found.labels[2])
    True
    """
    from sklearn.cluster import KMeans  # imported late: scikit-learn is slow to load, most methods need none

    points = np.ascontiguousarray(features, np.float64)
    distinct = min(clusters, len(np.unique(points, axis=0)))
    start: Any = "k-means++" if centres is None or distinct < clusters else centres
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # scikit-learn warns where warm centres end up empty; the labels say so anyway.
        warnings.simplefilter("ignore")
        model = KMeans(
            distinct, init=start, n_init=starts if isinstance(start, str) else 1, random_state=seed % 2**32
        ).fit(points, sample_weight=weights)
    found = np.zeros((clusters, points.shape[1]))
    found[:distinct] = model.cluster_centers_
    total = float(np.sum(weights)) if weights is not None else float(len(points))
    return Clustering(model.labels_.astype(np.int64), found, float(model.inertia_) / total, distinct)


def trimmed_kmeans(
    features: Features,
    clusters: int,
    *,
    seed: int,
    trim: float = 0.05,
    outliers: float = 0.0,
    starts: int = 10,
    iterations: int = 50,
) -> Clustering:
    """K-means that odd points cannot lead astray: the best of `starts` runs of Lloyd's method.

    A centre is the coordinate-wise trimmed mean of its points (`trim` from each side; 0.5 is the median). The share
    `outliers` of the points, those furthest from their centres, moves no centre and does not count in the objective,
    and of the points furthest from the seeds so far none becomes the next seed (the first is any point); such points
    still get the label of their nearest centre.

    >>> points = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2], [900.0]])
    >>> trimmed_kmeans(points, 2, seed=0, outliers=0.2).centres.ravel().round(3).tolist()
    [5.1, 0.1]
    """
    points = np.ascontiguousarray(features, np.float64)
    shift = np.median(points, axis=0)
    points = points - shift  # near the origin squared distances lose no digits
    distinct = min(clusters, len(np.unique(points, axis=0)))
    inside = len(points) - int(outliers * len(points) + 1e-9)
    best = None
    with threadpool_limits(limits=1):
        for start in range(starts):
            rng = generator(seed, "trimmed k-means", client=start)
            found = _trimmed_run(points, _seeds(points, distinct, inside, rng), trim, inside, iterations)
            if best is None or found.objective < best.objective:
                best = found
    assert best is not None
    centres = np.zeros((clusters, points.shape[1]))
    centres[:distinct] = best.centres + shift
    return Clustering(best.labels, centres, best.objective, distinct, best.outlying)


def _squared_distances(points: Points, centres: Points) -> Points:
    """(n, K)."""
    norms = np.add.reduce(points * points, axis=1)[:, None] + np.add.reduce(centres * centres, axis=1)
    return np.maximum(norms - 2.0 * (points @ centres.T), 0.0)


def _nearest(distances: Points, inside: int) -> tuple[Indices, npt.NDArray[np.bool_], float]:
    """(label of each point, whether it is among the `inside` closest, mean squared distance of those)."""
    labels = distances.argmin(axis=1).astype(np.int64)
    own = distances.min(axis=1)
    closest = np.argsort(own, kind="stable")[:inside]
    kept = np.zeros(len(own), np.bool_)
    kept[closest] = True
    return labels, kept, float(own[closest].mean())


def _seeds(points: Points, count: int, inside: int, rng: np.random.Generator) -> Points:
    """k-means++ that never picks one of the points furthest from all seeds so far."""
    seeds = points[[rng.integers(len(points))]]
    while len(seeds) < count:
        own = _squared_distances(points, seeds).min(axis=1)
        chances = own.copy()
        chances[np.argsort(own, kind="stable")[inside:]] = 0.0
        if not chances.any():  # all but the outliers are seeds already
            chances = own
        seeds = np.concatenate([seeds, points[[rng.choice(len(points), p=chances / chances.sum())]]])
    return seeds


def _trimmed_run(points: Points, centres: Points, trim: float, inside: int, iterations: int) -> Clustering:
    """Lloyd's method from given centres, until nothing moves."""
    centres = centres.copy()
    labels, kept, objective = _nearest(_squared_distances(points, centres), inside)
    for _ in range(iterations):
        before = labels, kept
        for k in range(len(centres)):
            own = points[kept & (labels == k)]
            if len(own):  # a centre that only outliers are near stays where it is
                centres[k] = trimmed_mean(own, trim)
        labels, kept, objective = _nearest(_squared_distances(points, centres), inside)
        if np.array_equal(labels, before[0]) and np.array_equal(kept, before[1]):
            break
    return Clustering(labels, centres, objective, len(centres), ~kept)


def match_labels(previous: Indices, labels: Indices, clusters: int) -> Indices:
    """The renaming `new id = result[old id]` that keeps as many clients as possible in the id they had.

    `previous` may be UNASSIGNED. Hungarian method on the members that two clusterings share.

    >>> match_labels(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0]), 2).tolist()
    [1, 0]
    """
    shared = np.zeros((clusters, clusters))
    known = (previous != UNASSIGNED) & (previous < clusters)
    np.add.at(shared, (labels[known], previous[known]), 1)
    # A tiny preference for keeping one's number settles ties the same way everywhere.
    rows, columns = linear_sum_assignment(-(shared + 1e-6 * np.eye(clusters)))
    renamed = np.empty(clusters, np.int64)
    renamed[rows] = columns
    return renamed
