"""CFL: clusters that split in two where clients pull a converged model in different directions.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints", IEEE TNNLS 2021 (arXiv:1910.01991); the baseline FedCluster of FeSEM (Long, Xie et al.).

    theta_c   self.clusters[c]               c              cluster of each client
    Delta_i   theta_i - theta_c(i), the update of client i over the trainable parameters
    alpha_ij  cosine of Delta_i and Delta_j  eps1, eps2     thresholds of the split
    gamma     `gamma`, the separation that two halves must have at least

All clients start in one cluster. Each round is FedAvg inside every cluster; then a cluster with
||sum_i (n_i / n_c) Delta_i|| < eps1 (its training has come to rest) and max_i ||Delta_i|| > eps2 (its clients have not)
is cut in two by the similarity of the updates, and each half is averaged on its own from this round on.

Readings. `clusters` is not K but the most clusters there may be; the number grows from 1. Halves: complete linkage on
the cosines, as in the authors' notebook, or `bipartition=optimal`, the paper's minimum over all bipartitions of
the largest similarity across the cut, alpha_cross, which single linkage finds. With `gamma` > 0 (paper; the notebook
leaves it out, FeSEM's code uses 0.13) a cluster stays whole unless sqrt((1 - alpha_cross) / 2) >= gamma. Where
momentum is kept from round to round updates are noisy, and clusters of one kind look torn: on rotated digits splits of
two kinds had alpha_cross up to 0.04, needless ones from -0.08 to 0.38; 0.68 kept out most of these and none of those.
The thresholds 0.4 and 1.6 of the notebook belong to its model and learning rate (`thresholds=absolute`); by default
they are shares of the longest mean update before the first split. The mean update is weighted as `weights` says (the
paper by size, the notebook uniform) and is a mean whatever `aggregation` says. No split before round `first` (the
notebook: 21), or on fewer than `min_size` clients. The larger half keeps the cluster's number, the other gets the
next; a half is not split again in the round that made it.

Partial participation: a cluster is split on the updates that arrived in the round. Its other clients wait at the split:
they belong to neither half until they take part again, when they join the one of least loss (or, where that was
split meanwhile, the one of least loss among what became of it); until then they predict with it. Clients that were
never seen wait at the root. So the halves divide the client ids of their parent. The paper has new clients descend the
tree by the similarity of an update made at each split's cached model instead, which takes as many local
trainings as the tree is deep.
Not taken over: the notebook's learning rate decay of 1% a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform
from threadpoolctl import threadpool_limits

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels, lowest
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Indices, Merged, Models

ROOT = 0  # the cluster that everyone starts in


@dataclass
class CFLOptions:
    """`cfl.eps1=...`"""

    eps1: float = setting(0.4, "a cluster may be split when its mean update is shorter than this", at_least=0)
    eps2: float = setting(0.8, "... and some client's update is longer than this", at_least=0)
    thresholds: str = setting("relative", "eps1, eps2: shares of the longest mean update before a split, or lengths",
                              choices=("relative", "absolute"))  # fmt: skip
    first: int = setting(5, "first round in which a cluster may be split", at_least=1)
    min_size: int = setting(3, "smallest number of clients a cluster is split on", at_least=2)
    bipartition: str = setting("complete", "how clients are divided: complete linkage, or the least similarity across",
                               choices=("complete", "optimal"))  # fmt: skip
    gamma: float = setting(0.0, "least separation of the halves, sqrt((1 - similarity) / 2); 0: any",
                           at_least=0, at_most=1)  # fmt: skip


@METHODS.register(
    "cfl",
    "recursive bi-partition by the cosine of updates, up to `clusters` (Sattler et al. 2021)",
    label="CFL",
)
class CFL(ClusteredModels):
    """FedAvg in clusters; a cluster at rest whose clients are not is split."""

    Options = CFLOptions
    grows = True
    by_loss = True  # as new clients do; a shared model is then warmed up: one cluster has nothing to warm
    state = ("clusters", "K", "parents", "waiting", "scale")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "waiting": ROOT}
    parents: Indices  # the cluster that each cluster was split off from
    waiting: Indices  # by client id: the cluster made by the split a client waits at, else UNASSIGNED
    scale: float  # length of the longest mean update before the first split

    def setup(self, fleet: FleetView) -> None:
        self.K = 1
        super().setup(fleet)
        self.parents = np.array([UNASSIGNED], np.int64)
        self.waiting = np.full(self.context.clients, ROOT, np.int64)
        self.scale = 0.0

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """Split the clusters that call for it; returns the clusters that models are averaged in."""
        mean, longest = self.lengths(fleet, theta, c)
        self.report |= {"mean_update": mean.tolist(), "longest_update": longest.tolist()}
        if self.K == 1:
            self.scale = max(self.scale, float(mean[ROOT]))
        unit = self.scale if self.options.thresholds == "relative" else 1.0
        torn = (mean < self.options.eps1 * unit) & (longest > self.options.eps2 * unit)
        c = c.copy()
        for k in np.flatnonzero(torn).tolist():
            members = np.flatnonzero((c == k) & theta.arrived)
            if len(members) < self.options.min_size or not self.may_split:
                continue
            alpha = cosines(theta, members, self.clusters[k], fleet.spec.parameters)
            moves = bipartition(alpha, self.options.bipartition)
            across = float(alpha[np.ix_(moves, ~moves)].max())
            if np.sqrt((1.0 - across) / 2.0) < self.options.gamma:
                continue  # the halves are too alike: their clients are of one kind
            c[(c == k) & ~theta.arrived] = UNASSIGNED
            c[members[moves]] = self.K
            self.split(k, fleet.ids[members], fleet.ids[members[moves]], across)
        return c

    @property
    def may_split(self) -> bool:
        """Whether a further cluster is allowed now."""
        return self.context.clusters > self.K and self.number >= self.options.first and not self.frozen

    def lengths(
        self, fleet: FleetView, theta: Handle, c: Indices
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Per cluster: ||sum_i (n_i / n_c) Delta_i|| and max_i ||Delta_i||; 0 where nobody took part."""
        n, P = self.client_weights(fleet), fleet.spec.parameters
        means = theta.average(by=c, weights=n, clusters=self.K, otherwise=self.clusters)
        steps = means.values[:, :P].astype(np.float64) - self.clusters.values[:, :P]
        # A client's own buffers in place of the cluster's: updates are compared over trainable parameters.
        own = theta.distances(Merged(self.clusters[c], theta, fleet.spec.columns("buffers")))
        longest = [own[(c == k) & theta.arrived].max(initial=0.0) for k in range(self.K)]
        return np.sqrt(np.add.reduce(steps * steps, axis=1)), np.array(longest)

    def split(self, k: int, ids: Indices, moved: Indices, across: float) -> None:
        """Make a new cluster of the clients `moved` out of `ids`; clients of k that are not among them wait."""
        assert self.assignment is not None
        others = np.setdiff1d(np.flatnonzero(self.assignment == k), ids)
        self.assignment, self.waiting = self.assignment.copy(), self.waiting.copy()
        self.assignment[others] = UNASSIGNED
        self.waiting[others] = self.K
        self.parents = np.append(self.parents, k)
        self.clusters = Models(np.concatenate([self.clusters.values, self.clusters.values[[k]]]))
        self.events.append(
            f"Cluster {k} was split: {len(ids) - len(moved)} clients stay in it, {len(moved)} are cluster {self.K} "
            f"(largest cosine of updates across: {across:.2f})."
        )
        self.K += 1

    def assign(self, fleet: FleetView, c: Indices) -> None:
        super().assign(fleet, c)
        self.waiting = self.waiting.copy()
        self.waiting[fleet.ids[c != UNASSIGNED]] = UNASSIGNED

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster of least loss among those that the split a client waits at has led to."""
        if self.K == 1:
            return np.zeros(len(fleet.ids), np.int64)
        losses = fleet.losses(self.clusters, on_top_of=self.underlay)
        losses = np.where(np.isfinite(losses), losses, np.finfo(np.float64).max)
        allowed = np.stack([self.descendants(int(split)) for split in self.waiting[fleet.ids]])
        return lowest(np.where(allowed, losses, np.inf))

    def descendants(self, split: int) -> npt.NDArray[np.bool_]:
        """Which clusters came of the split that made cluster `split`: both halves and what they split into."""
        found = np.full(self.K, split == ROOT)
        found[self.parents[split]] = True
        for k in range(split, self.K):
            found[k] |= k == split or found[self.parents[k]]
        return found


def cosines(theta: Handle, members: Indices, start: Vector, parameters: int) -> npt.NDArray[np.float64]:
    """(m, m) cosines of the members' updates from `start`; an update of length 0 is similar to none."""
    products = np.zeros((len(members), len(members)))
    with threadpool_limits(limits=1):  # the same sums on any machine
        for columns, table in theta.chunks():
            trained = columns[columns < parameters]
            steps = table[members, : len(trained)].astype(np.float64) - start[trained]
            products += steps @ steps.T
    lengths = np.sqrt(products.diagonal())
    scale = np.outer(lengths, lengths)
    alpha = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    np.fill_diagonal(alpha, 1.0)
    return np.clip(alpha, -1.0, 1.0)


def bipartition(alpha: npt.NDArray[np.float64], how: str) -> npt.NDArray[np.bool_]:
    """Who leaves: the smaller half (of equal ones, the half without the first client).

    "complete" is agglomerative clustering by complete linkage; "optimal" is the least possible largest
    similarity across the cut, which is what single linkage leaves when two clusters are left.

    >>> bipartition(np.array([[1.0, -0.9, 0.8], [-0.9, 1.0, -0.7], [0.8, -0.7, 1.0]]), "optimal").tolist()
    [False, True, False]
    """
    tree = linkage(squareform(1.0 - alpha, checks=False), "single" if how == "optimal" else how)
    second = cut_tree(tree, n_clusters=2)[:, 0] == 1
    size, half = int(second.sum()), len(second) / 2
    return ~second if size > half or (size == half and second[0]) else second
