"""CFL: clusters that split in two where clients pull a converged model in different directions.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
Privacy Constraints", IEEE TNNLS 2021 (arXiv:1910.01991); the baseline FedCluster of FeSEM (Long, Xie et al.).

    theta_c   self.clusters[c]               c              cluster of each client
    Delta_i   theta_i - theta_c(i), the update of client i over the trainable parameters
    alpha_ij  cosine of Delta_i and Delta_j  eps1, eps2     thresholds of the split
    gamma     `gamma`, noise over signal: how far the difference of two halves may come from their samples by chance

All clients start in one cluster. Each round is FedAvg inside every cluster; then a cluster with
||sum_i (n_i / n_c) Delta_i|| < eps1 (its training has come to rest) and max_i ||Delta_i|| > eps2 (its clients have not)
is cut in two by the similarity of the updates, and each half is averaged on its own from this round on.

Partial participation: a cluster is split on the updates that arrived in the round. Its other clients wait at the split:
they belong to neither half until they take part again, when they join the one of least loss (or, where that was
split meanwhile, the one of least loss among what became of it); until then they predict with it. Clients that were
never seen wait at the root. So the halves divide the client ids of their parent.

Readings

Number of clusters
    paper   grows from 1 until nothing calls for a split
    here    the same, up to `clusters`
    option  clusters
Halves of a cluster
    paper   the bipartition with the least largest similarity across it, alpha_cross
    code    complete linkage; FeSEM's: average linkage
    here    complete linkage; `optimal` is the paper's, which single linkage finds
    option  cfl.bipartition=optimal, or any clustering rule
Whether the halves are kept
    paper   if sqrt((1 - alpha_cross) / 2) > gamma, the largest noise over signal of a client's gradient: else
            clients of one kind look torn
    code    always; FeSEM's: gamma = 0.13
    here    a client's own gamma is far above 1 where batches are small, and would forbid every split. So the halves
            themselves are measured: before a split each member trains twice more from the cluster's model, on either
            half of its samples. A cut by the one set of updates gives the vector between its halves' means; its cosine
            rho with the same vector of the other set, which the cut has not seen, is 0 for clients of one kind and 1
            without noise, so gamma^2 = (1 - rho) / (2 rho), and a split needs gamma < 1. A cluster that is found to be
            of one kind is measured again after `retry` rounds
    option  cfl.gamma=0.13: the paper's rule, 0 always splits; cfl.retry
eps1, eps2
    paper   eps1 about a tenth of the longest mean update, eps2 between eps1 and ten times it
    code    0.4 and 1.6, for its model and learning rate
    here    shares of the longest mean update before the first split
    option  cfl.thresholds=absolute
The mean update
    paper   by size
    code    uniform
    here    as `weights` says; a mean whatever `aggregation` says
    option  weights=uniform
When a cluster may be split
    code    after round 20, with more than 2 clients
    here    from round 5 on, with at least 3; a half is not split again in the round that made it
    option  cfl.first, cfl.min_size
Learning rate
    code    decays by 1% a round
    here    the experiment's
New clients
    paper   descend the tree by the similarity of an update made at each split's cached model
    here    join the cluster of least loss, which takes no local training
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform
from threadpoolctl import threadpool_limits

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels, Context, lowest
from archipelago.strategies.clustering import ClusteringTask, check_rule, clustered
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Indices, Merged, Models, SampleWeights

ROOT = 0  # the cluster that everyone starts in
HALVES = "halves"  # of a client's samples, in its state while gamma is measured
LINKAGES = ("complete", "optimal")
Halves = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]]  # by cosines: who leaves


@dataclass
class CFLOptions:
    """`cfl.eps1=...`"""

    eps1: float = setting(0.4, "a cluster may be split when its mean update is shorter than this", at_least=0)
    eps2: float = setting(0.8, "... and some client's update is longer than this", at_least=0)
    thresholds: str = setting("relative", "eps1, eps2: shares of the longest mean update before a split, or lengths",
                              choices=("relative", "absolute"))  # fmt: skip
    first: int = setting(5, "first round in which a cluster may be split", at_least=1)
    min_size: int = setting(3, "smallest number of clients a cluster is split on", at_least=2)
    bipartition: str = setting(
        "complete",
        "how clients are divided: complete linkage, optimal (the least similarity across), or a clustering rule",
    )
    gamma: float | None = setting(
        None, "least separation of the halves, sqrt((1 - similarity) / 2); 0: any; auto: their difference must show on "
        "either half of the clients' samples", at_least=0, at_most=1, auto=True,
    )  # fmt: skip
    retry: int = setting(
        3, "rounds after which a cluster is measured again that was found to be of one kind", at_least=1
    )


@METHODS.register(
    "cfl",
    "recursive bi-partition by the cosine of updates, up to `clusters` (Sattler et al. 2021)",
    label="CFL",
)
class CFL(ClusteredModels):
    """FedAvg in clusters; a cluster at rest whose clients are not is split."""

    expects = Expectations(
        cost=Cost(down=1, up=3, trainings=3),  # in a round that measures gamma; else 1
        known=(
            Known("cost", "participation", "a client never seen compares all models, once", limit=3.0),
            Known(
                "cost",
                "stragglers",
                "a training to measure gamma by is whole, also at a straggler",
                limit=4.0,
            ),
            Known(
                "groups",
                "participation",
                "a round's four clients show no difference that is more than noise",
                limit=-0.06,
            ),
            Known(
                "groups",
                "slow",
                "at a tenth of the rate no cluster comes to rest in so few rounds",
                limit=-0.05,
            ),
            Known(
                "groups",
                "sizes",
                "updates of clients with few samples are mostly noise, and count as much",
                0.0,
            ),
        ),
    )

    Options = CFLOptions
    grows = True
    by_loss = True  # as new clients do; a shared model is then warmed up: one cluster has nothing to warm
    state = ("clusters", "K", "parents", "waiting", "scale", "measured")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "waiting": ROOT}
    parents: Indices  # the cluster that each cluster was split off from
    waiting: Indices  # by client id: the cluster made by the split a client waits at, else UNASSIGNED
    scale: float  # length of the longest mean update before the first split
    measured: Indices  # by cluster: the last round in which it was found to be of one kind

    @classmethod
    def check(cls, options: CFLOptions, context: Context) -> None:
        if options.bipartition not in LINKAGES:
            check_rule(options.bipartition)

    def setup(self, fleet: FleetView) -> None:
        self.K = 1
        super().setup(fleet)
        self.parents = np.array([UNASSIGNED], np.int64)
        self.waiting = np.full(self.context.clients, ROOT, np.int64)
        self.scale = 0.0
        self.measured = np.full(1, -self.options.retry, np.int64)

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
            if len(members) < self.options.min_size or not self.may_split or self.was_measured(k):
                continue
            alpha = cosines(theta, members, self.clusters[k], fleet.spec.parameters)
            moves = self.halves(alpha)
            if not moves.any():
                continue  # a clustering rule found one cluster
            across = float(alpha[np.ix_(moves, ~moves)].max())
            if not self.differ(fleet.select(fleet.ids[members]), k, across):
                continue  # the halves are too alike: their clients are of one kind
            c[(c == k) & ~theta.arrived] = UNASSIGNED
            c[members[moves]] = self.K
            self.split(k, fleet.ids[members], fleet.ids[members[moves]], across)
        return c

    def halves(self, alpha: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Who leaves: by linkage, or by a clustering rule on the distances 1 - alpha."""
        how = self.options.bipartition
        if how in LINKAGES:
            return bipartition(alpha, how)
        seed = int(generator(self.context.seed, "cfl", round=self.number).integers(2**31))
        task = ClusteringTask(alpha, 2, seed, given=1.0 - alpha)
        return clustered(how, task, self.context).labels == 1

    @property
    def may_split(self) -> bool:
        """Whether a further cluster is allowed now."""
        return self.context.clusters > self.K and self.number >= self.options.first and not self.frozen

    def was_measured(self, k: int) -> bool:
        """Whether a cluster was found to be of one kind a few rounds ago; where gamma is given, that costs nothing."""
        return self.options.gamma is None and self.number - int(self.measured[k]) < self.options.retry

    def differ(self, fleet: FleetView, k: int, across: float) -> bool:
        """Whether two halves of cluster k, whose members these are, differ by more than the noise of their updates."""
        if self.options.gamma is not None:
            return bool(np.sqrt((1.0 - across) / 2.0) >= self.options.gamma)
        gamma = self.report["gamma"] = self.noise_over_signal(fleet.select(fleet.ids[fleet.sizes >= 2]), k)
        if not gamma < 1.0:
            self.measured = self.measured.copy()
            self.measured[k] = self.number
        return gamma < 1.0

    def noise_over_signal(self, fleet: FleetView, k: int) -> float:
        """gamma of a cut through these clients, by updates on either half of their samples; 0: nobody can tell."""
        c = np.full(len(fleet.ids), k, np.int64)
        if len(c) < 2:
            return 0.0
        fleet.map(divide, stage="halves of the samples")
        theta = [self.on_half(fleet, c, half) for half in range(2)]
        fleet.map(reunite, stage="halves of the samples")
        both = np.flatnonzero(theta[0].arrived & theta[1].arrived)
        if len(both) < 2:
            return 0.0
        products = inner_products(theta, both, self.clusters[k], fleet.spec.parameters)
        rho = confirmed(products, self.halves)
        return float(np.sqrt((1.0 - rho) / (2.0 * rho))) if rho > 0.0 else float("inf")

    def on_half(self, fleet: FleetView, c: Indices, half: int) -> Handle:
        """A training as in the round, on one half of each client's samples, with an optimizer of its own."""
        return fleet.train(
            start=self.clusters[c],
            on_top_of=self.underlay,
            penalties=self.penalties(fleet, c),
            sample_weights=SampleWeights(HALVES, half),
            slot=f"half {half}",
            fresh=True,
            sends=True,
        )

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
        self.measured = np.append(self.measured, -self.options.retry)
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
    return as_cosines(inner_products([theta], members, start, parameters))


def inner_products(
    trained: Sequence[Handle], members: Indices, start: Vector, parameters: int
) -> npt.NDArray[np.float64]:
    """(t m, t m) inner products of the members' updates from `start`, of t trainings one after the other."""
    products = np.zeros((len(trained) * len(members),) * 2)
    with threadpool_limits(limits=1):  # the same sums on any machine
        for pieces in zip(*(theta.chunks() for theta in trained), strict=True):
            columns = pieces[0][0][pieces[0][0] < parameters]
            models = np.concatenate([table[members, : len(columns)] for _, table in pieces])
            steps = models.astype(np.float64) - start[columns]
            products += steps @ steps.T
    return products


def as_cosines(products: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Inner products of vectors with each other as cosines; a vector of length 0 is similar to none."""
    lengths = np.sqrt(products.diagonal())
    scale = np.outer(lengths, lengths)
    alpha = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    np.fill_diagonal(alpha, 1.0)
    return np.clip(alpha, -1.0, 1.0)


def confirmed(products: npt.NDArray[np.float64], halves: Halves) -> float:
    """rho: how far a cut by one set of updates shows in the other, as a mean over both ways; at most 1.

    `products` are the (2 m, 2 m) inner products of m clients' updates on one half of their samples, then on the other.

    >>> first, second = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([[1.0, 1.0], [-1.0, 1.0]])
    >>> both = np.concatenate([first, second])
    >>> confirmed(both @ both.T, lambda alpha: bipartition(alpha, "complete"))  # the halves are (2, 0) apart in both
    1.0
    """
    m = len(products) // 2
    rho = []
    for own in (slice(0, m), slice(m, 2 * m)):
        moves = halves(as_cosines(products[own, own]))
        if not moves.any() or moves.all():
            rho.append(0.0)  # a clustering rule found one cluster
            continue
        apart = moves / moves.sum() - ~moves / (~moves).sum()  # the vector between the means of the halves
        one, other = (apart @ products[part, part] @ apart for part in (slice(0, m), slice(m, 2 * m)))
        scale = np.sqrt(one * other)
        rho.append(float(apart @ products[:m, m:] @ apart / scale) if scale > 0 else 0.0)
    return sum(rho) / 2.0


def divide(client: Any, state: dict[str, Any]) -> tuple[dict[str, Any], None]:
    """Weights by which a training sees one half of the samples or the other, with the same mean."""
    order, n = client.generator("halves of the samples").permutation(client.size), client.size
    first = order < n // 2
    sizes = np.maximum([n // 2, n - n // 2], 1)
    weights = np.stack([first, ~first], axis=1) * (n / sizes)
    return {**state, HALVES: weights.astype(np.float32)}, None


def reunite(client: Any, state: dict[str, Any]) -> tuple[dict[str, Any], None]:
    """Forget the halves."""
    return {name: value for name, value in state.items() if name != HALVES}, None


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
