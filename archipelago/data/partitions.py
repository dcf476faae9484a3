"""Partitions: which client holds which samples, as pure functions of labels, settings and a generator.

    partitions_core.py      types, registry, how samples are dealt out
    partitions_labels.py    IID, quantity skew, Dirichlet and n-class, client-wise and cluster-wise
    partitions_mixture.py   FedSoft's mixtures of sources; natural owners
    partitions_levels.py    FeMAM's balanced Dirichlet, overlapping clusters and nested levels
    partitions_fedbase.py   the published protocol of the CAM paper and the thesis (compat=fedbase)

A partition of your own is one decorated function:

    @partition("mine", "what it is, in one line", needs_classes=True)
    def mine(labels: Labels, settings: PartitionSettings, clients: int, rng: Generator) -> Partition:
        ...
        return hand_out(labels, counts, rng)     # counts: (classes, clients)
"""

from __future__ import annotations

from archipelago.data import partitions_labels, partitions_levels, partitions_mixture
from archipelago.data.partitions_core import (
    PARTITIONS,
    Labels,
    Partition,
    Partitioner,
    blocks,
    hand_out,
    partition,
)

__all__ = [
    "PARTITIONS",
    "Labels",
    "Partition",
    "Partitioner",
    "blocks",
    "hand_out",
    "partition",
    "partitions_labels",
    "partitions_levels",
    "partitions_mixture",
]
