"""Small labelled data sets, and what partitions make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings

from archipelago.core.plugins import is_ours
from archipelago.core.randomness import generator
from archipelago.data import PARTITIONS, Labels, Partition
from tests.support.settings import partition_settings

checked = settings(deadline=None, derandomize=True, database=None, max_examples=40)


def built_in_partitions() -> set[str]:
    """The platform's own partitions, whatever benchmarks and tests of this process have added to them."""
    own = {name for name, entry in PARTITIONS.items() if is_ours(entry.value.split.__module__)}
    assert "iid" in own
    return own


def labels_of(train: list[int], test: list[int]) -> Labels:
    """`train[c]` training and `test[c]` test samples of class c, in a fixed jumble."""
    shuffle = np.random.default_rng(0).permutation
    parts = (shuffle(np.repeat(np.arange(len(sizes)), sizes)) for sizes in (train, test))
    return Labels("jumble", *parts, classes=len(train))


def divide(name: str, labels: Labels, clients: int, seed: int = 0, **changes: Any) -> Partition:
    chosen = partition_settings(name=name, **changes)
    return PARTITIONS.find(name)(labels, chosen, clients, generator(seed, "test"))


def table(labels: Any, parts: tuple[Any, ...], classes: int) -> Any:
    """How many samples of each class each client holds: (classes, clients)."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts], axis=1)


def divergence(shares: Any, groups: Any) -> tuple[float, float]:
    """Mean total variation distance of label distributions: between groups, within groups."""
    distance = 0.5 * np.abs(shares[:, :, None] - shares[:, None, :]).sum(axis=0)
    same = groups[:, None] == groups[None, :]
    apart = ~np.eye(len(groups), dtype=bool)
    return float(distance[~same].mean()), float(distance[same & apart].mean())
