"""IFCA (HypCluster): K cluster models; each client joins the one with the least loss on its data.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020; Mansour et al.,
"Three Approaches for Personalization with Applications to Federated Learning", 2020; thesis (3.1a), (3.1b).

    H_k   self.clusters[k]     r_i   c (cluster of client i)     L   mean loss on the client's training data

Readings: all K losses are taken on the same, full local training data; ties go to the lowest index; K
independent initialisations; the average inside a cluster is weighted as `weights` says (the paper's own code
is uniform); an empty cluster keeps its model; a client that has not taken part yet predicts with the cluster
of least loss.
"""

from __future__ import annotations

import numpy as np

from strategies.base import METHODS, UNASSIGNED, ClusteredModels, lowest
from strategies.interface import FleetView


@METHODS.register("ifca", "K cluster models, each client joins the one of least loss (Ghosh et al. 2020)")
class IFCA(ClusteredModels):
    """Alternate r_i = argmin_k L(H_k, D_i) and FedAvg inside each cluster."""

    def setup(self, fleet: FleetView) -> None:
        self.clusters = fleet.initial(self.K)
        self.assignment = np.full(self.clients, UNASSIGNED, np.int64)

    def round(self, fleet: FleetView) -> None:
        assert self.assignment is not None
        losses = fleet.losses(self.clusters)
        c = lowest(losses)  # (3.1a)
        theta = fleet.train(start=self.clusters[c])
        n = self.client_weights(fleet)
        self.clusters = theta.average(by=c, weights=n, clusters=self.K, otherwise=self.clusters)  # (3.1b)
        self.assignment = self.assignment.copy()
        self.assignment[fleet.ids] = c
        self.report["clustering_objective"] = float(np.average(losses[np.arange(len(c)), c], weights=n))
