"""RR-Cluster: clients moved at random, so that every cluster's mean is of at least B of them and needs less noise.

Yang, Hu, Kim, Li, "Differentially Private Federated Clustering with Random Rebalancing", arXiv:2508.06183, 2025.

    f(i)   the cluster that client i chose      f'(i)   the one that it trains for in this round      B   `min_size`

With client-level noise (`update=[clip,gaussian]`) what a mean of k clients hides grows with k, so the smallest cluster
decides on epsilon. Clusters of fewer than B clients get clients drawn at random from those with more than B: less noise
for the same epsilon, at the price of a few updates that belong elsewhere.

Readings

What the paper is read from
    here    its abstract and summaries of it: neither the full text nor released code was at hand
Who is moved
    paper   clients drawn at random from clusters with more than B
    here    one by one, each time any client of a cluster that still has more than B, to the lowest cluster with fewer
What a moved client does
    paper   trains for the cluster that it is given
    here    the same where clients choose by loss; where models are clustered after training, its model is averaged
            there. It predicts with the cluster that it chose
Too few participants for B everywhere
    here    B is then what they allow, participants / clusters rounded down, and the run says so
Noise
    paper   N(0, sigma^2) on each mean, for a sensitivity of S / B
    here    `update`'s: on every upload; epsilon is counted by the clients that are really behind the smallest mean.
            Choices of clusters by loss are not covered, as everywhere here
    option  update.noise
Bases whose server looks at single uploads (FeSEM, WeCFL, CFL, ...)
    here    work, and gain no privacy: epsilon says so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import ClusteredModels, Strategy
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Indices


@dataclass
class RRClusterOptions:
    """`rr_cluster.min_size=...`"""

    min_size: int = setting(3, "B: clients that every cluster's mean has at least", at_least=1)


@ADDONS.register(
    "rr_cluster", "clients move at random so that no cluster is small (Yang et al. 2025)", label="RR-Cluster"
)
class RRCluster(Addon[ClusteredModels]):
    """Random rebalancing of the clusters that a round averages."""

    expects = Expectations(
        cost=Cost(),
        known=(
            Known("accuracy", ALL, "moved clients train models that are not theirs", limit=0.1),
            Known("groups", "participation", "of four clients that take part, many are moved", limit=-0.06),
            *(
                Known(
                    check,
                    "twice_clusters",
                    "of five clients that a cluster has, three train for it at least",
                    limit,
                )
                for check, limit in (("groups", 0.7), ("oscillation", 0.09), ("progress", 0.06))
            ),
        ),
    )

    Options = RRClusterOptions
    takes_round = True

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if not issubclass(base, ClusteredModels):
            return "it moves clients between clusters, which this base does not have."
        return None

    def round(self, base: ClusteredModels, fleet: FleetView) -> None:
        c = base.expect(fleet)  # f
        given = self.rebalanced(base, c) if base.by_loss else c
        theta = base.train(fleet, given)
        if base.by_loss:
            settled = base.settle(fleet, theta, given)
            c, given = np.where(settled == given, c, settled), settled  # a base may split clusters here (CFL)
        else:
            c = base.settle(fleet, theta, c)
            given = self.rebalanced(base, c)
        base.update(fleet, theta, given)  # the means of f'
        base.assign(fleet, c)

    def rebalanced(self, base: ClusteredModels, c: Indices) -> Indices:
        """f': every cluster has at least B of this round's clients, as far as there are enough."""
        known = int((c >= 0).sum())
        size = min(self.options.min_size, known // base.K)
        if size < self.options.min_size:
            base.events.append(
                f"{known} clients are too few for rr_cluster.min_size={self.options.min_size} in {base.K} clusters: "
                f"every cluster gets {size}."
            )
        rng = generator(self.context.seed, "random rebalancing", round=base.number)
        found = rebalanced(c, base.K, size, rng)
        base.report["rebalanced"] = int((found != c).sum())
        return found


def rebalanced(c: Indices, clusters: int, size: int, rng: np.random.Generator) -> Indices:
    """Move clients, drawn at random from clusters with more than `size`, until none has fewer.

    >>> moved = rebalanced(np.array([0, 0, 0, 0, 1]), 2, 2, np.random.default_rng(0))
    >>> np.bincount(moved).tolist(), int(moved[4])
    ([3, 2], 1)
    """
    found = c.copy()
    for k in range(clusters):
        while (found == k).sum() < size:
            sizes = np.bincount(found[found >= 0], minlength=clusters)
            pool = np.flatnonzero((found >= 0) & (sizes[np.maximum(found, 0)] > size))
            found[rng.choice(pool)] = k
    return found
