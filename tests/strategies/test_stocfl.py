"""StoCFL: by hand, merges by cosine, its identities, and on ground-truth groups."""

import numpy as np
import pytest

from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.references import Models
from archipelago.strategies.stocfl import StoCFLOptions, united
from tests.support.experiments import digest, run, session_of
from tests.support.scalar import method_of, scalar_fleet

GOOD = (
    "clients=12",
    "local.steps=10",
    "local.lr=0.1",
    "model.hidden=[32]",
    "data.rotations=4",
    "evaluation.every=2",
)


def test_merges_by_cosine_threshold_by_hand():
    # Directions at 0, 30, 60, 100 and 180 degrees: cosines of neighbours 0.87, 0.87, 0.77, 0.17.
    at = np.radians([0, 30, 60, 100, 180])
    means = np.stack([np.cos(at), np.sin(at)], axis=1) * np.array([[1.0], [5.0], [0.1], [2.0], [3.0]])
    assert united(means, 0.9).tolist() == [0, 1, 2, 3, 4]
    assert united(means, 0.8).tolist() == [0, 0, 0, 3, 4]  # 0 and 60 are merged through 30
    assert united(means, 0.7).tolist() == [0, 0, 0, 0, 4]
    assert united(means, 0.1).tolist() == [0, 0, 0, 0, 0]


def test_two_rounds_by_hand():
    fleet = scalar_fleet([[(1.0, 9.0)], [(1.0, 5.0)], [(1.0, -8.0)]], lr=0.1)
    stocfl = method_of("stocfl", fleet, clusters=3, options={"stocfl": StoCFLOptions(lam=0.5)})
    base = stocfl.base
    base.model = np.float32([0.0])
    anchor = float(fleet.initial(1)[0][0])
    stocfl.round(fleet, 1)
    # Psi from the anchor w: 0.2 (y - w). Signs decide: clients 0 and 1 are one cluster, 2 is another.
    assert base.psi.ravel().tolist() == pytest.approx([0.2 * (y - anchor) for y in (9, 5, -8)], rel=1e-4)
    assert base.assignment.tolist() == [0, 0, 1] and base.K == 2
    # Both clusters and omega start at 0, where the pull is 0: 0.2 y, averaged.
    assert base.clusters.values.ravel().tolist() == pytest.approx([1.4, -1.6], rel=1e-5)
    assert base.model.tolist() == pytest.approx([0.4], rel=1e-5)
    fleet.begin(2)
    stocfl.round(fleet, 2)
    # theta - 0.1 (2 (theta - y) + 0.5 (theta - omega)): 1.4 - 0.1 (2 (1.4 - 7) + 0.5), -1.6 - 0.1 (2 * 6.4 - 0.5 * 2)
    assert base.clusters.values.ravel().tolist() == pytest.approx([2.47, -2.78], rel=1e-5)
    assert base.model.tolist() == pytest.approx([0.4 + 0.2 * (2 - 0.4)], rel=1e-5)


def test_clients_come_bit_by_bit_and_clusters_keep_the_larger_ones_model():
    fleet = scalar_fleet([[(1.0, y)] for y in (9.0, 5.0, -8.0, 7.0, -9.0)], lr=0.1)
    stocfl = method_of("stocfl", fleet, clusters=5, options={"stocfl": StoCFLOptions(lam=0.0)})
    base = stocfl.base
    stocfl.round(fleet.select([0, 1]), 1)
    assert base.assignment.tolist() == [0, 0] + [UNASSIGNED] * 3
    fleet.begin(2)
    stocfl.round(fleet.select([2, 4]), 2)
    assert base.assignment.tolist() == [0, 0, 1, UNASSIGNED, 1] and base.K == 2
    fleet.begin(3)
    before = base.clusters.values[0].copy()
    stocfl.round(fleet.select([3]), 3)  # alone in the round: a cluster of its own, from omega
    assert base.assignment.tolist() == [0, 0, 1, 2, 1]
    fleet.begin(4)
    stocfl.base.start_round(4)
    base.merge(fleet.select([0, 3]))
    assert base.assignment.tolist() == [0, 0, 1, 0, 1] and base.K == 2
    assert base.clusters.values[0].tolist() == before.tolist()


def test_more_clusters_than_allowed_are_merged_on_and_that_is_said():
    fleet = scalar_fleet([[(1.0, 9.0)], [(1.0, -8.0)]], lr=0.1)
    stocfl = method_of("stocfl", fleet, clusters=1)
    stocfl.round(fleet, 1)
    assert stocfl.base.assignment.tolist() == [0, 0] and "more than clusters=1" in stocfl.events[0]


def test_without_pull_and_with_one_cluster_it_is_fedavg():
    stocfl = session_of("method=stocfl", "stocfl.tau=-1", "stocfl.lam=0", "clusters=1")
    fedavg = session_of("method=fedavg", "clusters=1")
    run(stocfl, 3), run(fedavg, 3)
    assert np.array_equal(stocfl.server.method.base.clusters.values[0], fedavg.server.method.base.model)


# Of seeds 0 to 2, one keeps a client apart: it never takes part with those of its kind.
@pytest.mark.parametrize("seed", [0, 2])
def test_ground_truth_rotations_and_their_number_are_found_although_few_take_part(seed):
    session = session_of("method=stocfl", f"seed={seed}", "clusters=9", "participation.fraction=0.5", *GOOD)
    metrics = run(session, 5)[-1].metrics
    assert metrics["ari"] == 1.0 and session.server.method.base.K == 4


@pytest.mark.parametrize("change", ["stocfl.tau=0.9", "stocfl.lam=0", "stocfl.features=classifier"])
def test_options_reach_the_numbers(change):
    setting = (
        "method=stocfl",
        "partition=dirichlet",
        "partition.alpha=0.5",
        "clusters=5",
        "data.rotations=1",
    )
    assert digest(run(session_of(*setting), 2)) != digest(run(session_of(*setting, change), 2))


def test_new_client_like_no_cluster_predicts_with_the_global_model():
    """Clients that want 90 and 80 are a cluster; one that wants 70 is like them (cosine 1), -60 is not."""
    fleet = scalar_fleet([[(1.0, 90.0)], [(1.0, 80.0)], [(1.0, 70.0)], [(1.0, -60.0)]], lr=0.1)
    stocfl = method_of("stocfl", fleet, clusters=3)
    stocfl.round(fleet.select([0, 1]), 1)
    base, new = stocfl.base, fleet.select([2, 3])
    base.model = base.model + 1  # so that omega can be told from the cluster's model
    assert base.adopt(new).tolist() == [0, UNASSIGNED]
    (models,) = base.prediction(new).models
    assert models.models[models.rows].ravel().tolist() == [base.clusters.values[0, 0], base.model[0]]
    anyone = method_of("stocfl", fleet, clusters=3, options={"stocfl": StoCFLOptions(tau=-1.0)})
    anyone.round(fleet.select([0, 1]), 1)
    assert anyone.base.adopt(new).tolist() == [0, 0]


def test_cost_and_new_clients():
    session = session_of("method=stocfl", "holdout_clients=0.25", *GOOD, "clusters=4")
    reports = run(session, 2)
    assert [round(r.metrics["cost_models_down"]) for r in reports] == [3, 2]
    assert [round(r.metrics["cost_models_up"]) for r in reports] == [3, 2]
    assert [r.metrics["cost_computation"] for r in reports] == pytest.approx([3, 2])
    groups, base = session.server.setup.groups, session.server.method.base
    where = base.adopt(session.fleet.measuring().select(session.server.held_out))
    known = {groups[i]: base.assignment[i] for i in session.server.population}
    assert [known[groups[i]] for i in session.server.held_out] == where.tolist()


def test_server_optimizers_follow_merged_clusters():
    fleet = scalar_fleet([[(1.0, 9.0)], [(1.0, -8.0)], [(1.0, -9.0)]], lr=0.1)
    stocfl = method_of("stocfl", fleet, clusters=3)
    base = stocfl.base
    base.K, base.clusters = 3, Models(np.float32([[1.0], [2.0], [3.0]]))
    base.assignment = np.array([0, 1, 2])
    base.steps.state = {"main": {"v": np.float32([[10.0], [20.0], [30.0]])}}
    base.rename(np.array([0, 0, 2]))
    assert base.clusters.values.ravel().tolist() == [1.0, 3.0]
    assert base.steps.state["main"]["v"].ravel().tolist() == [10.0, 30.0]
