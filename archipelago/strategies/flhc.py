"""FL+HC: some rounds of FedAvg, then hierarchical clustering of the clients' updates, then FedAvg inside each cluster.

Briggs, Fan, Andras, "Federated learning with hierarchical clustering of local updates to improve training on non-IID
data", IJCNN 2020 (arXiv:2004.11791), Algorithm 1.

    w     the one model, then self.clusters[c]     Delta w_k   what client k's training added to w
    n     `before`, rounds of FedAvg               T           `cut`, distance up to which clusters are merged

Readings

Released code
    here    none was found: what is here rests on the paper's abstract, algorithm and its descriptions by others
Where the hierarchy is cut
    paper   at a distance T, tuned for each data set and metric
    here    at `clusters` clusters; at a distance where one is given, and then at no more than `clusters`
    option  flhc.cut
Linkage and distance
    paper   average, complete, single, Ward; Manhattan, Euclidean, cosine
    here    Ward on Euclidean distances; there is no Manhattan distance here
    option  flhc.linkage, flhc.distance, flhc.clustering
Who is clustered
    paper   all clients train from w for it
    here    the same, also those that do not take part in that round; whoever does not arrive joins the cluster of
            least loss when it comes
What becomes of the models trained for it
    paper   only their updates are used, and clusters start from w
    here    they are a round of their clusters: averaged inside each, which costs no second training
Rounds of FedAvg before it
    paper   1 to 10
    here    3; in a shorter run the last round is the one that clusters
    option  flhc.before
New clients
    here    join the cluster of least loss: the paper says nothing about them
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED
from archipelago.strategies.clustering_rules import AgglomerativeOptions
from archipelago.strategies.descriptors import updates
from archipelago.strategies.distances import DISTANCES
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.one_shot import OneShot
from archipelago.strategies.references import Indices


@dataclass
class FLHCOptions:
    """`flhc.before=...`"""

    before: int = setting(3, "rounds of FedAvg before clients are clustered", at_least=0)
    linkage: str = setting(
        "ward", "distance of two clusters", choices=("ward", "average", "complete", "single")
    )
    cut: float | None = setting(
        None, "merge clusters up to this distance; null: until `clusters` are left", at_least=0
    )
    distance: str = setting("euclidean", "how far apart two updates are", choices=DISTANCES)
    clustering: str = setting("agglomerative", "clustering rule (see `list`), or an import path")


@METHODS.register(
    "flhc", "FedAvg, then hierarchical clusters of updates, once (Briggs et al. 2020)", label="FL+HC"
)
class FLHC(OneShot):
    """n rounds of FedAvg, one clustering of Delta w_k, FedAvg in every cluster."""

    expects = Expectations(
        cost=Cost(down=1, up=1, trainings=1),
        known=(
            Known(
                "groups",
                "stragglers",
                "updates of few steps are near each other, whatever the group",
                limit=0.3,
            ),
            Known("cost", "participation", "all clients are asked in the round that clusters", limit=6.0),
        ),
    )

    Options = FLHCOptions

    def round(self, fleet: FleetView) -> None:
        super().round(fleet.everyone if self.due else fleet)

    @property
    def due(self) -> bool:
        """Whether this round clusters the clients."""
        return not self.divided and self.number > min(self.options.before, self.context.rounds - 1)

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """Cluster the updates of this round, if it is the one."""
        if not self.due or not theta.arrived.any():
            return c
        arrived = theta.arrived
        self.divide(theta.ids[arrived], updates(theta, self.clusters, c, fleet.spec.parameters)[arrived])
        assert self.assignment is not None
        return np.where(arrived, self.assignment[theta.ids], UNASSIGNED)

    def rule_options(self) -> AgglomerativeOptions:
        return AgglomerativeOptions(self.options.linkage, self.options.cut)
