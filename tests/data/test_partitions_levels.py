"""FeMAM's partitions: nested levels, overlapping clusters, balanced sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.data import Labels
from tests.support.errors import Mistake, mistake, refused
from tests.support.partitions import checked, divergence, divide, labels_of, table

seeds = st.integers(0, 2**31)
CIFAR = {"259": ([2, 5, 9], [19, 7, 3], 29), "3611": ([3, 6, 11], [14, 6, 2], 22)}
TINY = {"471": ([4, 13, 21], [20, 6, 2], 28), "667": ([9, 15, 22], [9, 5, 2], 16)}


@pytest.mark.parametrize("name", [*CIFAR, *TINY])
def test_paper_s_levels(name: str) -> None:
    groups, classes, own = {**CIFAR, **TINY}[name]
    total = 100 if name in CIFAR else 200
    labels = labels_of([500] * total, [100] * total)
    made = divide("multilevel", labels, 50, level_groups=groups, level_classes=classes)
    held = table(labels.train, made.train, total) > 0
    assert (held.sum(axis=0) == own).all()  # 29, 22, 28 and 16 classes per client
    assert np.concatenate(made.train).size == 500 * total
    assert np.array_equal(held, table(labels.test, made.test, total) > 0)


@checked
@given(seeds)
def test_levels_are_nested_and_own_classes_of_their_own(seed: int) -> None:
    labels = labels_of([200] * 20, [60] * 20)
    made = divide("multilevel", labels, 18, seed, level_groups=[2, 4, 5], level_classes=[2, 1, 2])
    assert made.levels is not None and made.groups is not None
    assert made.levels.shape == (3, 18)
    assert np.array_equal(made.levels[-1], made.groups)
    assert [int(level.max()) + 1 for level in made.levels] == [2, 4, 5]
    assert np.bincount(made.groups).min() >= 2
    for coarse, fine in zip(made.levels, made.levels[1:], strict=False):
        assert (np.diff(coarse) >= 0).all() and (np.diff(fine) >= 0).all()
        assert all(len(set(coarse[fine == group])) == 1 for group in range(int(fine.max()) + 1))
    held = table(labels.train, made.train, 20) > 0
    for level, (groups, own) in enumerate(zip([2, 4, 5], [2, 1, 2], strict=True)):
        # Classes that all clients of a group hold and nobody else does: its own, and those of a finer or
        # coarser level whose group has just these clients.
        for group in range(groups):
            members = made.levels[level] == group
            alone = held[:, members].all(axis=1) & ~held[:, ~members].any(axis=1)
            assert alone.sum() >= own
    counts = table(labels.train, made.train, 20)
    shares = counts / counts.sum(axis=0)
    for level in made.levels:
        between, within = divergence(shares, level)
        assert between > within + 0.1
    # Clients of one coarse group have more in common than others, also where their fine groups differ.
    apart = 0.5 * np.abs(shares[:, :, None] - shares[:, None, :]).sum(axis=0)
    coarse, fine = (level[:, None] == level[None, :] for level in (made.levels[0], made.levels[-1]))
    if (coarse & ~fine).any():
        assert apart[coarse & ~fine].mean() < apart[~coarse].mean()


@checked
@given(seeds, st.integers(3, 9))
def test_clusters_of_dealt_classes(seed: int, classes: int) -> None:
    labels = labels_of([300] * 10, [100] * 10)
    made = divide("femam_cluster", labels, 20, seed, groups=5, classes=classes)
    assert made.groups is not None
    held = table(labels.train, made.train, 10) > 0
    sizes = np.bincount(made.groups)
    assert len(sizes) == 5 and sizes.min() >= 2
    for group in range(5):
        members = held[:, made.groups == group]
        assert (members == members[:, :1]).all() and members[:, 0].sum() == classes
    holders = np.stack([held[:, made.groups == group][:, 0] for group in range(5)]).sum(axis=0)
    assert holders.max() - holders.min() <= 2  # a deck deals every class about equally often
    assert np.concatenate(made.train).size == 3000


def test_sizes_of_clusters_differ() -> None:
    labels = labels_of([300] * 10, [100] * 10)
    spreads = [
        np.ptp(np.bincount(divide("femam_cluster", labels, 50, s, groups=5, classes=3).groups))
        for s in range(8)
    ]
    assert max(spreads) >= 5
    skewed = divide("femam_cluster", labels, 20, groups=2, group_sizes=[5, 15], classes=6)
    assert np.bincount(skewed.groups).tolist() == [5, 15]


@checked
@given(seeds)
def test_balanced_clients_do_not_grow_beyond_an_even_share_and_a_class(seed: int) -> None:
    labels = labels_of([200] * 10, [80] * 10)
    balanced = [len(part) for part in divide("balanced_dirichlet", labels, 10, seed, alpha=0.1).train]
    plain = [len(part) for part in divide("dirichlet", labels, 10, seed, alpha=0.1).train]
    assert sum(balanced) == sum(plain) == 2000
    assert max(balanced) <= 200 + 200  # below an even share before its last class
    assert np.std(balanced) <= np.std(plain) + 30


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"level_groups": []}, mistake("unequal-lengths")),
        ({"level_groups": [2, 4], "level_classes": [1]}, mistake("unequal-lengths")),
        ({"level_groups": [4, 2]}, mistake("out-of-range", setting="partition.level_groups")),
        ({"level_groups": [2, 9]}, mistake("out-of-range", setting="partition.level_groups")),
        ({"level_groups": [2, 4], "level_classes": [2, 2]}, mistake("too-many", given=12, most=10)),
    ],
)
def test_impossible_levels_are_sentences(changes: dict[str, list[int]], sentence: Mistake) -> None:
    with sentence():
        divide("multilevel", labels_of([100] * 10, [30] * 10), 16, **changes)


def test_impossible_clusters_are_sentences() -> None:
    labels = labels_of([100] * 4, [30] * 4)
    with refused("too-few-clients", says="10"):
        divide("femam_cluster", labels, 9, groups=5)
    with refused("too-few-samples", partition="femam_cluster"):
        divide("femam_cluster", labels, 8, groups=4, classes=1, min_size=49)
    with refused("too-many", most=4):
        divide("femam_cluster", labels, 8, groups=4, classes=5)


@pytest.mark.parametrize("name", ["cluster_dirichlet", "cluster_n_class"])
def test_skewed_groups(name: str) -> None:
    sizes = [10, 10, 10, 10, 10, 20, 30, 30, 70]
    labels = Labels("large", np.arange(50_000) % 10, np.arange(10_000) % 10, 10)
    made = divide(name, labels, 200, group_sizes=sizes, classes=3)
    assert made.groups is not None
    assert np.bincount(made.groups).tolist() == sizes
    assert np.concatenate(made.train).size == 50_000
    # A large group holds more than a small one: data goes by clients.
    held = np.bincount(made.groups, weights=[len(part) for part in made.train])
    assert held[8] > 2 * held[:5].mean()
    with refused("does-not-add-up", clients=190, says=("200", "clients=190", "clients=200")):
        divide(name, labels, 190, group_sizes=sizes, classes=3)
