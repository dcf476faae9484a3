"""Robust (TKM): trimmed K-means, a round by hand, and clients that deliver random weights."""

import dataclasses

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from archipelago.core.settings import AggregationSettings
from archipelago.strategies import AGGREGATION
from archipelago.strategies.clustering import trimmed_kmeans
from archipelago.strategies.references import Models
from archipelago.strategies.robust import RobustOptions
from tests.support.experiments import checkpoint_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# --- trimmed K-means --------------------------------------------------------------------------------------


def grouped_points(seed, odd=10, dimension=20):
    """Four groups of ten points, and some points anywhere, further out than the groups are apart."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(4), 10)
    points = 3.0 * rng.standard_normal((4, dimension))[groups] + rng.standard_normal((40, dimension))
    return np.concatenate([points, 30.0 * rng.standard_normal((odd, dimension))]), groups


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("trim", [0.05, 0.5])
def test_odd_points_do_not_take_centres_away_from_the_groups(seed, trim):
    points, groups = grouped_points(seed)
    found = trimmed_kmeans(points, 4, seed=seed, trim=trim, outliers=0.2)
    assert adjusted_rand_score(groups, found.labels[:40]) == 1.0
    assert found.outlying.tolist() == [False] * 40 + [True] * 10
    plain = KMeans(4, n_init=10, random_state=seed).fit(points)
    assert adjusted_rand_score(groups, plain.labels_[:40]) < 0.5


@pytest.mark.parametrize("seed", range(3))
def test_without_trimming_it_is_kmeans(seed):
    points, _ = grouped_points(seed, odd=0)
    found = trimmed_kmeans(points, 4, seed=0, trim=0.0, outliers=0.0)
    plain = KMeans(4, n_init=20, random_state=0).fit(points)
    assert adjusted_rand_score(plain.labels_, found.labels) == 1.0
    assert found.objective == pytest.approx(plain.inertia_ / len(points), rel=1e-9)
    assert not found.outlying.any()


def test_centres_are_trimmed_means_of_the_points_inside():
    points = np.array([[0.0], [1.0], [2.0], [3.0], [50.0], [1000.0], [1001.0], [1002.0], [1009.0], [9e6]])
    # A tenth of ten points is one: 9e6. A fifth of five points is one from each side: 1, 2, 3 and of four none.
    found = trimmed_kmeans(points, 2, seed=0, trim=0.2, outliers=0.1)
    assert sorted(found.centres.ravel().tolist()) == pytest.approx([2.0, 1003.0])
    assert found.labels.tolist()[:5] == [found.labels[0]] * 5 and len(set(found.labels.tolist()[5:])) == 1
    median = trimmed_kmeans(points, 2, seed=0, trim=0.5, outliers=0.1)
    assert sorted(median.centres.ravel().tolist()) == pytest.approx([2.0, 1001.5])
    inside = [2.0, 1.0, 0.0, 1.0, 48.0, 3.0, 2.0, 1.0, 6.0]
    assert found.objective == pytest.approx(np.mean(np.square(inside)))


def test_it_repeats_itself_and_few_points_fill_few_clusters():
    points, _ = grouped_points(1)
    one, two = (trimmed_kmeans(points, 3, seed=5, outliers=0.2) for _ in range(2))
    assert np.array_equal(one.labels, two.labels) and np.array_equal(one.centres, two.centres)
    for few in (np.ones((6, 2)), np.ones((1, 2)), np.array([[0.0], [0.0], [1.0]])):
        found = trimmed_kmeans(few, 4, seed=0, outliers=0.2)
        assert found.distinct == len(np.unique(few, axis=0))
        assert len(np.unique(found.labels)) == found.distinct and found.objective == 0.0


# --- a round ----------------------------------------------------------------------------------------------

# y = w x from w = 0 with lr 0.1: client i ends at 0.2 y_i. Three around 2, three around -2, one at 100.
SEVEN = [[(1.0, y)] for y in (10.0, 10.5, 11.0, -10.0, -10.5, -11.0, 500.0)]


def one_round(method="robust", **options):
    fleet = scalar_fleet(SEVEN, lr=0.1)
    strategy = method_of(
        method, fleet, clusters=2, options={"robust": RobustOptions(**options)} if method == "robust" else {}
    )
    strategy.base.clusters = Models(np.zeros((2, 1), np.float32))
    strategy.round(fleet, 1)
    return strategy


def test_one_round_by_hand():
    robust = one_round(trim=0.25)
    c = robust.base.assignment
    assert c.tolist() == [c[0]] * 3 + [c[3]] * 3 + [c[0]] and c[0] != c[3]
    # A seventh point is a fifth of seven, rounded down: client 6 moves no centre. Its cluster of four
    # loses 2.0 and 100.0 (a quarter from each side): (2.1 + 2.2) / 2. A quarter of three is nobody.
    assert robust.base.clusters.values[c[0], 0] == pytest.approx(2.15, rel=1e-6)
    assert robust.base.clusters.values[c[3], 0] == pytest.approx(-2.1, rel=1e-6)
    assert robust.report["outliers"] == 1
    centres = robust.base.centres.ravel()
    assert centres[c[0]] == pytest.approx(2.1, rel=1e-6) and centres[c[3]] == pytest.approx(-2.1, rel=1e-6)
    # Plain K-means gives the odd client a cluster and throws the groups together.
    fesem = one_round("fesem")
    assert fesem.assignment.tolist() == [fesem.assignment[0]] * 6 + [fesem.assignment[6]]
    assert fesem.assignment[0] != fesem.assignment[6]


def test_every_option_changes_the_numbers():
    def by_group(**options):
        robust = one_round(**options)
        return [float(robust.base.clusters.values[robust.base.assignment[i], 0]) for i in (0, 3)]

    default = by_group()  # a fifth of four is nobody: (2 + 2.1 + 2.2 + 100) / 4
    assert default == pytest.approx([26.575, -2.1], rel=1e-6)
    assert by_group(trim=0.25) == pytest.approx([2.15, -2.1], rel=1e-6)
    assert by_group(exclude=True) == pytest.approx([2.1, -2.1], rel=1e-6)
    assert one_round(features="updates").base.points.ravel()[3] == pytest.approx(-2.0, rel=1e-6)  # from 0
    assert one_round(distance="cosine").base.centres.ravel().tolist() in ([1.0, -1.0], [-1.0, 1.0])
    assert by_group(outliers=0.0) == pytest.approx([0.0, 0.0], abs=1e-6)  # both groups in one cluster
    assert one_round(centre_trim=0.4).base.centres.max() == pytest.approx(2.1, rel=1e-6)
    skewed = [[(1.0, y)] for y in (10.0, 10.0, 10.0, 10.0, 20.0)]

    def centre(**options):
        fleet = scalar_fleet(skewed, lr=0.1)
        robust = method_of("robust", fleet, options={"robust": RobustOptions(outliers=0.0, **options)})
        robust.base.clusters = Models(np.zeros((1, 1), np.float32))
        robust.round(fleet, 1)
        return float(robust.base.centres[0, 0])

    assert centre(centre_trim=0.0) == pytest.approx(2.4, rel=1e-6)
    assert centre(centre_trim=0.2) == pytest.approx(2.0, rel=1e-6)
    assert centre(centre="median") == pytest.approx(2.0, rel=1e-6)


def test_another_aggregation_replaces_the_trimmed_mean():
    fleet = scalar_fleet(SEVEN, lr=0.1)
    robust = method_of("robust", fleet, clusters=2, aggregation=AggregationSettings(name="median"))
    assert robust.base.rule.name == "median"
    own = method_of("robust", fleet, clusters=2).base.rule
    assert (own.apply, own.options.trim) == (AGGREGATION.find("trimmed_mean"), 0.2)


def test_one_cluster_without_trimming_is_fedavg_with_equal_weights():
    robust = session_of("method=robust", "clusters=1", "robust.trim=0", "robust.outliers=0")
    fedavg = session_of("method=fedavg", "clusters=1", "weights=uniform")
    run(robust, 3), run(fedavg, 3)
    found, expected = robust.server.method.base.clusters.values[0], fedavg.server.method.base.model
    assert np.abs(found - expected).max() < 1e-6


def test_client_that_does_not_arrive_moves_nothing_and_keeps_its_cluster():
    fleet = scalar_fleet([*SEVEN[:6], [(1.0, float("inf"))]], lr=0.1)
    robust = method_of("robust", fleet, clusters=2, options={"robust": RobustOptions(outliers=0.0)})
    robust.base.clusters = Models(np.zeros((2, 1), np.float32))
    robust.round(fleet, 1)
    c = robust.base.assignment
    assert c.tolist()[:6] == [c[0]] * 3 + [c[3]] * 3 and c[0] != c[3]
    assert robust.base.clusters.values[c[0], 0] == pytest.approx(2.1, rel=1e-6)
    assert np.isfinite(robust.base.clusters.values).all()


def test_fewer_distinct_models_than_clusters_are_an_event():
    fleet = scalar_fleet([[(1.0, 1.0)], [(1.0, 1.0)], [(1.0, 1.0)]], lr=0.1)
    robust = method_of("robust", fleet, clusters=2)
    robust.round(fleet, 1)
    assert robust.events == ["Only 1 distinct models for 2 clusters: the rest stays empty."]
    assert len(set(robust.base.assignment.tolist())) == 1
    assert not np.shares_memory(robust.base.clusters.values[0], robust.base.clusters.values[1])


# --- experiments ------------------------------------------------------------------------------------------


def test_same_bits_in_any_layout_and_after_a_restore():
    settings = ("method=robust", "participation.fraction=0.75", "participation.dropouts=0.2")
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 4))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]], checkpoint=checkpoint_of(first))
    reports += run(second, 2, first=3)
    assert outcome(second, reports) == expected
    assert all(np.isfinite(report.clients["accuracy"]).all() for report in reports)


def deliver_random_weights(session, clients, scale):
    """Make some clients train as they should, and then deliver normal noise instead of their model."""
    for block in session.fleet.blocks:
        honest = block.engine.train_one

        def train_one(job, honest=honest):
            result = honest(job)
            if job.client not in clients:
                return result
            noise = np.random.default_rng(job.seed).normal(0.0, scale, result.model.shape)
            return dataclasses.replace(result, model=noise.astype(np.float32))

        block.engine.train_one = train_one


@pytest.mark.parametrize("seed", [0, 1])
def test_fifth_of_clients_with_random_weights_ruins_fesem_and_not_robust(seed):
    # Two groups of digits (upright, turned) of ten clients, two of each faulty; lr 0.1 and ten steps of a 32-unit MLP
    # let eight rounds learn. Accuracy of honest clients over seeds 0 to 4, by the spread of the noise (weights of
    # a trained model have 0.2): at 1, FeSEM 0.71 to 0.81 and Robust 0.95 to 0.97; at 3, FeSEM 0.30 to 0.43,
    # Robust 0.87 to 0.94, with `exclude` 0.94 to 0.97. FeSEM always threw both groups together. With ten clients
    # the two faulty ones can meet in one cluster, where a fifth trims only one: Robust 0.54 to 0.89, `exclude` 0.92
    # to 0.96.
    faulty = (0, 6, 11, 17)
    honest = np.setdiff1d(np.arange(20), faulty)
    accuracy, ari = {}, {}
    for name, settings in {
        "fesem": ["method=fesem"],
        "robust": ["method=robust"],
        "exclude": ["method=robust", "robust.exclude=true"],
    }.items():
        session = session_of(
            *settings, f"seed={seed}", "clients=20", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "rounds=8",
            "evaluation.every=8",
        )  # fmt: skip
        deliver_random_weights(session, faulty, scale=3.0)
        report = run(session, 8)[-1]
        accuracy[name] = float(report.clients["accuracy"][honest].mean())
        ari[name] = adjusted_rand_score(report.clients["group"][honest], report.assignment[honest])
    assert accuracy["exclude"] > 0.9 and accuracy["robust"] > 0.8 and accuracy["fesem"] < 0.6
    assert ari["exclude"] == ari["robust"] == 1.0 and ari["fesem"] < 0.5
