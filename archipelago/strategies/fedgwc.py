"""FedGWC: clusters of clients whose losses are typical of the same company, found again and again inside clusters.

Licciardi, Leo, Fanì, Caputo, Ciccone, "Interaction-Aware Gaussian Weighting for Clustered Federated Learning", ICML
2025 (arXiv:2502.03340); code: davedleo/FedGWC.

    l_k         loss of client k in its local training        P      clients that are compared with one another
    m, sigma^2  mean and variance of l_k over P, by samples   r_k    exp(-(l_k - m)^2 / (2 sigma^2)), the reward
    w_k         r_k / sum of r over P                         W      self.W[k, j]: how typical k is where j is there
    v_j         column j of W                                 beta   `beta`, of the affinity exp(-beta ||v_i - v_j||^2)

Each round, in every cluster: FedAvg; Gaussian rewards; W_kj <- (1 - alpha) W_kj + alpha w_k for all k, j in P. When W
has come to rest, its clients are divided by spectral clustering into the number of parts with the least Davies-Bouldin
score, if that is below 1. Each part continues from the cluster's model, and may be divided again.

Readings

What the paper is read from
    here    its abstract, summaries of it, and the released code: the full text was not at hand
l_k
    paper   a process, the losses of all local steps
    code    a reward for each step, and their mean
    here    the mean loss of the steps, and one reward: a client reports one number
P
    paper   the participants of a round, a tenth of the clients
    code    the same
    here    `draws` random sets of `sample` participants each: where all clients take part, all columns of W would be
            equal, and nobody could be told from anybody
    option  fedgwc.sample=0: all participants of a cluster at once
alpha
    code    |P| / clients of the cluster
    here    1 / how often k and j were compared, which makes W the mean of what was seen; a new cluster counts anew
    option  fedgwc.alpha
Small samples
    code    mean and variance can be those of a sample that is filled up by random draws
    here    those of P
W at rest
    code    a moving mean of the squared change is below 1e-5 in as many rounds as it takes to see everybody once
    here    the same, the change in shares of W's mean square: W's entries are about 1 / |P|
    option  fedgwc.eps
Affinity
    code    W scaled to [0, 1]; entries of i and j themselves are left out of v_i and v_j; beta 0.1
    here    the same
    option  fedgwc.beta
Spectral clustering
    code    scikit-learn's, discretised by QR; scored on an embedding that is computed apart
    here    eigenvectors of the normalised affinity, clustered by K-means and scored on these
    option  fedgwc.clustering
Number of parts
    code    2 to 4, at most clients / |P|, however small
    here    2 to `parts`, at most clients / |P|, none with fewer than `min_size` clients; no more than `clusters` in all
    option  fedgwc.parts, fedgwc.min_size
Clients that never took part
    code    have the entries that W began with
    here    are in no cluster; when they come they join the one of least loss, as new clients do
Which model a part begins with
    code    the cluster's, after the round's average
    here    the cluster's; the round that divides it averages each part on its own
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
from archipelago.strategies.clustering_rules import in_order
from archipelago.strategies.distances import Points, pairwise
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.references import Indices, Models

Losses = npt.NDArray[np.float64]


@dataclass
class FedGWCOptions:
    """`fedgwc.sample=...`"""

    sample: int = setting(
        4, "clients whose losses are compared with one another; 0: all of a cluster", at_least=0
    )
    draws: int = setting(20, "random sets of `sample` clients in a round", at_least=1)
    alpha: float | None = setting(None, "how much of W is replaced; null: the mean of all that was seen",
                                  above=0, at_most=1)  # fmt: skip
    eps: float = setting(
        0.01, "W is at rest when its mean squared change is this share of its mean square", above=0
    )
    beta: float = setting(0.1, "of the affinity exp(-beta ||v_i - v_j||^2)", above=0)
    parts: int = setting(4, "most parts that a cluster is divided into at once", at_least=2)
    min_size: int = setting(2, "fewest clients of a part", at_least=1)
    clustering: str = setting("kmeans", "clustering rule (see `list`) of the eigenvectors, or an import path")


@METHODS.register(
    "fedgwc",
    "recursive spectral clusters by Gaussian rewards of losses, up to `clusters` (Licciardi et al. 2025)",
    label="FedGWC",
)
class FedGWC(ClusteredModels):
    """FedAvg in clusters; rewards, interaction matrix, and a division of every cluster whose matrix is at rest."""

    expects = Expectations(
        ari=0.0,  # groups whose losses are equally high are one to it
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known("splits", ALL, "a Davies-Bouldin score below 1 is found in noise, too", limit=4),
            Known("accuracy", ALL, "clusters are by how high losses are, whatever the groups", limit=0.15),
        ),
    )

    Options = FedGWCOptions
    grows = True
    by_loss = False
    state = ("clusters", "K", "W", "met", "mse", "calm")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED}
    W: Points  # (clients, clients); what two clients of different clusters have there is of the past
    met: Points  # (clients, clients): how often two were compared since their cluster began
    mse: Losses  # by cluster: moving mean of the squared change of W, in shares of its mean square
    calm: Indices  # by cluster: rounds in a row in which that was below eps

    @classmethod
    def check(cls, options: FedGWCOptions, context: Context) -> None:
        check_rule(options.clustering)

    def setup(self, fleet: FleetView) -> None:
        self.K = 1
        super().setup(fleet)
        self.W, self.met = (np.zeros((self.context.clients,) * 2) for _ in range(2))
        self.mse, self.calm = np.ones(1), np.zeros(1, np.int64)

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """Rewards of the round's losses into W, then the division of clusters that are at rest."""
        assert self.assignment is not None
        arrived = theta.arrived
        self.assignment = self.assignment.copy()
        self.assignment[theta.ids[arrived]] = c[arrived]
        self.W, self.met = self.W.copy(), self.met.copy()
        self.mse, self.calm = self.mse.copy(), self.calm.copy()
        n = self.client_weights(fleet)
        for k in range(self.K):
            at = np.flatnonzero(arrived & (c == k))
            if len(at) > 1:
                self.interact(k, theta.ids[at], theta.objective[at], n[at])
        if not self.frozen:
            for k, present in enumerate(np.bincount(c[arrived], minlength=self.K).tolist()):
                self.divide(k, present)
        return self.assignment[theta.ids]

    def interact(self, k: int, ids: Indices, losses: Losses, n: Losses) -> None:
        """w of these clients of cluster k into W, and whether W is at rest there."""
        changes = [self.compare(ids[P], gaussian_weights(losses[P], n[P])) for P in self.sets(k, len(ids))]
        members = self.members(k)
        square = float(np.mean(self.W[np.ix_(members, members)] ** 2))
        share = len(ids) / len(members)
        self.mse[k] = (1.0 - share) * self.mse[k] + share * float(np.mean(changes)) / square
        self.calm[k] = self.calm[k] + 1 if self.mse[k] < self.options.eps else 0
        self.report["interaction_change"] = self.mse.tolist()

    def sets(self, k: int, count: int) -> list[Indices]:
        """P: positions among a cluster's `count` clients of the round."""
        size = self.options.sample
        if not 0 < size < count:
            return [np.arange(count)]
        rng = generator(self.context.seed, "gaussian rewards", slot=f"cluster {k}", round=self.number)
        return [np.sort(rng.choice(count, size, replace=False)) for _ in range(self.options.draws)]

    def compare(self, ids: Indices, w: Losses) -> float:
        """W_kj <- (1 - alpha) W_kj + alpha w_k; returns the mean squared change."""
        block = np.ix_(ids, ids)
        self.met[block] += 1.0
        alpha = 1.0 / self.met[block] if self.options.alpha is None else self.options.alpha
        change = alpha * (w[:, None] - self.W[block])
        self.W[block] += change
        return float(np.mean(change**2))

    def members(self, k: int) -> Indices:
        """Clients of cluster k, by id."""
        return np.flatnonzero(self.assignment == k)

    def divide(self, k: int, present: int) -> None:
        """Spectral clustering of a cluster whose W is at rest, if a division has a Davies-Bouldin score below 1."""
        assert self.assignment is not None
        members = self.members(k)
        compared = min(self.options.sample or present, present)
        most = min(self.options.parts, self.context.clusters - self.K + 1, len(members) // max(compared, 1))
        rounds = max(1, round(len(members) / max(present, 1)))  # to see everybody once
        if most < 2 or self.calm[k] < rounds:
            return
        labels, score = self.best_division(
            affinity(self.W[np.ix_(members, members)], self.options.beta), most
        )
        self.mse[k], self.calm[k] = 1.0, 0  # either way it begins anew
        if labels is None:
            return
        sizes = np.bincount(labels)
        self.assignment[members] = np.where(labels == 0, k, self.K + labels - 1)
        self.met[np.ix_(members, members)] = 0.0
        more = len(sizes) - 1
        self.clusters = Models(np.concatenate([self.clusters.values, self.clusters.values[[k] * more]]))
        self.mse, self.calm = (
            np.append(self.mse, np.ones(more)),
            np.append(self.calm, np.zeros(more, np.int64)),
        )
        self.events.append(
            f"Cluster {k} was divided: {', '.join(map(str, sizes.tolist()))} clients (Davies-Bouldin {score:.2f})."
        )
        self.K += more

    def best_division(self, alike: Points, most: int) -> tuple[Indices | None, float]:
        """The labels of least Davies-Bouldin score below 1, and that score; None without one."""
        from sklearn.metrics import davies_bouldin_score

        seed = int(generator(self.context.seed, "fedgwc", round=self.number).integers(2**31))
        best, labels = 1.0, None
        for parts in range(2, most + 1):
            points = embedding(alike, parts)
            found: Any = clustered(self.options.clustering, ClusteringTask(points, parts, seed), self.context)
            sizes = np.bincount(found.labels)
            if len(sizes) < 2 or sizes.min() < self.options.min_size:
                continue
            with threadpool_limits(limits=1):
                score = float(davies_bouldin_score(points, found.labels))
            if score < best:
                best, labels = score, in_order(found.labels)
        return labels, best

    def adopt(self, fleet: FleetView) -> Indices:
        return np.zeros(len(fleet.ids), np.int64) if self.K == 1 else super().adopt(fleet)


def gaussian_weights(losses: Losses, n: Losses) -> Losses:
    """w: Gaussian rewards of losses by how far they are from their mean, adding up to 1.

    >>> gaussian_weights(np.array([1.0, 3.0, 3.0, 1.0]), np.ones(4)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> gaussian_weights(np.array([0.0, 0.0, 3.0]), np.ones(3)).round(4).tolist()  # m = 1, sigma^2 = 2
    [0.4045, 0.4045, 0.1911]
    """
    m = np.average(losses, weights=n)
    variance = np.average((losses - m) ** 2, weights=n) + 1e-16
    rewards = np.exp(-((losses - m) ** 2) / (2.0 * variance))
    found: Losses = rewards / rewards.sum()
    return found


def affinity(W: Points, beta: float) -> Points:
    """(n, n): exp(-beta ||v_i - v_j||^2) of the columns of W scaled to [0, 1], entries i and j left out.

    >>> affinity(np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 0.5], [1.0, 0.0, 0.5]]), 1.0).round(4).tolist()
    [[1.0, 0.3679, 0.7788], [0.3679, 1.0, 0.7788], [0.7788, 0.7788, 1.0]]
    """
    scaled = (W - W.min()) / max(float(W.max() - W.min()), 1e-8)
    at_i = (scaled.diagonal()[:, None] - scaled) ** 2  # what entry i adds to the distance of v_i and v_j
    apart = pairwise(scaled.T) ** 2 - at_i - at_i.T
    found: Points = np.exp(-beta * np.maximum(apart, 0.0))
    np.fill_diagonal(found, 1.0)
    return found


def embedding(alike: Points, dimensions: int) -> Points:
    """(n, dimensions): the leading eigenvectors of D^-1/2 A D^-1/2, of the random walk on A.

    >>> halves = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    >>> points = embedding(halves + 1e-3, 2)
    >>> bool(np.ptp(points[:2], axis=0).max() < 1e-8), bool(np.abs(points[0] - points[2]).max() > 0.5)
    (True, True)
    """
    scale = 1.0 / np.sqrt(np.add.reduce(alike, axis=1))
    with threadpool_limits(limits=1):
        _, vectors = np.linalg.eigh(scale[:, None] * alike * scale)
    return scale[:, None] * vectors[:, ::-1][:, :dimensions]
