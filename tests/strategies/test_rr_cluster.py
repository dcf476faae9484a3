"""RR-Cluster: by hand, its identity, and what it does to epsilon."""

import numpy as np
import pytest

from archipelago.strategies.cfl import CFLOptions
from archipelago.strategies.references import Models
from archipelago.strategies.rr_cluster import RRClusterOptions, rebalanced
from tests.support.errors import refused
from tests.support.experiments import outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet


@pytest.mark.parametrize("seed", range(5))
def test_every_cluster_gets_its_clients_and_gives_none_that_it_needs(seed):
    c = np.array([0] * 6 + [1] * 3 + [2] * 1 + [-1])
    found = rebalanced(c, 4, 2, np.random.default_rng(seed))
    assert np.bincount(found[:-1], minlength=4).min() == 2 and found[-1] == -1
    assert found[9] == 2  # who is alone stays
    assert ((found != c).sum()) == 3  # one for cluster 2, two for cluster 3
    assert np.array_equal(rebalanced(c[:9], 2, 2, np.random.default_rng(seed)), c[:9])  # nothing to do


def test_one_round_by_hand():
    # Three clients fit w = 10, one w = -10; with B = 2 one of the three trains the other model.
    fleet = scalar_fleet([[(1.0, 10.0)], [(1.0, 10.0)], [(1.0, 10.0)], [(1.0, -10.0)]], lr=0.1)
    method = method_of(
        "ifca+rr_cluster", fleet, clusters=2, options={"rr_cluster": RRClusterOptions(min_size=2)}
    )
    method.base.clusters = Models(np.float32([[10.0], [-10.0]]))
    method.round(fleet, 1)
    # Its update of -10 is -10 + 0.2 * 20 = -6; averaged with -10: -8.
    assert method.base.clusters.values.ravel().tolist() == pytest.approx([10.0, -8.0])
    assert method.base.assignment.tolist() == [0, 0, 0, 1]  # what clients chose, and predict with
    assert method.report["rebalanced"] == 1


def test_cfl_keeps_the_clusters_that_it_splits_while_clients_are_moved():
    fleet = scalar_fleet([[(1.0, 10.0)]] * 2 + [[(1.0, -10.0)]] * 2, lr=0.1)
    cfl = CFLOptions(first=1, gamma=0.0, thresholds="absolute", eps1=0.5, eps2=1.0)
    options = {"cfl": cfl, "rr_cluster": RRClusterOptions(min_size=1)}
    method = method_of("cfl+rr_cluster", fleet, clusters=2, options=options)
    method.base.clusters = Models(np.float32([[0.0]]))
    method.round(fleet, 1)
    # Updates are 2 and -2, their mean is at rest: two clusters, each with the model of its own clients.
    assert method.base.assignment.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert method.base.clusters.values[method.base.assignment].ravel().tolist() == pytest.approx(
        [2, 2, -2, -2]
    )


def test_too_few_clients_are_shared_out_and_that_is_said():
    fleet = scalar_fleet([[(1.0, 10.0)], [(1.0, 10.0)], [(1.0, -10.0)]], lr=0.1)
    method = method_of("ifca+rr_cluster", fleet, clusters=2)
    method.round(fleet, 1)
    assert any("too few" in event for event in method.events)


@pytest.mark.parametrize("base", ["ifca", "fesem", "pacfl"])
def test_minimum_of_one_changes_nothing_where_no_cluster_is_empty(base):
    settings = ("clients=8", "clusters=2", "data.rotations=2", "rounds=2", "seed=1")
    plain, added = (
        session_of(f"method={base}", *settings),
        session_of(f"method={base}+rr_cluster", "rr_cluster.min_size=1", *settings),
    )
    expected, found = run(plain, 2), run(added, 2)
    assert not any(report.metrics["empty_clusters"] for report in expected)  # else RR-Cluster fills it
    assert [r.metrics["micro_loss"] for r in expected] == [r.metrics["micro_loss"] for r in found]


def test_epsilon_is_smaller_where_no_cluster_is_small():
    # Two groups of six clients, of whom half take part: with B = 3 both means are always of three.
    settings = ("data.rotations=2", "clients=12", "participation.fraction=0.5", "weights=uniform", "evaluation.every=4",
                "update=[clip,gaussian]", "update.noise=2.0")  # fmt: skip
    alone = run(session_of("method=oracle", *settings), 4)
    added = run(session_of("method=oracle+rr_cluster", *settings), 4)
    assert sum(report.metrics["rebalanced"] for report in added) > 0
    assert added[-1].metrics["epsilon"] < 0.9 * alone[-1].metrics["epsilon"]


def test_groups_are_found_although_some_of_their_clients_train_other_models():
    """Ground truth: five, three and two clients that want 10, -10 and 30; B = 3 is more than the last group has."""
    fleet = scalar_fleet([[(1.0, y)] for y in (10.0,) * 5 + (-10.0,) * 3 + (30.0,) * 2], lr=0.1)
    method = method_of("ifca+rr_cluster", fleet, clusters=3)
    method.base.clusters = Models(np.float32([[1.0], [-1.0], [20.0]]))
    for number in range(1, 9):
        fleet.begin(number)
        method.round(fleet, number)
        assert method.report["rebalanced"] >= 1
    assert method.base.assignment.tolist() == [0] * 5 + [1] * 3 + [2] * 2


def test_min_size_reaches_the_numbers_in_any_layout():
    settings = (
        "method=ifca+rr_cluster",
        "data.rotations=1",
        "clusters=3",
        "rounds=2",
        "participation.dropouts=0.2",
    )
    plain = session_of(*settings)
    other = session_of(*settings, "rr_cluster.min_size=1")
    spread = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    found = [outcome(each, run(each, 2)) for each in (plain, other, spread)]
    assert found[0] == found[2] != found[1]


def test_bases_without_clusters_are_refused():
    for base in ("fedavg", "fedem"):
        with refused("add-on", addon="rr_cluster", base=base):
            session_of(f"method={base}+rr_cluster")
