from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import PartitionSettings
from archipelago.data import PARTITIONS, Labels, Partition, Partitioner, partitions_labels
from archipelago.data.partitions_dealing import matching_test_counts
from tests.support.errors import Mistake, mistake, refused
from tests.support.partitions import checked, divergence, divide, labels_of, table

BY_CLASS = (
    *("iid", "quantity", "dirichlet", "cluster_dirichlet", "n_class", "cluster_n_class"),
    *("balanced_dirichlet", "femam_cluster", "multilevel"),
)
seeds = st.integers(0, 2**31)


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, Labels, int, dict[str, Any]]:
    """Any partition of any small labelled data set that is large enough for its clients."""
    name = draw(st.sampled_from(BY_CLASS))
    classes = draw(st.integers(3, 8))
    clients = draw(st.integers(1, 10))
    train = [draw(st.integers(60, 120)) for _ in range(classes)]
    test = [draw(st.integers(10, 40)) for _ in range(classes)]
    changes: dict[str, Any] = {"min_size": draw(st.integers(1, 6))}
    if "dirichlet" in name:
        changes |= {"alpha": 10 ** draw(st.floats(-1, 2)), "alpha_within": 10 ** draw(st.floats(0, 2))}
    if "n_class" in name:
        changes["classes"] = draw(st.integers(1, classes))
        changes["classes_within"] = draw(st.integers(1, changes["classes"]))
    changes["groups"] = draw(st.integers(1, clients))
    if name in ("femam_cluster", "multilevel"):
        clients = draw(st.integers(4, 10))
        changes |= {"groups": draw(st.integers(1, clients // 2)), "alpha_within": 10 ** draw(st.floats(1, 2))}
        changes["classes"] = draw(st.integers(1, classes))
        fine = draw(st.integers(1, min(classes - 1, clients // 2)))
        own = draw(st.integers(1, (classes - 1) // fine))
        coarse = draw(st.integers(1, min(fine, classes - own * fine)))
        changes |= {"level_groups": [coarse, fine], "level_classes": [1, own]}
    return name, labels_of(train, test), clients, changes


@checked
@given(problems(), seeds)
def test_what_every_partition_keeps(problem: tuple[str, Labels, int, dict[str, Any]], seed: int) -> None:
    name, labels, clients, changes = problem
    made = divide(name, labels, clients, seed, **changes)
    assert len(made.train) == len(made.test) == clients
    train, test = (
        table(*part, labels.classes) for part in ((labels.train, made.train), (labels.test, made.test))
    )
    for parts in (made.train, made.test):  # every index at most once
        together = np.concatenate(parts)
        assert len(np.unique(together)) == len(together)
        assert all((np.diff(part) > 0).all() for part in parts)
    assert train.sum(axis=0).min() >= changes["min_size"]
    assert test.sum(axis=0).min() >= 1
    # Label supports: never tested on what was not trained on; tested on all of it where counts allow.
    assert not ((test > 0) & (train == 0)).any()
    owners = (train > 0).sum(axis=1)
    allowed = np.bincount(labels.test, minlength=labels.classes) >= owners
    assert ((test > 0) == (train > 0))[allowed].all()
    # Loss-free: a class that anybody holds is used up; only n_class may leave a class to nobody.
    for counts, held in ((train, labels.train), (test, labels.test)):
        totals = np.bincount(held, minlength=labels.classes)
        assert (counts.sum(axis=1)[owners > 0] == totals[owners > 0]).all()
    if name == "multilevel":
        levels = zip(changes["level_groups"], changes["level_classes"], strict=True)
        assert (owners > 0).sum() == sum(groups * each for groups, each in levels)
    dealt = {"n_class": clients, "femam_cluster": changes["groups"], "cluster_n_class": 0, "multilevel": 0}
    if dealt.get(name, labels.classes) * changes.get("classes", 1) >= labels.classes:
        assert (owners > 0).all()


@checked
@given(problems(), seeds)
def test_same_seed_same_bytes_and_another_seed_another_partition(
    problem: tuple[str, Labels, int, dict[str, Any]], seed: int
) -> None:
    name, labels, clients, changes = problem
    once, again = (divide(name, labels, clients, seed, **changes) for _ in range(2))
    for part in ("train", "test"):
        assert [a.tobytes() for a in getattr(once, part)] == [a.tobytes() for a in getattr(again, part)]
    if clients > 1:  # two clients of one class each may well draw the same two again, but not all the time
        others = (divide(name, labels, clients, seed + change, **changes) for change in range(1, 9))
        assert any(
            a.tobytes() != b.tobytes()
            for other in others
            for a, b in zip(once.train, other.train, strict=True)
        )


@checked
@given(st.data())
def test_test_samples_follow_the_proportions_of_training_samples(data: st.DataObject) -> None:
    classes, clients = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    train = np.array([[data.draw(st.integers(0, 9)) for _ in range(clients)] for _ in range(classes)])
    train[0] += 1  # a client without training samples does not occur
    totals = np.array([data.draw(st.integers(30, 200)) for _ in range(classes)])
    test = matching_test_counts(train, totals)
    quotas = totals[:, None] * train / np.maximum(train.sum(axis=1, keepdims=True), 1)
    for row in range(classes):
        if train[row].any():
            assert test[row].sum() == totals[row]
        if (
            (quotas[row] >= 1) | (train[row] == 0)
        ).all():  # no floor is in the way: exactly largest remainder
            assert (np.abs(test[row] - quotas[row]) < 1).all()


def test_proportions_by_hand() -> None:
    # Class 0: owners 6, 3, 1 of ten training samples, five test samples: quotas 3, 1.5, 0.5. Rounded down
    # 3, 1, 0; the tie of the halves goes to the client with fewest so far (all none: the second), and the
    # third still gets the one each owner is due, from what the first (2 above one) and second (1) can spare.
    # Class 1: the third alone.
    test = matching_test_counts(np.array([[6, 3, 1], [0, 0, 4]]), np.array([5, 2]))
    assert test.tolist() == [[2, 2, 1], [0, 0, 2]]


def test_scarce_test_samples_go_first_to_those_without_any() -> None:
    # Two test samples of class 0 for three owners. By proportion the first would take both; but the third
    # owns nothing else, and the first and second have class 1.
    train = np.array([[90, 5, 5], [10, 10, 0]])
    test = matching_test_counts(train, np.array([2, 4]))
    assert test[:, 2].tolist() == [1, 0]
    assert (test[1] > 0).tolist() == [True, True, False]
    # One sample for two clients that have nothing else is a sentence.
    with refused("too-few-samples"):
        matching_test_counts(np.array([[5, 5]]), np.array([1]))


def test_maximum_flow_is_found_where_proportions_would_leave_somebody_out() -> None:
    # Both classes have fewer test samples than owners, and together one for each of five clients. By
    # proportion clients 0, 2 and 4 would share class 0; but client 1 has nothing else, so one of them must
    # make do with class 1, of which client 3 needs the other.
    test = matching_test_counts(np.array([[50, 1, 50, 0, 50], [1, 0, 1, 9, 1]]), np.array([3, 2]))
    assert test.sum(axis=0).tolist() == [1] * 5
    assert test.sum(axis=1).tolist() == [3, 2]
    assert (test[0, 1], test[1, 3]) == (1, 1)


@checked
@given(seeds, st.integers(1, 30))
def test_iid_sizes_are_even_and_classes_mixed(seed: int, clients: int) -> None:
    labels = labels_of([200, 300, 100], [50, 50, 50])
    made = divide("iid", labels, clients, seed, min_size=1)
    sizes = [len(part) for part in made.train]
    assert max(sizes) - min(sizes) <= 1
    assert made.groups is None
    if clients <= 5:
        shares = table(labels.train, made.train, 3) / np.array(sizes)
        assert np.abs(shares - np.array([[1 / 3], [1 / 2], [1 / 6]])).max() < 0.2


@checked
@given(seeds, st.integers(1, 4))
def test_n_class_clients_hold_exactly_n_classes(seed: int, classes: int) -> None:
    labels = labels_of([100] * 6, [30] * 6)
    made = divide("n_class", labels, 12, seed, classes=classes)
    for parts, held in ((made.train, labels.train), (made.test, labels.test)):
        assert ((table(held, parts, 6) > 0).sum(axis=0) == classes).all()
    # Evenly: of one class, no client holds two samples more than another.
    counts = table(labels.train, made.train, 6)
    assert all(row[row > 0].max() - row[row > 0].min() <= 1 for row in counts)
    assert np.concatenate(made.train).size == 600


@checked
@given(seeds)
def test_cluster_n_class_groups_hold_their_classes_and_clients_some_of_those(seed: int) -> None:
    labels = labels_of([200] * 9, [60] * 9)
    made = divide("cluster_n_class", labels, 12, seed, groups=3, classes=3, classes_within=2)
    held = table(labels.train, made.train, 9) > 0
    assert (held.sum(axis=0) == 2).all()
    assert made.groups is not None
    assert made.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for group in range(3):
        assert held[:, made.groups == group].any(axis=1).sum() == 3
    assert np.concatenate(made.train).size == 1800  # three groups of three classes can hold all nine


def test_groups_are_consecutive_and_as_even_as_possible() -> None:
    made = divide("cluster_dirichlet", labels_of([100] * 4, [40] * 4), 7, groups=3, alpha=5.0)
    assert made.groups is not None
    assert made.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]


@checked
@given(seeds, st.sampled_from(["cluster_dirichlet", "cluster_n_class", "femam_cluster"]))
def test_groups_differ_more_between_than_within(seed: int, name: str) -> None:
    labels = labels_of([300] * 10, [80] * 10)
    made = divide(name, labels, 20, seed, groups=4, classes=3, classes_within=2)
    counts = table(labels.train, made.train, 10)
    between, within = divergence(counts / counts.sum(axis=0), made.groups)
    assert between > within + 0.1


def test_groups_are_not_lopsided_where_drawing_again_can_help() -> None:
    labels = labels_of([300] * 10, [80] * 10)
    for seed in range(20):
        made = divide("cluster_dirichlet", labels, 20, seed, groups=4, alpha=0.1)
        sizes = np.bincount(made.groups, weights=[len(part) for part in made.train])
        assert sizes.min() >= 0.3 * 3000 / 4 - 10  # each of ten classes is rounded


def test_which_samples_of_a_class_a_client_gets_is_random() -> None:
    labels = labels_of([400, 400], [100, 100])
    for parts, held in (("train", labels.train), ("test", labels.test)):
        first = getattr(divide("n_class", labels, 2, classes=2), parts)[0]
        ranks = np.flatnonzero(np.isin(np.flatnonzero(held == 0), first)) / (held == 0).sum()
        assert ranks.mean() == pytest.approx(0.5, abs=0.1)  # contiguous slices would have 0.25


def test_smaller_alpha_is_more_skewed() -> None:
    labels = labels_of([500] * 10, [200] * 10)
    largest = []
    for alpha in (0.05, 0.5, 5.0, 500.0):
        counts = table(labels.train, divide("dirichlet", labels, 10, alpha=alpha).train, 10)
        largest.append((counts.max(axis=0) / counts.sum(axis=0)).mean())
    assert largest == sorted(largest, reverse=True)
    assert largest[0] > 0.5
    assert largest[-1] < 0.15


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 1e6, 1e308])
def test_extreme_concentrations_neither_lose_samples_nor_fail(alpha: float) -> None:
    labels = labels_of([100] * 5, [50] * 5)
    for name in ("dirichlet", "cluster_dirichlet"):
        made = divide(name, labels, 8, alpha=alpha, alpha_within=alpha, groups=2)
        assert np.concatenate(made.train).size == 500
        assert min(len(part) for part in made.train) >= 4


def test_too_small_clients_are_topped_up_and_it_is_said() -> None:
    labels = labels_of([300] * 4, [100] * 4)
    made = divide("dirichlet", labels, 40, alpha=0.01, min_size=10)
    counts = table(labels.train, made.train, 4)
    assert counts.sum(axis=0).min() == 10
    assert counts.sum() == 1200
    assert "clients drew fewer than partition.min_size=10" in made.notes[0]
    # What was given to them follows what they drew: still one class, not a bit of each.
    assert np.median((counts > 0).sum(axis=0)) == 1


def test_topping_up_by_hand() -> None:
    # Client 0 can spare 8 of 12, as 4 and 4; client 1 lacks 3 and drew more of class 1, client 2 lacks 4 and
    # drew more of class 0. Client 3 is large enough and keeps its four.
    counts = np.array([[6, 0, 0, 4], [6, 1, 0, 0]])
    shares = np.array([[0.6, 0.0, 0.02, 0.38], [0.9, 0.09, 0.01, 0.0]])
    topped = partitions_labels._top_up(counts, shares, 4, generator(0, "test"))
    assert topped.tolist() == [[2, 0, 4, 4], [3, 4, 0, 0]]


def test_nothing_is_moved_where_redrawing_helps() -> None:
    labels = labels_of([150] * 10, [40] * 10)
    assert all(divide("dirichlet", labels, 20, seed, alpha=0.1).notes == () for seed in range(5))


def test_redrawing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = 0
    original = partitions_labels.dirichlet_shares

    def counted(*arguments: Any) -> Any:
        nonlocal draws
        draws += 1
        return original(*arguments)

    monkeypatch.setattr(partitions_labels, "dirichlet_shares", counted)
    divide("dirichlet", labels_of([60] * 3, [30] * 3), 15, alpha=1e-9, min_size=12)  # 180 samples, all due
    assert 1 < draws <= partitions_labels.REDRAWS


def test_ten_thousand_clients_of_extreme_skew_end_in_a_partition_or_a_sentence() -> None:
    labels = Labels("large", np.arange(60_000) % 10, np.arange(10_000) % 10, classes=10)
    try:
        made = divide("dirichlet", labels, 10_000, alpha=0.01)
    except UserError as error:
        assert "clients" in str(error)
    else:
        assert min(len(part) for part in made.train) >= 4
    made = divide("dirichlet", labels, 10_000, alpha=0.1)
    assert np.concatenate(made.train).size == 60_000
    assert min(len(part) for part in made.train) == 4
    assert min(len(part) for part in made.test) == 1


def test_class_that_is_only_tested_is_left_out() -> None:
    labels = labels_of([50, 50, 0], [20, 20, 20])
    for name in ("iid", "dirichlet", "n_class"):
        made = divide(name, labels, 4, alpha=10.0, classes=2)
        assert set(labels.test[np.concatenate(made.test)]) == {0, 1}


def test_ground_truth_sources_go_to_clients_of_one_source_each() -> None:
    sources = np.arange(120) % 3
    labels = Labels("made", np.zeros(120), np.zeros(30), None, sources, sources[:30])
    made = divide("iid", labels, 6)
    assert made.groups is not None
    assert made.groups.tolist() == [0, 0, 1, 1, 2, 2]
    for group, train, test in zip(made.groups, made.train, made.test, strict=True):
        assert set(sources[train]) == set(sources[test]) == {group}
        assert (len(train), len(test)) == (20, 5)


def test_targets_without_classes_or_sources_are_divided_at_random() -> None:
    made = divide("iid", Labels("plain", np.zeros(50), np.zeros(10), None), 5)
    assert [len(part) for part in made.train] == [10] * 5
    assert [len(part) for part in made.test] == [2] * 5
    assert made.groups is None


@pytest.mark.parametrize(
    ("name", "clients", "changes", "sentence"),
    [
        (
            "iid",
            500,
            {},
            mistake("too-few-samples", clients=500, samples=400, says=("clients=500", "2000", "100")),
        ),
        (
            "iid",
            500,
            {"min_size": 1},
            mistake("too-few-samples", clients=500, samples=400),
        ),
        ("iid", 2, {"min_size": 401}, mistake("too-few-samples", samples=400, says="partition.min_size")),
        ("iid", 90, {}, mistake("too-few-samples", clients=90, samples=80, says="clients=90")),
        ("dirichlet", 60, {"min_size": 7}, mistake("too-few-samples", clients=60, samples=400, says="420")),
        (
            "n_class",
            4,
            {"classes": 5},
            mistake("too-many", setting="partition.classes", given=5, most=4, says="partition.classes=5"),
        ),
        (
            "cluster_n_class",
            4,
            {"classes": 5},
            mistake("too-many", setting="partition.classes", given=5, most=4, says="partition.classes=5"),
        ),
        (
            "cluster_n_class",
            4,
            {"classes": 2, "classes_within": 3},
            mistake("too-many", given=3, most=2, says="classes_within=3"),
        ),
        (
            "cluster_n_class",
            3,
            {},
            mistake("too-few-clients", clients=3, groups=4, says=("partition.groups=4", "clients=3")),
        ),
        (
            "cluster_dirichlet",
            3,
            {},
            mistake("too-few-clients", clients=3, groups=4, says=("partition.groups=4", "clients=3")),
        ),
        (
            "cluster_n_class",
            40,
            {"classes": 1, "classes_within": 1, "min_size": 10, "groups": 2},
            mistake("too-few-samples", partition="cluster_n_class", says=("partition=cluster_n_class", "40")),
        ),
    ],
)
def test_mistakes_are_sentences(name: str, clients: int, changes: dict[str, Any], sentence: Mistake) -> None:
    with sentence():
        divide(name, labels_of([100] * 4, [20] * 4), clients, **changes)


def test_more_owners_than_samples_of_a_class_is_refused() -> None:
    with refused("too-few-samples", partition="n_class", says="20"):
        divide("n_class", labels_of([3, 100], [20, 20]), 20, classes=2, min_size=1)


def test_ground_truth_sources_need_as_many_clients() -> None:
    sources = np.arange(40) % 4
    with refused("too-few-clients", sources=4, clients=3):
        divide("iid", Labels("made", np.zeros(40), np.zeros(40), None, sources, sources), 3)


@pytest.mark.parametrize("name", [name for name in BY_CLASS if name not in ("iid", "quantity")])
def test_class_partitions_of_regression_data_name_what_works(name: str) -> None:
    with refused("needs-classes", setting=f"partition={name}", says="partition=iid"):
        divide(name, Labels("made", np.zeros(100), np.zeros(100), None), 4)


def test_unknown_partition_points_at_the_nearest() -> None:
    with refused("unknown-name", kind="partition", name="dirichlett", nearest="dirichlet"):
        PARTITIONS.find("dirichlett")


def test_registered_partition_that_leaves_a_client_short_is_caught() -> None:
    lazy = Partitioner(
        "lazy", lambda *_: Partition((np.arange(5), np.arange(5, 6)), (np.arange(1), np.arange(1, 2))), False
    )
    with refused("too-few-samples", partition="lazy", clients=2, says="partition=lazy"):
        lazy(labels_of([10, 10], [5, 5]), PartitionSettings(), 2, generator(0, "test"))
