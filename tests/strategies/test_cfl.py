"""CFL, by hand, through three successive splits, by its identities, and on ground-truth groups."""

import itertools

import numpy as np
import pytest

from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.cfl import CFLOptions, bipartition, cosines
from archipelago.strategies.references import Models
from tests.support.experiments import checkpoint_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# y = w x with x = 1: client i pulls w by 0.2 (y_i - w) in a step of lr 0.1.
NOW = {"thresholds": "absolute", "first": 1, "min_size": 2}


def cfl_of(targets, clusters=4, start=0.0, **options):
    fleet = scalar_fleet([[(1.0, y)] for y in targets], lr=0.1)
    cfl = method_of("cfl", fleet, clusters=clusters, options={"cfl": CFLOptions(**{**NOW, **options})})
    cfl.base.clusters = Models(np.full((1, 1), start, np.float32))
    return cfl, fleet


def clusters_of(cfl):
    """Members of each cluster, as client ids."""
    return [np.flatnonzero(cfl.base.assignment == k).tolist() for k in range(cfl.base.K)]


def test_one_round_by_hand():
    # Updates from w = 0: 2, 2.2, -2, -1.8. Their mean 0.1 is short, the longest, 2.2, is not.
    cfl, fleet = cfl_of([10.0, 11.0, -10.0, -9.0], eps1=0.2, eps2=2.0)
    cfl.round(fleet, 1)
    assert cfl.report["mean_update"] == pytest.approx([0.1], rel=1e-5)
    assert cfl.report["longest_update"] == pytest.approx([2.2], rel=1e-5)
    # Cosines are +1 inside {0, 1} and {2, 3} and -1 across: each half is averaged on its own in the same round.
    assert cfl.base.K == 2 and clusters_of(cfl) == [[0, 1], [2, 3]]
    assert cfl.base.clusters.values.ravel().tolist() == pytest.approx([2.1, -1.9], rel=1e-6)
    assert cfl.events == [
        "Cluster 0 was split: 2 clients stay in it, 2 are cluster 1 (largest cosine of updates across: -1.00)."
    ]
    # Next round from 2.1 and -1.9: 2.1 + 0.2 (10.5 - 2.1) = 3.78 and -1.9 + 0.2 (-9.5 + 1.9) = -3.42.
    fleet.begin(2)
    cfl.round(fleet, 2)
    assert cfl.base.clusters.values.ravel().tolist() == pytest.approx([3.78, -3.42], rel=1e-6)


def test_each_condition_is_needed():
    targets = [10.0, 11.0, -10.0, -9.0]

    def clusters_after(clusters=4, round=1, **options):
        cfl, fleet = cfl_of(targets, clusters, **{"eps1": 0.2, "eps2": 2.0, **options})
        cfl.round(fleet, round)
        return cfl.base.K

    assert clusters_after() == 2
    assert clusters_after(eps1=0.05) == 1  # the mean update is longer
    assert clusters_after(eps2=2.5) == 1  # nobody's update is longer
    assert clusters_after(min_size=5) == 1
    assert clusters_after(first=2) == 1 and clusters_after(first=2, round=2) == 2
    assert clusters_after(clusters=1) == 1  # `clusters` is the most there may be
    assert clusters_after(gamma=1.0) == 2  # opposite updates: the separation is sqrt((1 + 1) / 2) = 1


def test_split_must_show_on_either_half_of_the_clients_samples():
    def clusters_after(samples, **options):
        fleet = scalar_fleet(samples, lr=0.1)
        options = {"cfl": CFLOptions(**{**NOW, "eps1": 0.5, "eps2": 0.0, **options})}
        cfl = method_of("cfl", fleet, clusters=2, options=options)
        cfl.base.clusters = Models(np.zeros((1, 1), np.float32))
        cfl.round(fleet, 1)
        return cfl.base.K, cfl.report.get("gamma"), fleet

    # Two kinds of clients, whose halves pull alike: rho = 1, no noise.
    kinds = [[(1.0, y), (1.0, y)] for y in (10.0, 11.0, -10.0, -10.0)]
    split, gamma, fleet = clusters_after(kinds)
    assert split == 2 and gamma == pytest.approx(0.0, abs=1e-6)
    fleet.commit()
    assert not [key for state in fleet.snapshot()[0].values() for key in state if "halves" in key]
    # One kind: a client's halves pull to 10 and to -9.9, so what differs on the ones is reversed on the others.
    noise = [[(1.0, 10.0), (1.0, -9.9)]] * 4
    assert clusters_after(noise)[:2] == (1, float("inf"))
    assert clusters_after(noise, gamma=0.0)[0] == 2  # as the released code: always


def test_cluster_of_one_kind_is_measured_again_after_some_rounds():
    for retry, expected in ((1, 4), (3, 2)):
        fleet = scalar_fleet([[(1.0, 10.0), (1.0, -10.1)]] * 4, lr=0.1)
        options = {"cfl": CFLOptions(**{**NOW, "eps1": 0.5, "eps2": 0.0, "retry": retry})}
        cfl = method_of("cfl", fleet, clusters=2, options=options)
        cfl.base.clusters = Models(np.zeros((1, 1), np.float32))
        measured = []
        for round in range(1, 5):
            fleet.begin(round)
            cfl.round(fleet, round)
            measured += [round] * ("gamma" in cfl.report)
        assert len(measured) == expected and cfl.base.K == 1


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
def test_clients_of_one_kind_stay_together_and_two_rotations_are_two_clusters(seed):
    common = ("method=cfl", "clients=16", "clusters=4", "partition=iid", "model.hidden=[32]", "local.steps=10",
              "local.lr=0.05", "local.momentum=0.9", "evaluation.every=12", f"seed={seed}")  # fmt: skip
    alike = run(session_of(*common, "data.rotations=1"), 12)[-1].metrics
    assert alike["cluster_sizes"][0] == 16
    apart = run(session_of(*common, "data.rotations=2"), 12)[-1].metrics
    assert apart["ari"] == 1.0 and sorted(apart["cluster_sizes"])[-2:] == [8, 8]


def test_relative_thresholds_are_shares_of_the_longest_mean_update():
    # From w = -50 the mean update is 0.2 * 50.5 = 10.1 long; it shrinks by 0.8 a round while the longest goes to
    # 0.2 * 10.5 = 2.1. The mean falls below 0.1 * 10.1 in round 12 (0.8^11 = 0.086): then 2.1 < longest < 3.2.
    for eps2, expected in ((0.2, 12), (0.4, None)):
        cfl, fleet = cfl_of(
            [10.0, 11.0, -10.0, -9.0], start=-50.0, thresholds="relative", eps1=0.1, eps2=eps2
        )
        splits = []
        for round in range(1, 16):
            fleet.begin(round)
            cfl.round(fleet, round)
            splits += [round] * (cfl.base.K > 1)
        assert cfl.base.scale == pytest.approx(10.1, rel=1e-5)
        assert splits[:1] == ([expected] if expected else [])


def test_children_divide_their_parents_client_ids_over_three_successive_splits():
    # Eight clients that want 0 or 1, 10 or 11, 100 or 101, 110 or 111, dealt to ids so that no position is an id.
    wants = np.array([110.0, 0.0, 101.0, 10.0, 1.0, 111.0, 11.0, 100.0])
    cfl, fleet = cfl_of(wants, clusters=8, eps1=0.05, eps2=0.6)
    seen = [clusters_of(cfl)]
    for round in range(1, 80):
        fleet.begin(round)
        before = cfl.base.assignment.copy()
        cfl.round(fleet, round)
        if len(seen[-1]) < cfl.base.K:
            seen.append(clusters_of(cfl))
            for child in np.flatnonzero(cfl.base.parents >= 0)[len(seen[-2]) - 1 :]:
                parent = int(cfl.base.parents[child])
                halves = [set(np.flatnonzero(cfl.base.assignment == k).tolist()) for k in (parent, child)]
                whole = set(np.flatnonzero(before == parent).tolist()) or set(range(8))
                assert halves[0] | halves[1] == whole and not halves[0] & halves[1] and all(halves)
    # First hundreds, then tens; pairs are one apart: 0.2 * 0.5 is no longer than eps2.
    groups = {
        frozenset(np.flatnonzero(np.abs(wants - middle) < 1).tolist()) for middle in (0.5, 10.5, 100.5, 110.5)
    }
    assert cfl.base.K == 4 and {frozenset(members) for members in clusters_of(cfl)} == groups
    values = [cfl.base.clusters.values[cfl.base.assignment[i], 0] for i in range(8)]
    assert values == pytest.approx([110.5, 0.5, 100.5, 10.5, 0.5, 110.5, 10.5, 100.5], abs=0.3)
    # Four clusters out of one make three splits; the second and the third are of clusters that are not the first.
    assert len(cfl.base.parents) == 4 and cfl.base.parents.tolist()[0] == UNASSIGNED


def test_children_divide_their_parents_client_ids_over_three_generations():
    # Sixteen clients: thousands part first, then hundreds, then tens; pairs that are one apart stay together.
    steps = itertools.product((0.0, 1000.0), (0.0, 100.0), (0.0, 10.0), (0.0, 1.0))
    wants = np.random.default_rng(3).permutation([sum(parts) for parts in steps])
    cfl, fleet = cfl_of(wants, clusters=16, start=555.0, eps1=0.05, eps2=0.6)
    everyone = frozenset(range(16))
    generation, splits = {everyone: 0}, []
    for round in range(1, 66):
        fleet.begin(round)
        before = [everyone] if round == 1 else [frozenset(members) for members in clusters_of(cfl)]
        cfl.round(fleet, round)
        after = [frozenset(members) for members in clusters_of(cfl)]
        for child in range(len(before), cfl.base.K):
            parent = int(cfl.base.parents[child])
            whole, halves = before[parent], (after[parent], after[child])
            assert halves[0] | halves[1] == whole and not halves[0] & halves[1] and all(halves)
            generation |= dict.fromkeys(halves, generation[whole] + 1)
            splits.append(generation[whole])
    assert splits == [0, 1, 1, 2, 2, 2, 2]
    assert {members for members, depth in generation.items() if depth == 3} == {
        frozenset(np.flatnonzero(wants // 10 == tens).tolist()) for tens in np.unique(wants // 10)
    }


def test_eps1_zero_never_splits_and_has_the_bits_of_fedavg():
    cfl, fedavg = (
        session_of("method=cfl", "cfl.eps1=0", "cfl.eps2=0", "cfl.first=1"),
        session_of("method=fedavg"),
    )
    run(cfl, 4), run(fedavg, 4)
    assert cfl.server.method.base.K == 1
    assert np.array_equal(cfl.server.method.base.clusters.values[0], fedavg.server.method.base.model)


# --- similarities and halves ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_optimal_bipartition_is_the_least_of_all(seed):
    rng = np.random.default_rng(seed)
    updates = rng.standard_normal((6, 3))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    alpha = updates @ updates.T

    def across(half):
        return alpha[np.ix_(half, ~half)].max()

    every = [np.array((True, *rest)) for rest in itertools.product((True, False), repeat=5) if not all(rest)]
    found = bipartition(alpha, "optimal")
    assert across(found) == pytest.approx(min(across(half) for half in every))
    complete = bipartition(alpha, "complete")
    assert across(complete) >= across(found) - 1e-12
    for half in (found, complete):
        assert 0 < half.sum() <= 3 and not (half.sum() == 3 and half[0])


def test_complete_and_optimal_differ_on_a_chain():
    # Directions at 0, 50, 100, 150 and 215 degrees: single linkage cuts the widest gap (150 to 215), which leaves
    # one alone; complete linkage keeps both halves narrow.
    angles = np.deg2rad([0.0, 50.0, 100.0, 150.0, 215.0])
    alpha = np.cos(angles[:, None] - angles)
    assert bipartition(alpha, "optimal").tolist() == [False, False, False, False, True]
    assert bipartition(alpha, "complete").sum() == 2


def test_ties_and_updates_of_no_length():
    assert bipartition(np.ones((4, 4)), "complete").sum() in (1, 2)
    session = session_of("method=fedavg", "clusters=1")
    fleet, start = session.fleet, session.server.method.base.model
    fleet.begin(1)
    theta = fleet.train(start=start)
    moved = theta.gather().astype(np.float64) - start
    members = np.array([1, 4, 6])
    expected = np.corrcoef(moved[members])  # means of updates are near 0, but not quite
    found = cosines(theta, members, start, fleet.spec.parameters)
    norms = np.linalg.norm(moved[members], axis=1)
    assert found == pytest.approx(moved[members] @ moved[members].T / np.outer(norms, norms), rel=1e-9)
    assert found == pytest.approx(expected, abs=0.05)
    still = fleet.train(start=theta)  # any handle: what matters is that one row equals `start`
    own = still.gather()[2]
    assert cosines(still, np.array([0, 2]), own, fleet.spec.parameters).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_buffers_do_not_count_as_updates():
    # BatchNorm's running statistics move far in a round; lengths and cosines are those of trainable parameters.
    session = session_of("method=cfl", "model=cnn_fashion", "local.steps=1")
    strategy, fleet = session.server.method, session.fleet
    fleet.begin(1)
    c = np.zeros(8, np.int64)
    theta = strategy.base.train(fleet, c)
    start, P = strategy.base.clusters.values[0], fleet.spec.parameters
    moved = theta.gather().astype(np.float64) - start
    assert fleet.spec.size > P and np.abs(moved[:, P:]).max() > 0
    mean, longest = strategy.base.lengths(fleet, theta, c)
    weights = fleet.sizes / fleet.sizes.sum()
    assert longest == pytest.approx([np.linalg.norm(moved[:, :P], axis=1).max()], rel=1e-6)
    assert mean == pytest.approx([np.linalg.norm(weights @ moved[:, :P])], rel=1e-4)
    norms = np.linalg.norm(moved[:, :P], axis=1)
    alpha = cosines(theta, np.arange(8), start, P)
    assert alpha == pytest.approx(moved[:, :P] @ moved[:, :P].T / np.outer(norms, norms), rel=1e-9)


@pytest.mark.parametrize("rule", ["spectral", "kmeans", "agglomerative"])
def test_clustering_rule_may_divide_a_cluster(rule):
    cfl, fleet = cfl_of([10.0, 11.0, -10.0, -9.0], eps1=0.2, eps2=2.0, bipartition=rule)
    cfl.round(fleet, 1)
    assert {frozenset(members) for members in clusters_of(cfl)} == {frozenset({0, 1}), frozenset({2, 3})}


# --- partial participation --------------------------------------------------------------------------------


def test_clients_that_missed_a_split_join_one_of_its_halves_by_loss():
    cfl, fleet = cfl_of([10.0, 11.0, -10.0, -9.0, 10.0, -10.0], eps1=0.2, eps2=2.0)
    everyone = fleet.everyone
    cfl.base.options.first = 2
    cfl.round(fleet, 1)
    assert cfl.base.K == 1 and clusters_of(cfl) == [[0, 1, 2, 3, 4, 5]]
    cfl.base.clusters = Models(np.zeros((1, 1), np.float32))
    fleet.begin(2)
    cfl.round(fleet.select([0, 1, 2, 3]), 2)
    # 4 and 5 belong to neither half yet, and predict with the one that fits.
    assert cfl.base.assignment.tolist() == [0, 0, 1, 1, UNASSIGNED, UNASSIGNED]
    assert cfl.base.waiting.tolist() == [UNASSIGNED] * 4 + [1, 1]
    assert cfl.labels(everyone).tolist() == [0, 0, 1, 1, 0, 1]
    fleet.begin(3)
    cfl.base.options.eps1 = 0.0  # no further split
    cfl.round(fleet.select([2, 5]), 3)
    assert cfl.base.assignment.tolist() == [0, 0, 1, 1, UNASSIGNED, 1]
    assert cfl.base.waiting.tolist() == [UNASSIGNED] * 4 + [1, UNASSIGNED]


def test_who_waits_may_only_join_what_its_split_led_to():
    cfl, fleet = cfl_of([1.0, 2.0, 3.0], clusters=8)
    # 0 was split into 0 and 1, 0 into 0 and 2, 1 into 1 and 3, 2 into 2 and 4.
    cfl.base.K, cfl.base.parents = 5, np.array([UNASSIGNED, 0, 0, 1, 2])
    may = {split: np.flatnonzero(cfl.base.descendants(split)).tolist() for split in range(5)}
    assert may == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4], 2: [0, 2, 4], 3: [1, 3], 4: [2, 4]}
    cfl.base.clusters = Models(np.float32([[9.0], [1.0], [9.0], [2.1], [2.9]]))
    cfl.base.waiting = np.array([3, 2, 0])
    assert cfl.base.adopt(fleet).tolist() == [
        1,
        4,
        4,
    ]  # client 1 would like cluster 3, which is none of its kin


def test_client_that_does_not_arrive_is_not_split_on():
    cfl, fleet = cfl_of([10.0, 11.0, -10.0, -9.0, float("inf")], eps1=0.2, eps2=2.0)
    cfl.round(fleet, 1)
    assert cfl.base.assignment.tolist() == [0, 0, 1, 1, UNASSIGNED]
    assert cfl.base.waiting.tolist() == [UNASSIGNED] * 4 + [
        0
    ]  # it has never been seen: any cluster may be its own
    assert cfl.base.clusters.values.ravel().tolist() == pytest.approx([2.1, -1.9], rel=1e-6)
    assert not np.shares_memory(cfl.base.clusters.values[0], cfl.base.clusters.values[1])


# --- experiments ------------------------------------------------------------------------------------------

# Two epochs without momentum from round to round let a cluster come to rest within ten rounds.
CALM = ("local.lr=0.05", "local.epochs=2", "local.keep_optimizer=false", "model.hidden=[32]", "clients=12")


# Over seeds 0 to 6, in 20 rounds, two groups were found seven times, four groups six times (once two stayed together).
@pytest.mark.parametrize(("groups", "seed"), [(2, 0), (4, 1)])
def test_ground_truth_rotations_are_recovered(groups, seed):
    session = session_of(
        "method=cfl",
        f"seed={seed}",
        f"data.rotations={groups}",
        "clusters=6",
        "rounds=10",
        "evaluation.every=10",
        *CALM,
    )
    report = run(session, 10)[-1]
    assert report.metrics["ari"] == 1.0 and report.metrics["cluster_sizes"] == [12 // groups] * groups
    assert session.server.method.base.K == groups == len(session.server.method.base.clusters)


def test_clients_of_one_kind_are_not_split():  # seeds 0 to 6 alike
    session = session_of("method=cfl", "data.rotations=1", "clusters=6", "evaluation.every=10", *CALM)
    assert run(session, 10)[-1].metrics["cluster_sizes"] == [12]


def test_gamma_stops_needless_splits():
    # With momentum kept from round to round updates are noisy, and clusters of one kind look torn too.
    sizes = {}
    for gamma in (0.0, 0.68):
        session = session_of(
            "method=cfl", f"cfl.gamma={gamma}", "clusters=6", "evaluation.every=10", "clients=12", "seed=4",
            "local.lr=0.1", "local.steps=10", "model.hidden=[32]",
        )  # fmt: skip
        sizes[gamma] = run(session, 10)[-1].metrics["cluster_sizes"]
    assert sizes == {0.0: [6, 3, 3], 0.68: [6, 6]}


def test_same_bits_in_any_layout_and_after_a_restore():
    settings = (
        "method=cfl", "cfl.first=2", "cfl.thresholds=absolute", "cfl.eps1=100", "cfl.eps2=0", "clusters=4",
        "participation.fraction=0.75", "participation.dropouts=0.2",
    )  # fmt: skip
    whole = session_of(*settings)
    reports = run(whole, 5)
    expected = outcome(whole, reports)
    assert whole.server.method.base.K > 1 and (whole.server.method.base.waiting >= 0).any()
    assert all(np.isfinite(report.clients["accuracy"]).all() for report in reports)
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 3)
    second = session_of(*settings, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]], checkpoint=checkpoint_of(first))
    reports += run(second, 2, first=4)
    assert outcome(second, reports) == expected


def test_split_federation_takes_new_clients_and_a_shared_model():
    session = session_of(
        "method=cfl+cam", "cfl.first=1", "cfl.eps1=2", "cfl.eps2=0", "cfl.gamma=0", "holdout_clients=0.25"
    )
    reports = run(session, 4)
    assert session.server.method.base.K == 2
    assert np.isfinite(reports[-1].clients["accuracy"]).all()
    assert np.isfinite(reports[-1].metrics["holdout_micro_accuracy"])
