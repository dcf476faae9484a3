"""The published protocol, against what simulations of its rules came to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.core.randomness import generator
from archipelago.data import Labels
from archipelago.data.partitions_fedbase import _indicators, _proportions, _slices
from tests.support.errors import refused
from tests.support.partitions import checked, divide, labels_of, table

# As CIFAR-10: 5,000 training and 1,000 test samples of each of ten classes.
CIFAR = Labels("cifar", np.arange(50_000) % 10, np.arange(10_000) % 10, 10)


def test_client_wise_dirichlet_copies_a_quarter_of_the_clients() -> None:
    made = [divide("dirichlet", CIFAR, 200, seed, compat="fedbase", alpha=0.1) for seed in range(10)]
    for each in made:
        assert each.copy_of is not None
        for client in np.flatnonzero(each.copy_of >= 0):
            assert np.array_equal(each.train[client], each.train[each.copy_of[client]])
            assert each.copy_of[each.copy_of[client]] == -1
        assert min(len(test) for test in each.test) > 5
        assert f"{(each.copy_of >= 0).sum()} of 200 clients are copies of others" in each.notes[0]
    distinct = np.mean([(each.copy_of < 0).sum() for each in made])
    assert distinct == pytest.approx(146, abs=5)
    sizes = np.array([[len(part) for part in each.train] for each in made])
    assert np.median(sizes, axis=1).mean() == pytest.approx(185, abs=25)
    assert sizes.min(axis=1).mean() == pytest.approx(50, abs=2)
    assert sizes.sum(axis=1).mean() == pytest.approx(50_800, rel=0.05)
    classes = [(table(CIFAR.train, each.train, 10) > 0).sum(axis=0).mean() for each in made]
    assert np.mean(classes) == pytest.approx(1.7, abs=0.15)


def test_client_wise_n_class_has_no_copies() -> None:
    made = divide("n_class", CIFAR, 200, compat="fedbase", classes=2)
    assert made.copy_of is not None and (made.copy_of == -1).all()
    sizes = [len(part) for part in made.train]
    assert np.median(sizes) == pytest.approx(247, abs=6)
    assert sum(sizes) == pytest.approx(50_000, abs=300)  # up to rounding


@pytest.mark.parametrize(
    ("name", "changes", "median", "classes", "used"),
    [
        ("cluster_dirichlet", {"alpha": 0.1, "alpha_within": 10.0}, 194, 3.8, 44_400),
        ("cluster_n_class", {"classes": 3, "classes_within": 2}, 225, 2.0, 49_400),
    ],
)
def test_cluster_wise(
    name: str, changes: dict[str, float], median: float, classes: float, used: float
) -> None:
    made = [divide(name, CIFAR, 200, seed, compat="fedbase", groups=10, **changes) for seed in range(10)]
    sizes = np.array([[len(part) for part in each.train] for each in made])
    assert np.median(sizes, axis=1).mean() == pytest.approx(median, rel=0.08)
    assert sizes.sum(axis=1).mean() == pytest.approx(used, rel=0.04)
    held = [(table(CIFAR.train, each.train, 10) > 0).sum(axis=0).mean() for each in made]
    assert np.mean(held) == pytest.approx(classes, abs=0.3)
    groups = made[0].groups
    assert groups is not None and groups.tolist() == np.repeat(np.arange(10), 20).tolist()


@checked
@given(
    st.integers(0, 2**31),
    st.sampled_from(["dirichlet", "n_class", "cluster_dirichlet", "cluster_n_class"]),
    st.integers(2, 12),
    st.integers(3, 6),
)
def test_what_every_published_partition_keeps(seed: int, name: str, clients: int, classes: int) -> None:
    labels = labels_of([200] * classes, [80] * classes)
    changes = {"alpha": 1.0, "alpha_within": 10.0, "classes": 3, "classes_within": 2, "groups": 2}
    made = divide(name, labels, clients, seed, compat="fedbase", **changes)
    again = divide(name, labels, clients, seed, compat="fedbase", **changes)
    assert len(made.train) == len(made.test) == len(made.copy_of) == clients
    for one, other in zip((*made.train, *made.test), (*again.train, *again.test), strict=True):
        assert one.tobytes() == other.tobytes() and (np.diff(one) > 0).all()  # none twice at one client
    assert min(len(part) for part in made.test) > 5 and min(len(part) for part in made.train) > 0
    for client, of in enumerate(made.copy_of):
        assert of < client and (of < 0 or np.array_equal(made.test[client], made.test[of]))
    # Train and test have the same classes, up to those whose share rounds to nothing.
    held = [table(*part, classes) for part in ((labels.train, made.train), (labels.test, made.test))]
    few = 200 * 0.5 / 80 + 1  # training samples of a class, where half a test sample or less is rounded away
    assert not ((held[0] > few) & (held[1] == 0)).any() and not ((held[1] > 0) & (held[0] == 0)).any()


def test_slices_by_hand() -> None:
    # Eight samples of class 0 (positions 0, 2, ...), eight of class 1. Shares .31 and .5 of class 0 make 2.48 and 4:
    # two and four, in order; .0 and .06 of class 1 make 0 and .48: none.
    values = np.arange(16) % 2
    first, second = _slices(values, np.arange(16), np.array([0, 1]), np.array([[0.31, 0.5], [0.0, 0.06]]))
    assert first.tolist() == [0, 2]
    assert second.tolist() == [4, 6, 8, 10]
    # Halves go to the even number: 8 * .0625 = .5 makes none, 8 * .1875 = 1.5 makes two.
    first, second = _slices(values, np.arange(16), np.array([0]), np.array([[0.0625, 0.1875]]))
    assert (len(first), len(second)) == (0, 2)


def test_shares_of_picked_classes_by_hand() -> None:
    shares = _indicators(2, 3, 50, generator(0, "test"))
    assert ((shares > 0).sum(axis=0) == 2).all()
    assert np.allclose(shares.sum(axis=1), 1)
    assert all(len(set(row[row > 0])) == 1 for row in shares)


def test_what_the_protocol_cannot_do_is_a_sentence() -> None:
    small = labels_of([50] * 4, [10] * 4)
    with refused("too-few-samples", says=("150", "200")):
        divide("dirichlet", small, 150, compat="fedbase", alpha=1e6)
    with refused("incompatible", says=("partition=iid", "cluster_dirichlet", "n_class")):
        divide("iid", small, 3, compat="fedbase")
    with refused("needs-classes", setting="partition=dirichlet"):
        divide("dirichlet", Labels("made", np.zeros(100), np.zeros(100), None), 4, compat="fedbase")


def test_older_version_rounds_proportions() -> None:
    # Ten labels of 1,000 test samples: three decimals, so a share of .0005 or less is nothing.
    made = [divide("dirichlet", CIFAR, 200, seed, compat="fedbase-0.6.8", alpha=0.1) for seed in range(5)]
    assert "partition.compat=fedbase-0.6.8" in made[0].notes[0]
    distinct = np.mean([(each.copy_of < 0).sum() for each in made])
    assert distinct == pytest.approx(179, abs=5)
    sizes = np.array([[len(part) for part in each.train] for each in made])
    assert np.median(sizes, axis=1).mean() == pytest.approx(205, abs=25)
    assert sizes.sum(axis=1).mean() == pytest.approx(55_400, rel=0.05)
    classes = [(table(CIFAR.train, each.train, 10) > 0).sum(axis=0).mean() for each in made]
    assert np.mean(classes) == pytest.approx(3.6, abs=0.2)


def test_rounded_proportions_by_hand() -> None:
    drawn = generator(3, "test").dirichlet([2.0, 2.0, 2.0], size=1)
    for decimals in (1, 2):
        found = _proportions(2.0, 1, 3, decimals, generator(3, "test"))
        assert found.tolist() == np.round(drawn, decimals).tolist()
    assert (_proportions(2.0, 1, 3, None, generator(3, "test")) <= drawn).all()
    # Shares of .6, .5 and .1 of ten samples: 6, then the 4 that are left, then none.
    first, second, third = _slices(
        np.zeros(10, int), np.arange(10), np.array([0]), np.array([[0.6, 0.5, 0.1]])
    )
    assert (len(first), len(second), len(third)) == (6, 4, 0)
