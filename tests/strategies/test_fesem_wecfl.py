"""FeSEM and WeCFL, by hand, by their identities, and on ground-truth groups."""

import numpy as np
import pytest

from archipelago.strategies.fesem import FeSEMOptions
from archipelago.strategies.references import Models
from benchmarks.behaviour.situations import settings
from tests.support.errors import refused
from tests.support.experiments import digest, outcome, run, session_from, session_of
from tests.support.scalar import method_of, scalar_fleet

# Clients want w = 2, 4 and -2.
THREE = [[(1.0, 2.0)], [(1.0, 4.0)], [(1.0, -2.0)]]
GOOD = ("clients=12", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "data.rotations=4", "clusters=4")


@pytest.mark.parametrize("method", ["fesem", "wecfl"])
def test_one_round_by_hand(method):
    fleet = scalar_fleet(THREE, lr=0.1)
    base = method_of(method, fleet, clusters=2)
    base.base.clusters = Models(np.float32([[0.0], [0.0]]))
    base.base.round(fleet)
    # theta = 0.4, 0.8, -0.4: K-means {0.4, 0.8} | {-0.4}, centres 0.6 and -0.4
    assert base.base.assignment[0] == base.base.assignment[1] != base.base.assignment[2]
    assert base.base.clusters.values[base.base.assignment[[0, 2]], 0].tolist() == pytest.approx([0.6, -0.4])
    # (0.2^2 + 0.2^2 + 0) / 3
    assert base.report["clustering_objective"] == pytest.approx(0.08 / 3, rel=1e-5)


def test_sizes_decide_wecfls_clusters_and_means_by_hand():
    # theta = 0.2 y = 0, 1 and 2.2, with 10, 1 and 1 samples. Joining two points costs n n' / (n + n') of their squared
    # distance: plain, 0 and 1 join (0.5 against 0.72); by size, 1 and 2.2 do (0.72 against 0.909), at 1.6.
    samples = [[(1.0, 0.0)] * 10, [(1.0, 5.0)], [(1.0, 11.0)]]
    joined = {}
    for method in ("fesem", "wecfl"):
        fleet = scalar_fleet(samples, lr=0.1)
        base = method_of(method, fleet, clusters=2)
        base.base.clusters = Models(np.float32([[0.0], [0.0]]))
        base.base.round(fleet)
        joined[method] = base.base.assignment[1] == base.base.assignment[2]
        if method == "wecfl":
            assert base.base.clusters.values[base.base.assignment[[0, 1]], 0].tolist() == pytest.approx(
                [0.0, 1.6]
            )
            assert base.report["clustering_objective"] == pytest.approx((0.6**2 + 0.6**2) / 12, rel=1e-5)
    assert joined == {"fesem": False, "wecfl": True}


@pytest.mark.parametrize(("weights", "centre"), [("uniform", 0.6), ("size", 0.5)])
def test_m_step_of_fesem_by_hand_with_unequal_sizes(weights, centre):
    # theta = 0.4, 0.8 and -0.4 with 3, 1 and 1 samples. (9): (0.4 + 0.8) / 2; by size: (3 * 0.4 + 0.8) / 4.
    fleet = scalar_fleet([[(1.0, 2.0)] * 3, [(1.0, 4.0)], [(1.0, -2.0)]], lr=0.1)
    base = method_of("fesem", fleet, clusters=2, weights=weights)
    base.base.clusters = Models(np.float32([[0.0], [0.0]]))
    base.base.round(fleet)
    assert base.base.assignment[0] == base.base.assignment[1] != base.base.assignment[2]
    assert base.base.clusters.values[base.base.assignment[[0, 2]], 0].tolist() == pytest.approx(
        [centre, -0.4]
    )


def test_fesem_directions_from_the_mean_of_clusters_in_use_by_hand():
    # theta = 0.4, 0.8 and -0.4 from 0: directions 1, 1 and -1, whatever their lengths.
    fleet = scalar_fleet(THREE, lr=0.1)
    base = method_of("fesem", fleet, clusters=3, options={"fesem": FeSEMOptions(features="directions")}).base
    base.clusters = Models(np.zeros((3, 1), np.float32))
    base.round(fleet)
    assert base.points.ravel().tolist() == pytest.approx([1.0, 1.0, -1.0])
    c = base.assignment
    assert c[0] == c[1] != c[2]
    # Centres 0.6 and -0.4; the third has no client, and where it is does not matter. theta = 0.88, 1.28, -0.72.
    (empty,) = set(range(3)) - set(c)
    moved = base.clusters.values.copy()
    moved[empty] = 1000.0
    base.clusters = Models(moved)
    base.round(fleet)
    assert base.points.ravel().tolist() == pytest.approx([1.0, 1.0, -1.0])


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fesem_directions_find_groups_where_few_take_part(seed):
    """Models of different rounds differ by their rounds, and clusters that part by that stay apart (`STALE`)."""
    found = {}
    for features in ("classifier", "directions"):
        asked = [*settings("fesem", "participation", seed), f"fesem.features={features}"]
        found[features] = run(session_from(asked), 60)[-1].metrics
    assert found["classifier"]["ari"] < 0.5 and found["directions"]["ari"] == 1.0
    assert found["directions"]["micro_accuracy"] > found["classifier"]["micro_accuracy"]


@pytest.mark.parametrize("method", ["oracle", "random"])
def test_one_round_of_the_references_by_hand(method):
    fleet = scalar_fleet(THREE, lr=0.1)
    base = method_of(method, fleet, clusters=2, groups=np.array([1, 1, 0]))
    base.base.clusters = Models(np.float32([[0.0], [0.0]]))
    base.base.round(fleet)
    c = base.base.assignment
    if method == "oracle":
        assert c.tolist() == [1, 1, 0]
        assert base.base.clusters.values.ravel().tolist() == pytest.approx([-0.4, 0.6], rel=1e-6)
    theta = np.array([0.4, 0.8, -0.4])  # whatever the clusters are, each is the mean of its members
    for k in np.unique(c):
        assert base.base.clusters.values[k, 0] == pytest.approx(theta[c == k].mean(), rel=1e-6)


def test_distance_penalty_by_hand_and_zero_without_it():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, steps=2)
    base = method_of("fesem", fleet, clusters=1, options={"fesem": FeSEMOptions(lam=0.5)})
    base.base.clusters = Models(np.float32([[1.0]]))
    base.base.round(fleet)
    # as FedProx: step 1 w = 1.2; step 2 g = 2 (1.2 - 2) + 0.5 * 0.2 = -1.5, w = 1.35
    assert base.base.clusters.values.tolist() == [pytest.approx([1.35], rel=1e-6)]


@pytest.mark.parametrize("method", ["fesem", "wecfl", "ifca", "random"])
def test_one_cluster_is_fedavg(method):
    one, fedavg = session_of(f"method={method}", "clusters=1"), session_of("method=fedavg", "clusters=1")
    reports, plain = run(one, 3), run(fedavg, 3)
    assert np.array_equal(one.server.method.base.clusters.values[0], fedavg.server.method.base.model)
    assert digest(reports[-1].clients["accuracy"]) == digest(plain[-1].clients["accuracy"])


def test_equal_sizes_make_wecfl_fesem_and_unequal_ones_do_not():
    def final(method, *more):
        session = session_of(f"method={method}", *more)
        run(session, 3)
        return session.server.method.base.clusters.values

    even = (
        "data=synthetic",
        "data.samples=1000",
        "data.sources=2",
        "model=linear_regression",
        "data.rotations=1",
    )
    sizes = session_of("method=fesem", *even).server.setup.sizes
    assert len(set(sizes.tolist())) == 1
    assert np.array_equal(final("fesem", *even), final("wecfl", *even))
    assert np.array_equal(final("fesem", "weights=uniform"), final("wecfl", "weights=uniform"))
    skewed = ("partition=dirichlet", "partition.alpha=0.3", "clusters=3")
    assert not np.array_equal(final("fesem", *skewed), final("wecfl", *skewed))


@pytest.mark.parametrize("method", ["fesem", "wecfl"])
@pytest.mark.parametrize("seed", [0, 1])
def test_ground_truth_rotations_are_recovered_within_ten_rounds(method, seed):
    session = session_of(f"method={method}", f"seed={seed}", *GOOD)
    reports = run(session, 8)
    assert reports[-1].metrics["ari"] >= 0.9
    assert reports[-1].metrics["changed"] == 0  # ids mean the same from round to round


@pytest.mark.parametrize("method", ["fesem", "wecfl"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ground_truth_label_groups_are_recovered_within_ten_rounds(method, seed):
    # Four groups of four clients, two classes each; lr 0.1 and ten steps let a few rounds learn.
    session = session_of(
        f"method={method}", f"seed={seed}", "clients=16", "clusters=4", "data.rotations=1", "local.steps=10",
        "local.lr=0.1", "model.hidden=[32]", "partition=cluster_n_class", "partition.groups=4",
        "partition.classes=2", "partition.classes_within=2", "rounds=10", "evaluation.every=10",
    )  # fmt: skip
    assert run(session, 10)[-1].metrics["ari"] >= 0.9


@pytest.mark.parametrize("change", ["fesem.lam=0.5", "fesem.features=parameters"])
def test_options_reach_the_numbers(change):
    setting = ("method=fesem", "partition=dirichlet", "clusters=3", "rounds=4")
    plain, changed = session_of(*setting), session_of(*setting, change)
    reports, other = run(plain, 4), run(changed, 4)
    objectives = [[r.metrics["clustering_objective"] for r in each] for each in (reports, other)]
    assert objectives[0] != objectives[1]


def test_warm_starts_begin_at_the_last_centres(monkeypatch):
    import archipelago.strategies.clustering as clustering

    given = []
    original = clustering.kmeans
    monkeypatch.setattr(clustering, "kmeans", lambda *a, **k: (given.append(k), original(*a, **k))[1])
    session = session_of("method=fesem", "fesem.warm=true", "fesem.starts=3")
    run(session, 1)
    kept = session.server.method.base.centres.copy()
    run(session, 1, first=2)
    assert given[0]["centres"] is None and np.array_equal(given[1]["centres"], kept)
    assert given[0]["starts"] == 3


@pytest.mark.parametrize("method", ["fesem", "wecfl", "oracle", "random"])
def test_partial_participation_and_layouts(method):
    setting = (f"method={method}", "participation.fraction=0.5")
    one = session_of(*setting)
    two = session_of(*setting, blocks=[[5, 0], [1, 2, 3, 4, 6, 7]])
    assert outcome(one, run(one, 3)) == outcome(two, run(two, 3))
    assert np.isfinite(one.run_round(4).clients["accuracy"]).all()


def test_fewer_distinct_models_than_clusters_is_reported_and_survived():
    session = session_of("method=fesem", "clusters=4", "participation.fraction=0.25")
    report = session.run_round(1)
    assert any("distinct models" in event for event in report.events)
    assert np.isfinite(report.metrics["micro_loss"])


def test_oracle_needs_ground_truth_groups_and_a_cluster_for_each():

    session = session_of("method=oracle", "clusters=4", "data.rotations=4")
    assert run(session, 1)[0].metrics["ari"] == 1.0
    with refused("too-few-clusters", says="clusters=4", clusters=2, groups=4):
        session_of("method=oracle", "clusters=2", "data.rotations=4")
    with refused("needs-groups", says="data.rotations", setting="method=oracle"):
        session_of("method=oracle", "data.rotations=1")


def test_references_stand_where_they_should():
    accuracy = {}
    for method in ("oracle", "random", "wecfl"):
        session = session_of(f"method={method}", *GOOD)
        accuracy[method] = run(session, 8)[-1].metrics["micro_accuracy"]
    assert accuracy["oracle"] >= accuracy["wecfl"] > accuracy["random"]


def test_ids_keep_their_meaning_when_other_clients_take_part():
    # Clients 0-3 and 4-7 hold the same two kinds of data; they take part in turns.
    fleet = scalar_fleet([[(1.0, t)] for t in (2.0, 2.0, -2.0, -2.0) * 2], lr=0.1)
    for seed in range(6):
        base = method_of("fesem", fleet, clusters=2, seed=seed)
        for number, ids in ((1, range(4)), (2, range(4, 8)), (3, range(4))):
            fleet.begin(number)
            base.round(fleet.select(list(ids)), number)
        assert base.base.assignment[:4].tolist() == base.base.assignment[4:].tolist()
        assert (
            base.base.clusters.values[base.base.assignment[0], 0]
            > 0
            > base.base.clusters.values[base.base.assignment[2], 0]
        )


def test_client_that_blew_up_is_not_assigned_for_good():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, 4.0)], [(1.0, -2.0)], [(1e30, 1.0)]], lr=0.1)
    base = method_of("fesem", fleet, clusters=2)
    base.round(fleet, 1)
    assert base.base.assignment[3] == -1 and (base.base.assignment[:3] >= 0).all()
