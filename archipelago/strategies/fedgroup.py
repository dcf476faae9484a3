"""FedGroup (FlexCFL): groups by the decomposed cosine similarity of pre-trained updates; new clients join by direction.

Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Federated Learning via Decomposed Similarity-Based
Clustering", ISPA 2021 (arXiv:2010.06870); Duan et al., "Flexible Clustered Federated Learning for Client-Level Data
Distribution Shift", IEEE TPDS 2022 (FlexCFL); code: morningD/FlexCFL.

    m         clusters                     w~^(g)    self.clusters[g]          w_0     the first model
    Delta_i   update of a pre-training from w_0      Delta^(g)   self.directions[g], the mean of its group
    V         m leading singular vectors of all Delta_i
    EDC       rows cos(Delta_i, V_1 .. m), clustered by K-means       MADC    mean |cos(i, z) - cos(j, z)| over others z
    eta_G     `mixing`, the step of inter-group aggregation

Group cold start, once: alpha m clients pre-train, are clustered, and a group starts from the mean of their models. A
client that comes later pre-trains, too, and joins the group of most similar direction (client cold start). Then FedAvg
in groups, and w~^(g) + eta_G sum_(l != g) w~^(l) / ||w~^(l)||.

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
Pre-training
    code    50 mini-batches
    here    the experiment's local training
Who is clustered
    paper   alpha m clients, drawn
    code    alpha = 20, or all if there are fewer
    here    as the code
    option  fedgroup.alpha
V
    paper   of the updates' directions
    code    of the updates as they are (truncated SVD)
    here    as the code, through their inner products: no (clients, parameters) matrix is decomposed
Similarity
    paper   EDC, MADC
    code    EDC by K-means; MADC by complete linkage
    here    as the code
    option  fedgroup.measure=madc, fedgroup.clustering
First model of a group
    code    the plain mean of its pre-trained models
    here    by `weights`
    option  weights=uniform
Inter-group aggregation
    paper   eta_G from 0 to 0.1
    code    off; the sum is divided by the sum of its coefficients
    here    off; the sum as it is in the paper
    option  fedgroup.mixing
Clients whose data shifts (FlexCFL)
    paper   are found by the Wasserstein distance of their labels, and migrate by a new cold start
    code    that distance of the numbers of samples per class, taken as values; all clients are asked in every round
    here    the same where a threshold is given: a client whose data has changed reports its shares of labels. Classes
            count as equally far apart, so the distance is half the sum of absolute differences. What changes without
            changing these shares is not found
    option  fedgroup.migrate
New clients
    paper   client cold start
    here    the same; for clients that never train, every time they are asked
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels, Context
from archipelago.strategies.clustering import ClusteringTask, check_rule, clustered
from archipelago.strategies.clustering_rules import AgglomerativeOptions
from archipelago.strategies.distances import Points, between, pairwise
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import ClientView, FleetView, Handle
from archipelago.strategies.references import Indices, Models

NEVER = 0  # no round


@dataclass
class FedGroupOptions:
    """`fedgroup.alpha=...`"""

    alpha: int = setting(20, "clients per group that the first clustering sees", at_least=1)
    measure: str = setting("edc", "similarity of updates: decomposed cosines, or differences of cosines",
                           choices=("edc", "madc"))  # fmt: skip
    clustering: str | None = setting(
        None,
        "clustering rule (see `list`), or an import path; null: K-means for edc, complete linkage for madc",
    )
    migrate: float | None = setting(
        None, "Wasserstein distance of a client's labels from those it joined with, above which it joins anew; null: "
        "it stays", at_least=0, at_most=1,
    )  # fmt: skip
    mixing: float = setting(0.0, "eta_G: step of every group towards the others' models", at_least=0)


@METHODS.register(
    "fedgroup", "groups by decomposed cosines of pre-trained updates (Duan et al. 2021)", label="FedGroup"
)
class FedGroup(ClusteredModels):
    """Group cold start, client cold start, FedAvg in groups, inter-group aggregation."""

    # The dearest round is a client's first: a pre-training and a training.
    expects = Expectations(
        cost=Cost(down=2, up=2, trainings=2),
        known=(
            Known(
                "groups",
                ("one_class", "sizes"),
                "one client unlike all others, or of few samples, leads a group",
                limit=-0.1,
            ),
            Known("cost", "participation", "all clients are asked in the first round", limit=6.1),
            Known(
                "cost",
                "stragglers",
                "a training to compare clients by is whole, also at a straggler",
                limit=2.4,
            ),
        ),
    )

    Options = FedGroupOptions
    by_loss = False
    state = ("clusters", "directions", "points", "shares", "asked")
    per_client: ClassVar[dict[str, float]] = {
        "assignment": UNASSIGNED, "points": np.nan, "shares": np.nan, "asked": NEVER,
    }  # fmt: skip
    directions: npt.NDArray[np.float32] | None = None  # (m, parameters): the mean first update of each group
    points: npt.NDArray[np.float64] | None = None  # (clients, m): EDC of those that were clustered
    shares: Points | None = None  # (clients, classes): of the labels that each client joined its group with
    asked: Indices  # the round in which each client last reported these

    @classmethod
    def check(cls, options: FedGroupOptions, context: Context) -> None:
        if options.clustering is not None:
            check_rule(options.clustering)

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.clusters = Models(np.repeat(fleet.initial(1).values, self.K, axis=0))
        self.asked = np.full(self.context.clients, NEVER, np.int64)

    def expect(self, fleet: FleetView) -> Indices:
        """Group cold start in the first round, client cold start of whoever comes later."""
        assert self.assignment is not None
        first = self.directions is None
        if first:
            self.group_cold_start(fleet.everyone)
        if self.options.migrate is not None:
            self.migrate(fleet.everyone if first else fleet, self.options.migrate)
        new = fleet.select(fleet.ids[self.assignment[fleet.ids] == UNASSIGNED])
        if len(new.ids):
            self.assign(new, self.client_cold_start(new))
        return self.assignment[fleet.ids]

    def migrate(self, fleet: FleetView, threshold: float) -> None:
        """Take clients out of their groups whose labels are no longer those that they joined with."""
        assert self.assignment is not None
        due = fleet.select(fleet.ids[self.asked[fleet.ids] < self.context.since(self.number)])
        if not len(due.ids):
            return
        found = np.stack(due.describe(shares_of_labels, stage="shares of labels"))
        before = (
            np.full((self.context.clients, found.shape[1]), np.nan) if self.shares is None else self.shares
        )
        away = 0.5 * np.add.reduce(np.abs(found - before[due.ids]), axis=1)  # NaN of a client never asked
        joins = ~(away <= threshold)
        self.shares, self.asked, self.assignment = before.copy(), self.asked.copy(), self.assignment.copy()
        self.shares[due.ids[joins]] = found[joins]
        self.asked[due.ids] = self.number
        moving = due.ids[away > threshold]
        self.assignment[moving] = UNASSIGNED
        if len(moving):
            self.events.append(f"The labels of {len(moving)} clients have changed: they join a group anew.")

    def pre_train(self, fleet: FleetView) -> Handle:
        """A local training from w_0, with an optimizer of its own."""
        start = fleet.initial(1)[0]
        return fleet.train(start=start, slot="pre-training", fresh=True, sends=True, compared=False)

    def group_cold_start(self, everyone: FleetView) -> None:
        """Cluster the updates of alpha m clients; groups start from the means of their models."""
        count = min(self.options.alpha * self.K, len(everyone.ids))
        rng = generator(self.context.seed, "group cold start", round=self.number)
        fleet = everyone.select(rng.choice(everyone.ids, count, replace=False))
        theta, w0 = self.pre_train(fleet), everyone.initial(1)[0]
        arrived = np.flatnonzero(theta.arrived)
        if not len(arrived):
            return
        products = inner_products(theta, w0, fleet.spec.parameters)[np.ix_(arrived, arrived)]
        labels = self.grouped(products)
        self.points = np.full((self.context.clients, self.K), np.nan)
        self.points[fleet.ids[arrived]] = decomposed(products, self.K)
        c = np.full(len(fleet.ids), UNASSIGNED, np.int64)
        c[arrived] = labels
        n, start = self.client_weights(fleet), self.clusters
        self.clusters = theta.average(by=c, weights=n, clusters=self.K, otherwise=start)
        P = fleet.spec.parameters
        self.directions = self.clusters.values[:, :P] - w0[:P]
        self.assign(fleet, c)

    def grouped(self, products: Points) -> Indices:
        """m groups by EDC and K-means, or by MADC and complete linkage."""
        seed = int(generator(self.context.seed, "fedgroup", round=self.number).integers(2**31))
        rule, own, given = self.options.clustering, None, None
        if self.options.measure == "madc":
            given, rule = differences(cosines_of(products)), rule or "agglomerative"
            own = AgglomerativeOptions("complete")
        task = ClusteringTask(decomposed(products, self.K), self.K, seed, starts=20, given=given)
        found: Any = clustered(rule or "kmeans", task, self.context, own)
        if found.distinct < self.K:
            self.events.append(f"Only {found.distinct} groups for {self.K} clusters: the rest stays empty.")
        return np.asarray(found.labels)

    def client_cold_start(self, fleet: FleetView) -> Indices:
        """The group whose direction is most similar to what each client's pre-training adds to w_0."""
        found = np.zeros(len(fleet.ids), np.int64)
        if self.directions is None:  # nobody arrived yet
            return found
        theta, w0 = self.pre_train(fleet), fleet.initial(1)[0]
        P = fleet.spec.parameters
        steps = theta.gather(np.arange(P)) - w0[:P]
        away = between(steps, self.directions, "cosine")
        away[:, ~self.directions.any(axis=1)] = np.inf  # a group that is empty has no direction
        found[theta.arrived] = away[theta.arrived].argmin(axis=1)
        return found

    def update(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        super().update(fleet, theta, c)
        if self.options.mixing:
            self.clusters = mixed_groups(self.clusters, self.options.mixing, fleet.spec.parameters)

    def adopt(self, fleet: FleetView) -> Indices:
        return self.client_cold_start(fleet)

    def proximity(self, ids: Indices) -> tuple[Indices, Points] | None:
        if self.points is None:
            return None
        seen = ids[~np.isnan(self.points[ids]).any(axis=1)]
        return seen, pairwise(self.points[seen])


def shares_of_labels(client: ClientView) -> Points:
    """(classes,), adding up to 1."""
    counts = client.label_counts()
    return counts / max(int(counts.sum()), 1)


def inner_products(theta: Handle, start: npt.NDArray[np.float32], parameters: int) -> Points:
    """(n, n) of the clients' updates over the trainable parameters."""
    products = np.zeros((len(theta.ids), len(theta.ids)))
    with threadpool_limits(limits=1):  # the same sums on any machine
        for columns, table in theta.chunks():
            trained = columns[columns < parameters]
            steps = table[:, : len(trained)].astype(np.float64) - start[trained]
            products += np.nan_to_num(steps @ steps.T)
    return products


def cosines_of(products: Points) -> Points:
    """(n, n) cosines, of inner products; 0 for an update of length 0."""
    scale = np.sqrt(np.outer(products.diagonal(), products.diagonal()))
    return np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)


def decomposed(products: Points, count: int) -> Points:
    """EDC, (n, count): cosines of n updates with the leading left singular vectors of all, from their inner products.

    With Delta = U S V^T the products are U S^2 U^T, and cos(Delta_i, V_j) = U_ij S_j / ||Delta_i||.

    >>> decomposed(np.outer([1.0, 2.0, -3.0], [1.0, 2.0, -3.0]), 1).round(6).ravel().tolist() in (
    ...     [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0])
    True
    """
    with threadpool_limits(limits=1):
        squares, vectors = np.linalg.eigh(products)
    squares, vectors = np.maximum(squares[::-1][:count], 0.0), vectors[:, ::-1][:, :count]
    squares = np.where(squares > 1e-12 * max(float(squares[0]), 1e-300), squares, 0.0)
    length = np.sqrt(np.maximum(products.diagonal(), 0.0))[:, None]
    values = vectors * np.sqrt(squares)
    found = np.zeros((len(products), count))
    found[:, : values.shape[1]] = np.divide(values, length, out=np.zeros_like(values), where=length > 0)
    return found


def differences(alike: Points) -> Points:
    """MADC, (n, n): the mean over the others z of |cos(i, z) - cos(j, z)|.

    >>> differences(np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.6], [0.2, 0.6, 1.0]])).round(6).tolist()
    [[0.0, 0.4, 0.1], [0.4, 0.0, 0.3], [0.1, 0.3, 0.0]]
    """
    n = len(alike)
    away = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1, n):
            others = np.delete(np.arange(n), [i, j])
            away[i, j] = away[j, i] = np.abs(alike[i, others] - alike[j, others]).mean() if n > 2 else 0.0
    return away


def mixed_groups(groups: Models, step: float, parameters: int) -> Models:
    """Inter-group aggregation: every group plus `step` times the others' models, each of length 1.

    >>> [[round(float(x), 4) for x in row] for row in mixed_groups(Models(np.float32([[3, 4], [0, 2]])), 0.5, 2).values]
    [[3.0, 4.5], [0.3, 2.4]]
    """
    values = groups.values.copy()
    own = values[:, :parameters].astype(np.float64)
    length = np.sqrt(np.add.reduce(own * own, axis=1))[:, None]
    unit = np.divide(own, length, out=np.zeros_like(own), where=length > 0)
    values[:, :parameters] = own + step * (np.add.reduce(unit, axis=0) - unit)
    return Models(values.astype(np.float32))
