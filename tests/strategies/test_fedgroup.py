"""FedGroup: by hand, its similarities, its identities, and on ground-truth groups."""

import numpy as np
import pytest

from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.fedgroup import FedGroupOptions, cosines_of, decomposed, differences
from tests.support.experiments import checkpoint_of, digest, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

FOUR = [[(1.0, 2.0)], [(1.0, 4.0)], [(1.0, -2.0)], [(1.0, -6.0)]]
GOOD = ("clients=12", "clusters=4", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "data.rotations=4",
        "evaluation.every=2")  # fmt: skip


def test_two_rounds_by_hand():
    # Far enough from the first model for the signs of y - w_0 to be those of y.
    fleet = scalar_fleet([[(1.0, 10 * y)] for ((_, y),) in FOUR], lr=0.1)
    fedgroup = method_of("fedgroup", fleet, clusters=2)
    base, w0 = fedgroup.base, float(fleet.initial(1)[0][0])
    fedgroup.round(fleet, 1)
    # Pre-training gives 0.8 w0 + 4, 8, -4, -12: groups {0, 1} and {2, 3} start from 0.8 w0 + 6 and 0.8 w0 - 8.
    c = base.assignment
    assert c[0] == c[1] != c[2] == c[3]
    moved = base.directions.ravel()[c[[0, 2]]]
    assert moved.tolist() == pytest.approx([-0.2 * w0 + 6, -0.2 * w0 - 8], rel=1e-4)
    # Then a round of FedAvg from there: 0.8 w + 0.2 * 30 and 0.8 w - 0.2 * 40.
    expected = [0.8 * (0.8 * w0 + 6) + 6, 0.8 * (0.8 * w0 - 8) - 8]
    assert base.clusters.values.ravel()[c[[0, 2]]].tolist() == pytest.approx(expected, rel=1e-5)
    fleet.begin(2)
    fedgroup.round(fleet.select([1]), 2)  # nobody pre-trains again
    assert base.clusters.values[c[0], 0] == pytest.approx(0.8 * expected[0] + 8, rel=1e-5)


def test_clients_that_come_later_join_by_direction():
    fleet = scalar_fleet([[(1.0, y)] for y in (90.0, -80.0, 70.0, -60.0)], lr=0.1)
    fedgroup = method_of(
        "fedgroup", fleet, clusters=2, options={"fedgroup": FedGroupOptions(alpha=1)}, seed=1
    )
    base = fedgroup.base
    fedgroup.round(fleet.select([0]), 1)  # alpha m = 2 clients are clustered, whoever takes part
    assert np.isfinite(base.points[:, 0]).sum() == 2
    fleet.begin(2)
    fedgroup.round(fleet, 2)
    c = base.assignment
    assert (c != UNASSIGNED).all()
    drawn = np.flatnonzero(np.isfinite(base.points[:, 0]))
    assert sorted(drawn % 2) == [0, 1]  # this seed draws one client of each sign
    assert c[0] == c[2] != c[1] == c[3]


def test_decomposed_cosines_are_those_with_the_singular_vectors():
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((6, 40))
    left, _, _ = np.linalg.svd(steps.T, full_matrices=False)
    expected = steps @ left[:, :3] / np.linalg.norm(steps, axis=1, keepdims=True)
    assert np.abs(decomposed(steps @ steps.T, 3)) == pytest.approx(np.abs(expected))
    norms = np.linalg.norm(steps, axis=1)
    assert cosines_of(steps @ steps.T) == pytest.approx(steps @ steps.T / np.outer(norms, norms))


def test_madc_compares_how_two_clients_are_like_the_others():
    alike = np.array([[1.0, 0.9, 0.1, 0.0], [0.9, 1.0, 0.2, 0.1], [0.1, 0.2, 1.0, 0.8], [0.0, 0.1, 0.8, 1.0]])
    away = differences(alike)
    assert away[0, 1] == pytest.approx((0.1 + 0.1) / 2) and away[0, 2] == pytest.approx((0.7 + 0.8) / 2)


def test_one_group_is_fedavg_after_a_round_of_it():
    # With one group the cold start is a round of FedAvg: two rounds of FedGroup are three of it, but for the batches.
    fleet, other = scalar_fleet(FOUR, lr=0.1), scalar_fleet(FOUR, lr=0.1)
    fedgroup, fedavg = method_of("fedgroup", fleet), method_of("fedavg", other)
    for number in (1, 2, 3):
        other.begin(number)
        fedavg.round(other, number)
        if number < 3:
            fleet.begin(number)
            fedgroup.round(fleet, number)
    assert np.array_equal(fedgroup.base.clusters.values[0], fedavg.base.model)


@pytest.mark.parametrize("more", [(), ("fedgroup.measure=madc",), ("fedgroup.clustering=agglomerative",)])
def test_ground_truth_rotations_are_found(more):
    metrics = run(session_of("method=fedgroup", *GOOD, *more), 2)[-1].metrics
    assert metrics["ari"] == 1.0 and metrics["silhouette"] > 0.2


@pytest.mark.parametrize("change", ["fedgroup.mixing=0.1", "fedgroup.alpha=1", "fedgroup.measure=madc",
                                    "fedgroup.clustering=affinity"])  # fmt: skip
def test_options_reach_the_numbers(change):
    setting = ("method=fedgroup", "partition=dirichlet", "partition.alpha=0.5", "clusters=3", "data.rotations=1",
               "clients=10")  # fmt: skip
    assert digest(run(session_of(*setting), 2)) != digest(run(session_of(*setting, change), 2))


DRIFTING = ("method=fedgroup", "clients=8", "clusters=2", "partition=cluster_n_class", "partition.classes=5",
            "partition.groups=2", "partition.classes_within=5", "data.rotations=1", "local.steps=5", "local.lr=0.1",
            "drift=[move@3:0.5]", "rounds=4", "evaluation.every=1")  # fmt: skip


def test_clients_whose_labels_change_migrate():
    """FlexCFL: half of the clients exchange their data in round 3; who stays in its group trains a wrong model."""
    stays, migrates = session_of(*DRIFTING), session_of(*DRIFTING, "fedgroup.migrate=0.3")
    before, after = run(stays, 4), run(migrates, 4)
    assert before[1].metrics["ari"] == after[1].metrics["ari"] == 1.0
    assert before[3].metrics["ari"] < 1.0 and after[3].metrics["ari"] == 1.0
    moved = before[3].assignment != after[3].assignment
    groups = [stage.groups for stage in migrates.server.setup.stages]
    assert np.array_equal(moved, groups[0] != groups[1])
    assert f"{moved.sum()} clients have changed" in "".join(after[2].events)
    # Two more models for each that moves (a pre-training), and ten shares of everybody when the data has changed.
    shares = 10 / migrates.server.fleet.spec.size
    assert after[2].metrics["cost_models_up"] == pytest.approx(1 + shares + moved.mean())
    assert after[3].metrics["cost_models_up"] == 1.0


def test_migration_has_a_threshold_and_the_same_bits_on_any_layout_and_after_a_resume():
    far = session_of(*DRIFTING, "fedgroup.migrate=1.0")
    run(far, 4)
    assert np.array_equal(far.server.method.base.assignment, run(session_of(*DRIFTING), 4)[3].assignment)
    settings = (*DRIFTING, "fedgroup.migrate=0.3")
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 4))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]], checkpoint=checkpoint_of(first))
    assert outcome(second, reports + run(second, 2, first=3)) == expected


def test_cost_and_new_clients():
    session = session_of("method=fedgroup", "holdout_clients=0.25", *GOOD)
    reports = run(session, 2)
    for cost in ("cost_models_down", "cost_models_up", "cost_computation"):
        assert [r.metrics[cost] for r in reports] == pytest.approx([2, 1])
    groups, base = session.server.setup.groups, session.server.method.base
    where = base.adopt(session.fleet.measuring().select(session.server.held_out))
    known = {groups[i]: base.assignment[i] for i in session.server.population}
    assert [known[groups[i]] for i in session.server.held_out] == where.tolist()
