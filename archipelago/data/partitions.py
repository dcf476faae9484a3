"""Partitions: which client holds which samples, as pure functions of labels, settings and a generator.

    partitions_core.py      types, registry, options that several share
    partitions_dealing.py   how samples are dealt out, once it is known how many
    partitions_labels.py    IID, quantity skew, Dirichlet and n-class, client-wise and cluster-wise
    partitions_mixture.py   FedSoft's mixtures of sources; natural owners
    partitions_levels.py    FeMAM's balanced Dirichlet, overlapping clusters and nested levels
    partitions_fedbase.py   the published protocol of the CAM paper and the thesis (compat=fedbase)

A partition of your own is one file, here `my_partition.py`:

    from dataclasses import dataclass

    import numpy as np

    from archipelago.core.settings import PartitionSettings, setting
    from archipelago.data import Labels, Partition, hand_out, partition

    @dataclass
    class StripeOptions:
        stripes: int = setting(2, "stripes: groups of clients that take turns with the classes", at_least=1)

    @partition("stripes", "class c goes to the clients of group c modulo stripes", label="Stripes", needs_classes=True)
    def stripes(labels: Labels, settings: PartitionSettings, options: StripeOptions, clients: int,
                rng: np.random.Generator) -> Partition:
        groups = np.arange(clients) % options.stripes
        counts = np.zeros((len(labels.totals), clients), dtype=np.int64)   # samples of each class for each client
        for c, total in enumerate(labels.totals):
            members = np.flatnonzero(groups == c % options.stripes)
            counts[c, members] = total // len(members)
        return hand_out(labels, counts, rng, groups=groups)

`partition=my_partition.stripes partition.stripes=3` runs it, in this process, on Ray, in a sweep and after `resume`;
so do `plugins=[my_partition] partition=stripes`. `settings` has what concerns all partitions (`partition.min_size`,
...), `options` what this one declares, as the type of that parameter (leave the type out where there are none).
Without the decorator the import path works too. The decorator adds a name, a label and what the platform should know:
see `partition`.
"""

from __future__ import annotations

from archipelago.data import partitions_labels, partitions_levels, partitions_mixture
from archipelago.data.partitions_core import PARTITIONS, Labels, Partition, Partitioner, partition
from archipelago.data.partitions_dealing import blocks, hand_out

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
