"""FedClust: clients are clustered once, before training, by what their last layer learns from a common start.

Islam, Javaherian, Xu, Yuan, Chen, Tzeng, "FedClust: Tackling Data Heterogeneity in Federated Learning through
Weight-Driven Client Clustering", ICPP 2024 (arXiv:2407.07124).

    theta^0   the first model          theta_i^(L)   final-layer weights of client i after a local training from theta^0
    M         proximity matrix: Euclidean distances of theta_i^(L)   lambda   `cut`, distance up to which clusters merge

Readings

Released code
    here    none by the authors was found (a repository of that name is another work): what is here rests on the paper
What is clustered
    paper   the weights of the final layer
    here    as the paper, without biases
    option  fedclust.features=head|parameters
What it tells apart
    paper   clients with other labels
    here    the same: final layers of clients with the same classes look alike after one training, though their inputs
            are rotated
Where the hierarchy is cut
    paper   at a distance lambda, tuned for each data set
    here    at `clusters` clusters; at a distance where one is given, and then at no more than `clusters`
    option  fedclust.cut
Linkage
    paper   not named
    here    average
    option  fedclust.linkage, fedclust.distance, fedclust.clustering
Who is clustered
    paper   all available clients train from theta^0 for it and send that layer alone
    here    all of them, also those that do not take part in the round; they train once, and the round's mean inside
            each cluster uses it: what is sent is one model, not a layer and later a model
New clients
    paper   train from theta^0, send the layer, and join the cluster nearest to it
    here    the same: the cluster whose members are nearest on average; every time they are asked, as nothing is kept
            of clients that never train
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED
from archipelago.strategies.clustering_rules import AgglomerativeOptions
from archipelago.strategies.descriptors import PARTS
from archipelago.strategies.distances import DISTANCES
from archipelago.strategies.expectations import SITUATIONS, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.one_shot import OneShot
from archipelago.strategies.references import Indices


@dataclass
class FedClustOptions:
    """`fedclust.cut=...`"""

    features: str = setting("classifier", "what is clustered of a model", choices=PARTS)
    linkage: str = setting(
        "average", "distance of two clusters", choices=("average", "complete", "single", "ward")
    )
    cut: float | None = setting(
        None, "lambda: merge clusters up to this distance; null: until `clusters` are left", at_least=0
    )
    distance: str = setting("euclidean", "how far apart two layers are", choices=DISTANCES)
    clustering: str = setting("agglomerative", "clustering rule (see `list`), or an import path")


@METHODS.register(
    "fedclust",
    "hierarchical clusters of final layers, once, in the first round (Islam et al. 2024)",
    label="FedClust",
)
class FedClust(OneShot):
    """A local training from theta^0, one clustering of final layers, FedAvg in every cluster."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known("cost", "participation", "all clients are asked in the first round", limit=6.0),
            Known(
                "groups",
                tuple(name for name in SITUATIONS if name != "dirichlet"),
                "final layers after one training tell classes apart, not rotations",
                limit=-0.06,
            ),
        ),
    )

    Options = FedClustOptions

    def round(self, fleet: FleetView) -> None:
        super().round(fleet if self.divided else fleet.everyone)

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """Cluster the final layers, the first time."""
        if self.divided or not theta.arrived.any():
            return c
        arrived = theta.arrived
        self.divide(theta.ids[arrived], theta.features(self.options.features)[arrived].astype(np.float64))
        assert self.assignment is not None
        return np.where(arrived, self.assignment[theta.ids], UNASSIGNED)

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster whose final layers are nearest to what the client's becomes from theta^0."""
        first = fleet.initial(1)[0]
        theta = fleet.train(start=first, slot="new client", fresh=True, compared=False)
        found = np.zeros(len(fleet.ids), np.int64)
        if theta.arrived.any():
            points = theta.features(self.options.features)[theta.arrived].astype(np.float64)
            found[theta.arrived] = self.nearest(points)
        return found

    def rule_options(self) -> AgglomerativeOptions:
        return AgglomerativeOptions(self.options.linkage, self.options.cut)
