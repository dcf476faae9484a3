"""FLUX: clients are clustered once, by descriptors of their data in a model's latent space; new ones need no labels.

Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski, "FLUX: Efficient Descriptor-Driven Clustered Federated Learning
under Arbitrary Distribution Shifts", NeurIPS 2025 (arXiv:2511.22305); code: dariofenoglio98/FLUX.

    w      the one model, then self.clusters[m]     z   what enters the classifier of w, projected to `length` numbers
    D_k    descriptor: mean and deviation of z, for P(X); then the same in every class, for P(X|Y) and with it P(Y|X)
    M      the number of clusters, found            eps   of DBSCAN, by the elbow of nearest distances

Some rounds of FedAvg, descriptors of all clients under w, one clustering, FedAvg in every cluster. A client without
labels describes itself by P(X) alone and gets the model of the cluster whose mean is nearest.

Readings

What the paper is read from
    here    its abstract, summaries of it, and the released code: the full text was not at hand
Dimension of z
    paper   reduced, so that descriptors stay small
    code    principal components of random points, the same for everybody
    here    a Gaussian projection that all clients share, drawn with the seed: nothing has to be agreed upon first
    option  flux.length
Deviations
    paper   covariances
    code    standard deviations of the reduced features
    here    as the code
Classes that a client has not
    code    -1, with fewer than two samples of a class
    here    0, before scaling: that a class is missing is seen
    option  flux.labels=false
Scales
    code    one scaler for each part of the descriptor
    here    each part (mean, deviation, and the same in classes) is centred and divided by its deviation over clients;
            one in which they differ by rounding alone counts nothing
Clustering
    paper   density-based, its neighbourhood adapted to the clients
    code    DBSCAN, eps at the elbow of nearest distances times a factor; noise points are clusters of their own
    here    as the code, times 1.35: with 1.25 some of four label swaps fall apart; with 1.5 two rotations are one
            cluster where the model that describes them has trained on all groups for some rounds, as under CAM. If
            more than `clusters` are found, the closest are merged
    option  flux.clustering, flux.scale
When
    code    from the third round on, once accuracy has risen by less than 0.06 in one; at 80 % of the rounds at latest
    here    after 1; in a shorter run the last round is the one. With CAM after its warm-up, described by the shared
            model, which that has trained
    option  flux.before
Who is clustered
    here    all clients, also those that do not take part in the round
New clients
    paper   by the part of the descriptor that needs no labels, under the model that the others were described by
    here    as the paper: the cluster whose mean is nearest in P(X); by all of the descriptor nobody is assigned
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED
from archipelago.strategies.clustering_rules import DBSCANOptions
from archipelago.strategies.distances import DISTANCES, Points, between
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import ClientView, FleetView
from archipelago.strategies.one_shot import OneShot
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Indices

ROUNDING = 1e-5  # of a part's size: clients that differ by less are alike, features have 32 bits


@dataclass
class FLUXOptions:
    """`flux.before=...`"""

    before: int = setting(1, "rounds of FedAvg before clients are described", at_least=0)
    length: int = setting(16, "numbers that latent features are projected to", at_least=1)
    labels: bool = setting(True, "describe every class, too")
    scale: float = setting(1.35, "eps of DBSCAN, as a multiple of the elbow", above=0)
    distance: str = setting("euclidean", "how far apart two descriptors are", choices=DISTANCES)
    clustering: str = setting("dbscan", "clustering rule (see `list`), or an import path")


@METHODS.register(
    "flux",
    "clusters by descriptors of latent features, once; finds their number (Fenoglio et al. 2025)",
    label="FLUX",
)
class FLUX(OneShot):
    """FedAvg, one clustering of descriptors, FedAvg in every cluster."""

    # Digits: a descriptor of 352 numbers beside a model of some thousand, once.
    # The round that clusters sends the model that describes clients, and then the one that they train.
    expects = Expectations(
        cost=Cost(down=2, up=1.3, trainings=1),
        known=(
            Known(
                "groups",
                ("one_class", "sizes"),
                "a client unlike all others widens the neighbourhood",
                limit=-0.05,
            ),
            Known("cost", "participation", "all clients are described in the round that clusters", limit=7.0),
        ),
    )

    Options = FLUXOptions
    grows = True
    state = (*OneShot.state, "extractor", "centre", "spread")
    extractor: Vector | None = None  # the model that clients were described by
    centre: npt.NDArray[np.float64] | None = None  # (d,) of the scaling
    spread: npt.NDArray[np.float64] | None = None

    def expect(self, fleet: FleetView) -> Indices:
        """Describe and cluster everybody, if it is time; then the cluster that each client is in."""
        if not self.divided and self.number > min(self.options.before, self.context.rounds - 1):
            everyone = fleet.everyone
            # On top of a shared model that was trained alone (CAM) the own one has hardly begun to learn.
            under = self.underlay
            self.extractor = under if isinstance(under, np.ndarray) else self.clusters[0]
            raw = self.described(everyone, self.options.labels)
            self.centre, self.spread = scales(raw, self.options.length)
            self.divide(everyone.ids, (raw - self.centre) / self.spread)
        return self.labels(fleet)

    def described(self, fleet: FleetView, labels: bool) -> Points:
        """(n, d) descriptors; without labels their first 2 * length numbers."""
        assert self.extractor is not None
        length = self.options.length
        found = fleet.describe(
            descriptor,
            stage="descriptors",
            model=self.extractor,
            seed=self.context.seed,
            length=length,
            labels=labels,
        )
        return np.stack(found).astype(np.float64)

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster nearest in P(X): no label is read."""
        assert self.points is not None and self.assignment is not None
        assert self.centre is not None and self.spread is not None
        plain = 2 * self.options.length
        mine = (self.described(fleet, False) - self.centre[:plain]) / self.spread[:plain]
        members = np.flatnonzero(~np.isnan(self.points).any(axis=1) & (self.assignment != UNASSIGNED))
        means = [
            self.points[members[self.assignment[members] == m], :plain].mean(axis=0) for m in range(self.K)
        ]
        return between(mine, np.stack(means), self.options.distance).argmin(axis=1).astype(np.int64)

    def adopt_unlabelled(self, fleet: FleetView) -> Indices:
        return self.adopt(fleet)

    def rule_options(self) -> Any:
        return DBSCANOptions(scale=self.options.scale)


def descriptor(
    client: ClientView, model: Vector, seed: int, length: int, labels: bool
) -> npt.NDArray[np.float64]:
    """D_k: means and deviations of a client's projected features, of all samples and, with `labels`, of each class."""
    features = (client if labels else client.unlabelled()).features(model).astype(np.float64)
    z = features @ projection(features.shape[1], length, seed)
    parts = [z.mean(axis=0), z.std(axis=0)]
    if labels and client.classes:
        of = client.labels()
        for each in (np.mean, np.std):
            rows = [
                each(z[of == y], axis=0) if (of == y).any() else np.zeros(length)
                for y in range(client.classes)
            ]
            parts.append(np.concatenate(rows))
    return np.concatenate(parts)


def projection(features: int, length: int, seed: int) -> npt.NDArray[np.float64]:
    """(features, length) Gaussian numbers that keep distances on average; the same for everybody."""
    rng = generator(seed, "flux projection")
    return rng.standard_normal((features, length)) / np.sqrt(length)


def scales(raw: Points, length: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Centre of each number over clients, and the spread of each part of the descriptor: parts then count alike.

    But for parts in which clients differ by rounding alone: these count nothing.

    >>> centre, spread = scales(np.array([[0.0, 10.0], [2.0, 10.0]]), 1)
    >>> centre.tolist(), spread.tolist()
    ([1.0, 10.0], [1.0, 10.0])
    """
    centre = raw.mean(axis=0)
    spread = np.ones(raw.shape[1])
    classes = (raw.shape[1] - 2 * length) // 2
    for first, last in (
        (0, length),
        (length, 2 * length),
        (2 * length, 2 * length + classes),
        (2 * length + classes, None),
    ):
        part = slice(first, last)
        if not raw[:, part].size:
            continue
        size, magnitude = (
            float(np.sqrt(np.mean(each**2))) for each in (raw[:, part] - centre[part], raw[:, part])
        )
        spread[part] = size if size > ROUNDING * magnitude else magnitude or 1.0
    return centre, spread
