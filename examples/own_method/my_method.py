"""Sticky IFCA: a client changes its cluster only for one that is clearly better. A template for a method of your own.

    theta_k   self.clusters[k]        c_i   the cluster of client i        L   mean loss on the client's training data

    c_i  <-  argmin_k L(theta_k, D_i)   if that is better than L(theta_{c_i}, D_i) by more than the share `margin`
    theta_k  <-  the mean of the models that clients of cluster k trained, as in FedAvg

IFCA is the special case margin = 0. Copy this file, rename it, change it; nothing else in the platform has to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels, lowest
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Indices


@dataclass
class StickyOptions:
    """`sticky.margin=0.2`: settings of this method, checked and listed like the platform's own."""

    margin: float = setting(0.1, "share by which another cluster must be better", at_least=0, below=1)


@METHODS.register(
    "sticky", "IFCA whose clients change only for a clearly better cluster", label="Sticky IFCA"
)
class Sticky(ClusteredModels):
    """Assign by loss with a margin, then FedAvg inside each cluster (inherited)."""

    Options = StickyOptions

    def expect(self, fleet: FleetView) -> Indices:
        """The cluster that each client of this round trains under."""
        losses = fleet.losses(self.clusters, on_top_of=self.underlay)  # (clients, K)
        best = lowest(losses)
        assert self.assignment is not None
        before = self.assignment[fleet.ids]
        known = np.flatnonzero(before != UNASSIGNED)
        stay, move = losses[known, before[known]], losses[known, best[known]]
        loyal = known[move >= (1 - self.options.margin) * stay]
        chosen = best.copy()
        chosen[loyal] = before[loyal]
        self.report["stayed"] = int((chosen != best).sum())  # a column of metrics.csv
        return chosen
