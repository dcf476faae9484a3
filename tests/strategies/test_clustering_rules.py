"""Clustering rules and distances by hand, the setting that chooses them, and measures without ground truth."""

import numpy as np
import pytest

from actors.metrics import clustering_metrics
from archipelago.core.metrics import METRICS
from archipelago.strategies import CLUSTERING
from archipelago.strategies.base import Context
from archipelago.strategies.clustering import ClusteringTask, clustered
from archipelago.strategies.clustering_rules import (
    AffinityOptions,
    AgglomerativeOptions,
    DBSCANOptions,
    HDBSCANOptions,
    SpectralOptions,
)
from archipelago.strategies.distances import between, pairwise, principal_angles
from tests.support.errors import refused
from tests.support.experiments import config_of, run, session_of

FOUR = np.array([[0.0], [1.0], [4.0], [6.0]])
RULES = ("kmeans", "agglomerative", "hdbscan", "spectral", "affinity")
# Three groups of four points, far apart.
THREE = np.concatenate([centre + 0.1 * np.random.default_rng(k).standard_normal((4, 2))
                        for k, centre in enumerate(([0, 0], [9, 0], [0, 9]))])  # fmt: skip


def labels_of(rule, points=FOUR, clusters=4, own=None, **more):
    context = Context(clients=len(points))
    return clustered(rule, ClusteringTask(points, clusters, seed=3, **more), context, own).labels.tolist()


def test_ward_merges_of_four_points_by_hand():
    # Ward's cost of a merge is sqrt(2 n m / (n + m)) times the distance of the means: {0}{1} 1, {4}{6} 2, then
    # {0.5}{5} sqrt(2 * 2 * 2 / 4) * 4.5 = 6.36.
    for cut, expected in ((0.9, [0, 1, 2, 3]), (1.0, [0, 0, 1, 2]), (2.0, [0, 0, 1, 1]), (6.3, [0, 0, 1, 1]),
                          (6.4, [0, 0, 0, 0])):  # fmt: skip
        assert labels_of("agglomerative", own=AgglomerativeOptions("ward", cut)) == expected
    assert labels_of("agglomerative", clusters=3, own=AgglomerativeOptions("ward")) == [0, 0, 1, 2]


def test_linkages_of_four_points_by_hand():
    # {0, 1} and {4, 6} are 3 apart by single, 6 by complete, (4 + 6 + 3 + 5) / 4 = 4.5 by average linkage.
    for linkage, apart in (("single", 3.0), ("average", 4.5), ("complete", 6.0)):
        together = labels_of("agglomerative", own=AgglomerativeOptions(linkage, apart))
        two = labels_of("agglomerative", own=AgglomerativeOptions(linkage, apart - 0.01))
        assert together == [0, 0, 0, 0] and two == [0, 0, 1, 1]


def test_agglomerative_cut_never_gives_more_than_clusters():
    assert labels_of("agglomerative", clusters=2, own=AgglomerativeOptions("average", 0.0)) == [0, 0, 1, 1]


def test_principal_angles_of_two_known_subspaces():
    plane = np.eye(4)[:, :2]
    # One direction shared, the other turned by 30 degrees out of the plane; and a plane that shares nothing.
    turned = np.stack([np.eye(4)[0], np.array([0, np.cos(np.pi / 6), np.sin(np.pi / 6), 0])], axis=1)
    assert principal_angles(plane, turned) == pytest.approx([0, 30], abs=1e-6)
    assert principal_angles(plane, np.eye(4)[:, 2:]) == pytest.approx([90, 90])
    swapped = turned[:, ::-1]  # a basis in another order, or turned within itself, spans the same
    mixed = turned @ np.array([[0.6, -0.8], [0.8, 0.6]])
    for basis in (swapped, mixed):
        assert principal_angles(plane, basis) == pytest.approx([0, 30], abs=1e-6)
    rows = np.stack([plane.ravel(), turned.ravel()])
    assert pairwise(rows, "principal_angles", vectors=2)[0, 1] == pytest.approx(30)


def test_distances_agree_with_scikit_learn():
    from sklearn.metrics import pairwise_distances

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 7)), rng.standard_normal((3, 7))
    for name in ("euclidean", "cosine"):
        assert between(a, b, name) == pytest.approx(pairwise_distances(a, b, metric=name))
        assert (
            np.array_equal(pairwise(a, name), pairwise(a, name).T) and not pairwise(a, name).diagonal().any()
        )


@pytest.mark.parametrize("rule", RULES)
def test_rules_find_three_groups_and_repeat_themselves(rule):
    clusters = 6 if CLUSTERING[rule].capabilities.get("finds") and rule != "agglomerative" else 3
    found = labels_of(rule, THREE, clusters)
    assert found == labels_of(rule, THREE, clusters)
    assert [len(set(found[at : at + 4])) for at in (0, 4, 8)] == [1, 1, 1] and len(set(found)) == 3


@pytest.mark.parametrize("rule", RULES)
def test_rules_survive_one_client_equal_clients_and_more_clusters_than_clients(rule):
    assert labels_of(rule, np.zeros((1, 2))) == [0]
    assert len(set(labels_of(rule, np.zeros((5, 2)), 2))) <= 2
    assert max(labels_of(rule, FOUR[:3], 8)) < 3


@pytest.mark.parametrize("rule", ["hdbscan", "affinity"])
def test_rules_that_find_the_number_stay_within_clusters(rule):
    assert len(set(labels_of(rule, THREE, 2))) == 2


def test_density_and_preference_decide_how_many_there_are():
    assert len(set(labels_of("hdbscan", THREE, 9, own=HDBSCANOptions(min_size=5)))) == 1  # all four are noise
    assert len(set(labels_of("affinity", THREE, 12, own=AffinityOptions(preference=-1e-9)))) == 12


OF_DISTANCES = ("agglomerative", "hdbscan", "dbscan", "spectral", "affinity")  # rules that take any distance


def rays(*rays_of_four):
    """Four points near each (direction, length)."""
    noise = np.random.default_rng(0)
    return np.concatenate(
        [length * (np.array(d) + 0.02 * noise.standard_normal((4, 2))) for d, length in rays_of_four]
    )


@pytest.mark.parametrize("rule", OF_DISTANCES)
def test_rules_see_the_distance_that_is_chosen(rule):
    """Long and short points of two directions: apart by length, or by direction; opposite ones are one subspace."""
    crossed = rays(([1, 0], 1), ([1, 0], 8), ([0, 1], 1), ([0, 1], 8))
    by_direction = [0] * 8 + [1] * 8
    assert labels_of(rule, crossed, 2, distance="cosine") == by_direction
    assert labels_of(rule, crossed, 2) != by_direction
    line = rays(([1, 0], 1), ([-1, 0], 1), ([0, 1], 1))
    assert labels_of(rule, line, 2, distance="principal_angles") == [0] * 8 + [1] * 4
    assert labels_of(rule, line, 2, distance="cosine") != [0] * 8 + [1] * 4


@pytest.mark.parametrize(
    ("rule", "clusters", "options"),
    [
        ("hdbscan", 9, [HDBSCANOptions(), HDBSCANOptions(min_size=2)]),
        ("hdbscan", 9, [HDBSCANOptions(min_size=2), HDBSCANOptions(min_size=2, samples=3)]),
        ("hdbscan", 9, [HDBSCANOptions(min_size=2), HDBSCANOptions(min_size=2, epsilon=5.0)]),
        ("dbscan", 9, [DBSCANOptions(), DBSCANOptions(epsilon=0.6), DBSCANOptions(scale=0.2),
                       DBSCANOptions(samples=4)]),
        ("spectral", 4, [SpectralOptions(), SpectralOptions(scale=0.3), SpectralOptions(scale=20.0)]),
        ("affinity", 9, [AffinityOptions(), AffinityOptions(damping=0.95), AffinityOptions(preference=-300.0)]),
    ],
)  # fmt: skip
def test_every_option_of_a_rule_changes_its_clusters(rule, clusters, options):
    points = np.array([0, 1, 2, 3.5, 10, 10.5, 14, 14.2, 14.4, 30])[:, None]
    found = {tuple(labels_of(rule, points, clusters, own)) for own in options}
    assert len(found) == len(options)


def test_hdbscan_epsilon_by_hand():
    # With pairs as clusters: {0, 1, 2, 3.5}, {10, 10.5} and {14, 14.2, 14.4, 30}; 3.6 apart, then 6.5.
    points = np.array([0, 1, 2, 3.5, 10, 10.5, 14.1, 14.2, 14.4])[:, None]
    for epsilon, expected in ((3.5, 3), (3.6, 2), (6.4, 2), (6.5, 1)):
        found = labels_of("hdbscan", points, 9, HDBSCANOptions(min_size=2, epsilon=epsilon))
        assert len(set(found)) == expected


@pytest.mark.parametrize("rule", ["agglomerative", "hdbscan", "spectral", "affinity"])
def test_features_and_distance_reach_the_numbers_of_a_method(rule):
    common = ("method=fesem", f"fesem.clustering={rule}", "rounds=1", "local.steps=2", "partition=dirichlet",
              "clusters=4", *(("hdbscan.min_size=2",) if rule == "hdbscan" else ()))  # fmt: skip
    chosen = [
        ("classifier",),
        ("head",),
        ("updates",),
        ("directions",),
        ("label_shares",),
        ("moments",),
        ("updates", "cosine"),
    ]
    found = set()
    for features, *distance in chosen:
        more = [f"fesem.features={features}", *(f"fesem.distance={each}" for each in distance)]
        (report,) = run(session_of(*common, *more), 1)
        found.add((report.metrics["silhouette"], *report.assignment.tolist()))
    assert len(found) == len(chosen)


def test_directions_are_clustered_by_the_cosine():
    points = np.array([[1.0, 0.0], [9.0, 0.1], [0.0, 1.0], [0.1, 9.0]])
    for rule in ("kmeans", "agglomerative"):
        near = labels_of(rule, points, 2, distance="cosine")
        assert near[0] == near[1] != near[2] == near[3]
    assert labels_of("agglomerative", points, 3)[0] == labels_of("agglomerative", points, 3)[2]  # by length


def test_kmeans_refuses_angles_in_one_sentence():
    with refused("distance", rule="kmeans", distance="principal_angles"):
        config_of("method=fesem", "fesem.distance=principal_angles")
    with refused("unknown-name", kind="descriptor", nearest="moments"):
        config_of("method=fesem", "fesem.features=momentum")


@pytest.mark.parametrize(
    "chosen",
    [
        ("fesem.clustering=hdbscan",),
        ("fesem.clustering=spectral",),
        (
            "fesem.features=updates",
            "fesem.distance=cosine",
            "fesem.clustering=agglomerative",
            "agglomerative.cut=0.5",
            "clusters=8",
        ),
        ("fesem.features=moments",),
    ],
    ids=lambda chosen: chosen[0],
)
def test_ground_truth_rotations_are_found_by_any_rule(chosen):
    setting = ("method=fesem", "clients=12", "clusters=4", "data.rotations=4", "local.steps=10", "local.lr=0.1",
               "model.hidden=[32]", "evaluation.every=2")  # fmt: skip
    kept = [each for each in setting if each.partition("=")[0] not in {c.partition("=")[0] for c in chosen}]
    report = run(session_of(*kept, *chosen), 2)[-1]
    assert report.metrics["ari"] == 1.0 and report.metrics["silhouette"] > 0.2
    assert not report.events


def test_descriptors_are_asked_once_and_counted():
    session = session_of("method=fesem", "fesem.features=label_shares", "participation.fraction=0.5")
    reports = run(session, 3)
    # label_shares sends 10 numbers; a client that was seen sends none again.
    seen = session.server.method.base.points
    assert np.isfinite(seen[:, 0]).sum() >= 4 and seen[np.isfinite(seen[:, 0])].sum(axis=1) == pytest.approx(
        1
    )
    sent = [report.metrics["cost_models_up"] for report in reports]
    share = 10 / session.fleet.spec.size
    assert sent[0] == pytest.approx(1 + share) and all(1 <= each <= 1 + share + 1e-12 for each in sent)


# --- measures without ground truth ------------------------------------------------------------------------


def test_silhouette_by_hand():
    # Points 0, 1 | 4: for 0 (a 1, b 4) 3/4, for 1 (a 1, b 3) 2/3, the lonely one counts 0.
    away = np.abs(np.subtract.outer([0.0, 1.0, 4.0], [0.0, 1.0, 4.0]))
    silhouette = METRICS["silhouette"].value
    assert silhouette(away, np.array([0, 0, 1])) == pytest.approx((3 / 4 + 2 / 3) / 3)
    assert np.isnan(silhouette(away, np.zeros(3))) and np.isnan(silhouette(away, np.arange(3)))


def test_was_compares_how_uneven_classes_are_by_hand():
    # Sorted frequencies (0.1, 0.9), (0.1, 0.9), (0.4, 0.6), (0.5, 0.5): distances are 0.3, 0.4 and 0.1.
    counts = np.array([[9, 1], [1, 9], [6, 4], [5, 5]])
    expected = [1.0, 1.0, 1 - 0.1 / 0.3, 1 - 0.1 / 0.4]
    assert METRICS["was"].value(counts, np.array([0, 0, 1, 1])) == pytest.approx(np.mean(expected))


def test_clusterings_are_judged_where_something_is_known():
    assignment, away = np.array([0, 0, 1, -1]), pairwise(np.array([[0.0], [1.0], [4.0]]))
    found = clustering_metrics(assignment, None, None, 2, more={"distances": (np.array([0, 1, 2]), away)})
    assert found["silhouette"] == pytest.approx((3 / 4 + 2 / 3) / 3)
    assert found["ari"] is None and found["was"] is None
    report = run(session_of("method=ifca", "evaluation.every=2"), 2)
    assert report[0].metrics["was"] is None  # not evaluated in this round
    assert report[1].metrics["silhouette"] is None  # IFCA compares no clients
