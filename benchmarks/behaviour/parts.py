"""What situations need and the platform does not have: a small network with BatchNorm, one client with one class."""

from __future__ import annotations

import math

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from archipelago.core.registry import NoOptions
from archipelago.core.settings import PartitionSettings
from archipelago.data.partitions import Labels, Partition, hand_out, partition
from lightning_modules.networks import Network

ODD_CLIENT = 0  # who has samples of one class
ODD_CLASS = 3


class BatchNormMLP(Network):
    """Two hidden layers with BatchNorm under a classifier."""

    head = ("fc3",)

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(input_shape), 64)
        self.norm1 = nn.BatchNorm1d(64)
        self.fc2 = nn.Linear(64, 32)
        self.norm2 = nn.BatchNorm1d(32)
        self.fc3 = nn.Linear(32, outputs)

    def features(self, x: Tensor) -> Tensor:
        """What the classifier sees."""
        x = F.relu(self.norm1(self.fc1(x.flatten(1))))
        return F.relu(self.norm2(self.fc2(x)))


@partition(
    "odd_client", "random samples, evenly, but for one client with samples of one class", needs_classes=True
)
def odd_client(
    labels: Labels, settings: PartitionSettings, options: NoOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """As many samples for everyone; the odd client's are all of one class, the others share the rest."""
    each = len(labels.train) // clients
    counts = np.zeros((labels.classes or 1, clients), dtype=np.int64)
    samples = rng.permutation(len(labels.train))
    odd = samples[labels.train[samples] == ODD_CLASS][:each]
    rest = samples[~np.isin(samples, odd)]
    counts[ODD_CLASS, ODD_CLIENT] = len(odd)
    others = np.delete(np.arange(clients), ODD_CLIENT)
    np.add.at(counts, (labels.train[rest], others[np.arange(len(rest)) % len(others)]), 1)
    return hand_out(labels, counts, rng)
