"""Soft clusters: K models on the server, and for each client how much of each is in its data.

What FedSoft and FedEM share. Such a method has no hard assignment: where figures need one, it is the
model of largest weight.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.strategies.adoption import ADOPTION, entropies
from archipelago.strategies.base import UNASSIGNED, Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Indices, Models, Reference

Weights = npt.NDArray[np.float64]


class MixtureModels(Strategy):
    """A method whose server holds K models and a row of K mixture weights for each client it has seen."""

    clustered = True
    when_empty = "no client weighs it most, and it keeps learning from those that weigh it less"
    state: ClassVar[tuple[str, ...]] = ("clusters", "mixture")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "mixture": np.nan}
    clusters: Models
    mixture: Weights  # (clients, K), a row by client id; NaN where a client was never measured

    def setup(self, fleet: FleetView) -> None:
        self.clusters = fleet.initial(self.K)
        self.mixture = np.full((self.context.clients, self.K), np.nan)
        self.assignment = np.full(self.context.clients, UNASSIGNED, np.int64)

    def measure(self, fleet: FleetView) -> Weights:
        """The (n, K) weights of clients the method knows nothing about, under the models as they are."""
        raise NotImplementedError

    def measure_unlabelled(self, fleet: FleetView) -> Weights:
        """The same of clients without labels; as it stands, all of the model that is surest of its predictions."""
        found = fleet.describe(entropies, stage="adopting new clients", models=self.clusters)
        return np.eye(self.K)[np.argmin(np.stack(found), axis=1)]

    def known(self, fleet: FleetView) -> npt.NDArray[np.bool_]:
        """Which clients of `fleet` have weights."""
        return ~np.isnan(self.mixture[fleet.ids, 0])

    def remember(self, fleet: FleetView, weights: Weights) -> None:
        """Keep the weights of these clients, and the model of largest weight as their cluster."""
        assert self.assignment is not None
        self.mixture, self.assignment = self.mixture.copy(), self.assignment.copy()
        self.mixture[fleet.ids] = weights
        self.assignment[fleet.ids] = np.argmax(weights, axis=1)

    def record(self, name: str) -> None:
        """A table of the weights known by now, one row a client, for the figures."""
        seen = np.flatnonzero(~np.isnan(self.mixture[:, 0]))
        columns = {f"{name}_{k}": self.mixture[seen, k] for k in range(self.K)}
        self.records[name] = {"client": seen, **columns}

    def weights(self, fleet: FleetView) -> Weights:
        """The weights of each client of `fleet`; clients never seen are measured for now, not for good."""
        found, unseen = self.mixture[fleet.ids], ~self.known(fleet)
        new = np.isin(fleet.ids, self.context.new_clients)
        for at, rule in ((unseen & ~new, "labels"), (unseen & new, self.context.adoption)):
            if at.any():
                found[at] = ADOPTION.find(rule)().weigh(self, fleet.select(fleet.ids[at]))
        return found

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster of clients the method has not seen yet: the model of largest weight."""
        return np.argmax(self.measure(fleet), axis=1).astype(np.int64)

    def adopt_unlabelled(self, fleet: FleetView) -> Indices:
        """The same of clients without labels."""
        return np.argmax(self.measure_unlabelled(fleet), axis=1).astype(np.int64)

    def labels(self, fleet: FleetView) -> Indices:
        """The model of largest weight of each client of `fleet`."""
        return np.argmax(self.weights(fleet), axis=1).astype(np.int64)

    def gradient_point(self, fleet: FleetView) -> tuple[Reference, Reference | None]:
        return self.clusters[self.labels(fleet)], None

    def centre_models(self) -> list[list[Vector]]:
        return [[model] for model in self.clusters.values]

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"clusters": self.clusters.values}
