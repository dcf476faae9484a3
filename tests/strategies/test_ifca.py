"""IFCA, by hand, by its identities, and on ground-truth groups."""

import numpy as np
import pytest

from archipelago.core.errors import ClientFailure
from archipelago.strategies.ifca import IFCAOptions
from archipelago.strategies.references import Models
from tests.support.errors import refused
from tests.support.experiments import digest, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Clients 0 and 1 want w = 2 (client 1 has twice the data), client 2 wants w = -2.
THREE = [[(1.0, 2.0)], [(1.0, 2.0), (2.0, 4.0)], [(1.0, -2.0)]]


def test_one_round_by_hand():
    fleet = scalar_fleet(THREE, lr=0.1)
    ifca = method_of("ifca", fleet, clusters=2)
    ifca.base.clusters = Models(np.float32([[-1.0], [1.0]]))
    ifca.base.round(fleet)
    # Losses: client 0: (-1-2)^2 = 9 and 1; client 1: mean(9, 36) and mean(1, 4) = 2.5; client 2: 1 and 9.
    assert ifca.base.assignment.tolist() == [1, 1, 0]
    # theta_0 = 1 + 0.2 = 1.2; theta_1: g = mean(2*(1-2), 2*2*(2-4)) = mean(-2, -8) = -5, 1.5;
    # cluster 1 = (1 * 1.2 + 2 * 1.5) / 3 = 1.4; cluster 0 = -1 - 0.1 * 2 * (-1 + 2) = -1.2
    assert ifca.base.clusters.values.ravel().tolist() == pytest.approx([-1.2, 1.4], rel=1e-6)
    # sum n_i / n * loss = (1 * 1 + 2 * 2.5 + 1 * 1) / 4
    assert ifca.report["clustering_objective"] == pytest.approx(1.75, rel=1e-6)


def test_empty_cluster_keeps_its_model():
    fleet = scalar_fleet(THREE[:2], lr=0.1)
    ifca = method_of("ifca", fleet, clusters=2)
    ifca.base.clusters = Models(np.float32([[-50.0], [1.0]]))
    ifca.base.round(fleet)
    assert ifca.base.assignment.tolist() == [1, 1]
    assert ifca.base.clusters.values[0].tolist() == [-50.0]


def test_ties_go_to_the_lowest_index():
    fleet = scalar_fleet(THREE, lr=0.1)
    ifca = method_of("ifca", fleet, clusters=2)
    ifca.base.clusters = Models(np.float32([[1.0], [1.0]]))
    ifca.base.round(fleet)
    assert ifca.base.assignment.tolist() == [0, 0, 0]


def test_one_cluster_is_fedavg():
    one, fedavg = session_of("method=ifca", "clusters=1"), session_of("method=fedavg", "clusters=1")
    reports, plain = run(one, 3), run(fedavg, 3)
    assert np.array_equal(one.server.method.base.clusters.values[0], fedavg.server.method.base.model)
    assert digest(reports[-1].clients["accuracy"]) == digest(plain[-1].clients["accuracy"])


def test_permuting_the_clusters_permutes_the_result():
    straight, turned = session_of("method=ifca"), session_of("method=ifca")
    strategy = turned.server.method
    strategy.base.clusters = Models(strategy.base.clusters.values[::-1].copy())
    run(straight, 3)
    run(turned, 3)
    assert np.array_equal(straight.server.method.base.clusters.values, strategy.base.clusters.values[::-1])
    assert np.array_equal(straight.server.method.base.assignment, 1 - strategy.base.assignment)


def test_cluster_models_are_distinct_objects_with_distinct_numbers():
    session = session_of("method=ifca", "clusters=3")
    run(session, 2)
    values = session.server.method.base.clusters.values
    assert len({row.tobytes() for row in values}) == 3
    assert not np.shares_memory(values[0], values[1])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ground_truth_rotations_are_recovered(seed):
    # lr 0.1 with 10 steps of a 32-unit MLP lets ten rounds learn something.
    session = session_of(
        "method=ifca", f"seed={seed}", "clients=12", "local.steps=10", "local.lr=0.1", "model.hidden=[32]"
    )
    reports = run(session, 10)
    assert reports[-1].metrics["ari"] == 1.0
    assert sorted(reports[-1].metrics["cluster_sizes"]) == [6, 6]


def test_clients_never_seen_predict_with_the_cluster_of_least_loss_and_stay_unassigned():
    session = session_of("method=ifca", "participation.fraction=0.25")
    report = session.run_round(1)
    strategy = session.server.method
    unseen = strategy.base.assignment == -1
    assert unseen.sum() == 6 and np.isfinite(report.clients["accuracy"]).all()
    everyone = session.fleet.everyone
    least = everyone.losses(strategy.base.clusters).argmin(axis=1)
    assert np.array_equal(strategy.labels(everyone)[unseen], least[unseen])


def test_initialisations_and_the_shared_backbone():
    start = {}
    for option in ("independent", "perturbed", "balanced"):
        more = ("ifca.balance=0.25",) if option == "balanced" else ()
        session = session_of("method=ifca", f"ifca.init={option}", *more)
        start[option] = session.server.method.base.clusters.values
    spread = {name: float(np.linalg.norm(values[0] - values[1])) for name, values in start.items()}
    assert 0 < spread["perturbed"] < 0.5 * spread["independent"]
    noisier = session_of(
        "method=ifca", "ifca.init=perturbed", "ifca.noise=0.3"
    ).server.method.base.clusters.values
    assert np.linalg.norm(noisier[0] - noisier[1]) > spread["perturbed"]
    fleet = session_of("method=ifca").fleet
    joined = np.bincount(fleet.losses(Models(start["balanced"])).argmin(axis=1), minlength=2)
    assert joined.min() >= 2  # a quarter of eight clients
    shared = session_of("method=ifca", "ifca.share_backbone=true", "model=cnn_digits")
    run(shared, 2)
    values, spec = shared.server.method.base.clusters.values, shared.fleet.spec
    assert np.array_equal(values[0, spec.columns("backbone")], values[1, spec.columns("backbone")])
    assert not np.array_equal(values[0, spec.columns("head")], values[1, spec.columns("head")])


def test_backbone_that_is_not_there_cannot_be_shared():
    fleet = scalar_fleet(THREE)
    with refused("needs-backbone", says="ifca.share_backbone=true", setting="ifca.share_backbone"):
        method_of("ifca", fleet, clusters=2, options={"ifca": IFCAOptions(share_backbone=True)})


def test_empty_cluster_and_a_collapse_are_reported_once():
    session = session_of("method=ifca")
    strategy = session.server.method
    far = strategy.base.clusters.values.copy()
    far[1] *= 100.0  # a model that is sure of itself, and wrong
    strategy.base.clusters = Models(far)
    first, second = run(session, 2)
    assert "Cluster 1 is empty: it keeps its model." in first.events
    assert "All clients are in cluster 0." in first.events
    assert not [event for event in second.events if "cluster" in event.lower()]
    assert np.array_equal(strategy.base.clusters.values[1], far[1])


def test_matched_averaging_is_refused_with_a_common_backbone():
    with refused("aggregation", says="ifca.share_backbone=true", rule="matched"):
        session_of("method=ifca", "ifca.share_backbone=true", "aggregation=matched", "model=cnn_digits")


@pytest.mark.parametrize("setting", ["drop", "stop"])
def test_client_whose_loss_is_not_finite_under_any_model_is_dropped_by_name(setting):
    """Its batch may miss the one extreme sample: trained on the others, its model would be averaged in silence."""
    fleet = scalar_fleet([[(1.0, 1.0)], [(1.0, 2.0), (1e30, 1.0)], [(1.0, 3.0)]])
    fleet.not_finite = setting
    strategy = method_of("ifca", fleet, clusters=2)
    strategy.base.clusters = Models(np.array([[0.5], [4.0]], np.float32))
    if setting == "stop":
        with pytest.raises(ClientFailure, match=r"Client 1 .*its loss was not finite under any model"):
            strategy.round(fleet, 1)
        return
    strategy.round(fleet, 1)
    assert fleet.events == [
        "Round 1: dropped client 1 from the assignment: its loss was not finite under any model."
    ]
    assert np.isfinite(strategy.report["clustering_objective"])
    # lr 0.1, gradient 2 (w - y): 0.5 + 0.1 and 4 - 0.2
    assert strategy.base.clusters.values[:, 0].tolist() == pytest.approx([0.6, 3.8])
