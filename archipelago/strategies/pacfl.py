"""PACFL: clients are clustered once, before training, by the angles between the subspaces that their data spans.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity Identification in Clustered
Federated Learning via Principal Angles Between Client Data Subspaces", AAAI 2023 (arXiv:2209.10526), Algorithms 1, 2.

    D_k   samples of client k as columns      U_p^k   its p leading left singular vectors, the client's signature
    A     proximity matrix of angles in degrees       beta    `cut`, angle up to which clusters are merged

    (2)   A_ij = the smallest principal angle of U_p^i and U_p^j
    (3)   A_ij = the sum of the angles of their vectors of equal rank

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
D_k
    paper   the client's data matrix
    code    raw pixels; one for each class, whose vectors are put side by side; for clients of different data sets all
            samples
    here    all samples, so that clients without labels can be assigned; inputs as the network sees them
    option  pacfl.by_class
Smallest angle, (2)
    paper   of the subspaces: the arc cosine of the largest singular value of the product of the bases
    code    the least arc cosine among products of single vectors, whose signs are those that the SVD happened to give
    here    as the paper; with by_class as the code, whatever the signs: vectors of several classes are no basis
Sum of angles, (3)
    paper   a trace of arc cosines
    here    signs do not matter: a vector and its negative are the same direction
p
    paper   3 to 5
    code    3 (its scripts; its default is 5)
    here    3
    option  pacfl.vectors
Which of (2) and (3)
    paper   both
    code    (2)
    here    (2); with by_class only (3) is of use where clients have classes in common
    option  pacfl.measure=sum
Where the hierarchy is cut
    paper   at an angle beta, tuned for each data set
    here    at `clusters` clusters; at an angle where one is given, and then at no more than `clusters`
    option  pacfl.cut
Linkage
    code    average, by plain means of the merged rows
    here    average over members
    option  pacfl.linkage, pacfl.clustering
New clients
    paper   Algorithm 2: the matrix is extended and clustered again, old clusters are kept
    here    the cluster whose members' angles are least on average; a new cluster would have no model. By samples alone
            unless by_class asks for labels
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.clustering_rules import AgglomerativeOptions
from archipelago.strategies.distances import Features, Points, principal_angles
from archipelago.strategies.expectations import Cost, Expectations
from archipelago.strategies.interface import ClientView, FleetView
from archipelago.strategies.one_shot import OneShot
from archipelago.strategies.references import Indices


@dataclass
class PACFLOptions:
    """`pacfl.vectors=...`"""

    vectors: int = setting(3, "p: leading singular vectors that a client sends", at_least=1)
    measure: str = setting("smallest", "distance of two clients: the smallest angle (2), or the sum of angles (3)",
                           choices=("smallest", "sum"))  # fmt: skip
    by_class: bool = setting(False, "p vectors of each class instead of all samples; needs labels")
    linkage: str = setting("average", "distance of two clusters", choices=("average", "complete", "single"))
    cut: float | None = setting(
        None, "beta: merge clusters up to this angle in degrees; null: until `clusters` are left", at_least=0
    )
    clustering: str = setting("agglomerative", "clustering rule (see `list`), or an import path")


@METHODS.register(
    "pacfl",
    "clusters by principal angles of clients' data, once, before training (Vahidian et al. 2023)",
    label="PACFL",
)
class PACFL(OneShot):
    """Signatures of all clients, one clustering of their angles, FedAvg in every cluster."""

    # Digits: 64 numbers for each of 3 vectors, beside a model of a few thousand.
    expects = Expectations(cost=Cost(down=1, up=1.2, trainings=1))

    Options = PACFLOptions
    state = (*OneShot.state, "width")
    width = 0  # vectors that a signature can hold

    def expect(self, fleet: FleetView) -> Indices:
        """Algorithm 1, lines 1 to 7, before the first training; then the cluster that each client is in."""
        if not self.divided:
            everyone = fleet.everyone
            self.divide(everyone.ids, self.signatures(everyone))
        return self.labels(fleet)

    def signatures(self, fleet: FleetView) -> Points:
        """(n, d * columns): U_p of each client, flattened."""
        vectors, by_class = self.options.vectors, self.options.by_class
        found = fleet.describe(signature, stage="signatures", vectors=vectors, by_class=by_class)
        self.width = int(found[0].shape[1])
        return np.stack([basis.ravel() for basis in found]).astype(np.float64)

    def apart(self, rows: Features, others: Features | None = None) -> Points:
        """(2) or (3), in degrees."""
        first = np.asarray(rows, np.float64).reshape(len(rows), -1, self.width)
        second = (
            first if others is None else np.asarray(others, np.float64).reshape(len(others), -1, self.width)
        )
        measure, spans = self.options.measure, not self.options.by_class
        away = np.array([[angle(u, v, measure, spans) for v in second] for u in first])
        if others is None:
            np.fill_diagonal(away, 0.0)
        return away.reshape(len(first), len(second))

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster whose members' data is at the least angle."""
        return self.nearest(self.signatures(fleet))

    def adopt_unlabelled(self, fleet: FleetView) -> Indices:
        """The same: samples are enough, unless the signatures of classes were asked for."""
        return super().adopt_unlabelled(fleet) if self.options.by_class else self.adopt(fleet)

    def rule_options(self) -> AgglomerativeOptions:
        return AgglomerativeOptions(self.options.linkage, self.options.cut)


def angle(first: Points, second: Points, measure: str, spans: bool = True) -> float:
    """Between two signatures, in degrees: (2) "smallest", (3) "sum"; a class that neither has adds nothing to (3).

    `spans`: whether the columns are one orthonormal basis; else (2) is the smallest angle of two single vectors.

    >>> plane, tilted = np.eye(3)[:, :2], np.array([[1.0, 0.0], [0.0, 0.8], [0.0, 0.6]])
    >>> round(angle(plane, tilted, "smallest"), 2), round(angle(plane, -tilted, "sum"), 2)
    (0.0, 36.87)
    """
    if measure == "sum":
        cosines = np.abs(np.add.reduce(first * second, axis=0))
        cosines[~first.any(axis=0) & ~second.any(axis=0)] = 1.0
        return float(np.degrees(np.arccos(np.clip(cosines, 0.0, 1.0))).sum())
    if spans:
        return float(principal_angles(first, second)[0])
    return float(np.degrees(np.arccos(np.clip(np.abs(first.T @ second).max(), 0.0, 1.0))))


def signature(client: ClientView, vectors: int, by_class: bool) -> npt.NDArray[np.float64]:
    """U_p of a client's samples, (d, p), or of each class, (d, p * classes); columns that do not exist are 0."""
    if not by_class:
        return leading(client.unlabelled().samples(), vectors)
    samples, labels, classes = client.samples(), client.labels(), client.classes or 0
    return np.concatenate([leading(samples[labels == k], vectors) for k in range(classes)], axis=1)


def leading(samples: npt.NDArray[np.float32], vectors: int) -> npt.NDArray[np.float64]:
    """(d, p): the leading left singular vectors of the samples as columns.

    >>> leading(np.float32([[0, 3], [0, 4]]), 2).round(6).tolist()
    [[0.0, 0.0], [1.0, 0.0]]
    """
    data = samples.reshape(len(samples), math.prod(samples.shape[1:])).T.astype(np.float64)
    found = np.zeros((data.shape[0], vectors))
    if data.shape[1]:
        with threadpool_limits(limits=1):  # the same sums on any machine
            left, singular, _ = np.linalg.svd(data, full_matrices=False)
        kept = left[:, :vectors] * (singular[:vectors] > 1e-10 * max(float(singular[0]), 1e-300))
        flip = np.sign(kept[np.abs(kept).argmax(axis=0), np.arange(kept.shape[1])])  # signs mean nothing
        found[:, : kept.shape[1]] = kept * np.where(flip == 0, 1, flip) + 0.0
    return found
