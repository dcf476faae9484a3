"""CAM, by hand for every schedule, by its identities, and on ground-truth groups."""

import numpy as np
import pytest

from archipelago.strategies import parse_method
from archipelago.strategies.cam import CAMOptions
from archipelago.strategies.references import Models
from benchmarks import collapse
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

TWO = [[(1.0, 2.0)], [(1.0, -2.0)]]
GOOD = ("clients=12", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "data.rotations=4", "clusters=4")


def joint(method="ifca+cam", schedule="simultaneous", **options):
    fleet = scalar_fleet(TWO, lr=0.1)
    cam = CAMOptions(schedule=schedule, warmup=0.0, **options)
    made = method_of(method, fleet, clusters=2, rounds=10, options={"cam": cam})
    made.base.clusters = Models(np.float32([[-1.0], [1.0]]))
    made.addons[0].shared = np.float32([0.5])
    return fleet, made


# Losses of the sum (2): client 0: (0.5 - 1 - 2)^2 = 6.25 and (0.5 + 1 - 2)^2 = 0.25; client 1: 2.25 and 12.25.
# Cluster part with Theta_g = 0.5 fixed (5): 1 - 0.2 (1 + 0.5 - 2) = 1.1 and -1 - 0.2 (-1 + 0.5 + 2) = -1.3.
# Shared part with the cluster models fixed (8): 0.5 - 0.2 (0.5 + 1 - 2) = 0.6, 0.5 - 0.2 (0.5 - 1 + 2) = 0.2.
# Shared part on top of the new cluster parts: 0.5 - 0.2 (0.5 + 1.1 - 2) = 0.58, 0.5 - 0.2 (0.5 - 1.3 + 2) = 0.26.
# Cluster part on top of the new shared parts: 1 - 0.2 (1 + 0.6 - 2) = 1.08, -1 - 0.2 (-1 + 0.2 + 2) = -1.24.
# Cluster part on top of their average, 0.4: 1 - 0.2 (1 + 0.4 - 2) = 1.12, -1 - 0.2 (-1 + 0.4 + 2) = -1.28.
BY_HAND = {
    "simultaneous": ([-1.3, 1.1], 0.4),
    "cluster_first": ([-1.3, 1.1], 0.42),
    "global_first": ([-1.24, 1.08], 0.4),
    "global_first_aggregated": ([-1.28, 1.12], 0.4),
    "alternating": ([-1.3, 1.1], 0.42),
}


@pytest.mark.parametrize("schedule", BY_HAND)
def test_one_joint_round_by_hand(schedule):
    fleet, strategy = joint(schedule=schedule)
    strategy.round(fleet, 1)
    clusters, shared = BY_HAND[schedule]
    assert strategy.base.assignment.tolist() == [1, 0]
    assert strategy.base.clusters.values.ravel().tolist() == pytest.approx(clusters, rel=1e-6)
    assert strategy.addons[0].shared.tolist() == pytest.approx([shared], rel=1e-6)
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    assert mse.tolist() == pytest.approx(
        [(clusters[1] + shared - 2) ** 2, (clusters[0] + shared + 2) ** 2], rel=1e-5
    )


def test_alternating_predicts_by_its_second_assignment():
    fleet = scalar_fleet([[(1.0, 0.0)], [(1.0, 10.0)] * 9], lr=0.1)
    cam = CAMOptions(schedule="alternating", warmup=0.0)
    strategy = method_of("ifca+cam", fleet, clusters=2, rounds=10, options={"cam": cam})
    strategy.base.clusters, strategy.addons[0].shared = Models(np.float32([[1.0], [-2.0]])), np.float32([0.0])
    strategy.round(fleet, 1)
    # Both begin in cluster 0: 1 - 0.2 (1 - 0) = 0.8 and 1 - 0.2 (1 - 10) = 2.8, mean by size 2.6. Now client 0 is
    # better off with -2 (4 < 6.76). Shared: 0 - 0.2 (-2 - 0) = 0.4 and 0 - 0.2 (2.6 - 10) = 1.48, mean 1.372.
    assert strategy.base.assignment.tolist() == [1, 0]
    assert strategy.base.clusters.values.ravel().tolist() == pytest.approx([2.6, -2.0], rel=1e-6)
    assert strategy.addons[0].shared.tolist() == pytest.approx([1.372], rel=1e-6)
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    assert mse.tolist() == pytest.approx([(1.372 - 2) ** 2, (2.6 + 1.372 - 10) ** 2], rel=1e-5)


def test_cluster_that_cam_does_not_use_is_reported():
    session = session_of("method=ifca+cam", "cam.warmup=0", "clusters=3")
    strategy = session.server.method
    far = strategy.base.clusters.values.copy()
    far[1] *= 100.0  # a model that is sure of itself, and wrong
    strategy.base.clusters = Models(far)
    first, second = run(session, 2)
    reported = [
        [event for event in report.events if "Cluster 1 is empty" in event] for report in (first, second)
    ]
    assert reported == [["Cluster 1 is empty: it keeps its model."], []]
    for report in (first, second):
        sizes = report.metrics["cluster_sizes"]
        assert report.metrics["empty_clusters"] == sizes.count(0) >= 1 and sizes[1] == 0 and sum(sizes) == 8
    assert np.array_equal(strategy.base.clusters.values[1], far[1])


def test_permuted_cluster_ids_give_permuted_models():
    outcomes = []
    for order in ([0, 1], [1, 0]):
        fleet, strategy = joint()
        strategy.base.clusters = Models(strategy.base.clusters.values[order])
        strategy.round(fleet, 1)
        strategy.round(fleet, 2)
        outcomes.append((strategy.base.clusters.values[order].tobytes(), strategy.addons[0].shared.tobytes()))
        assert strategy.base.assignment.tolist() == [order[1], order[0]]
    assert outcomes[0] == outcomes[1]


def test_fesem_cam_by_hand_with_the_pull_to_the_centre():
    fleet, strategy = joint("fesem+cam", lam=1.0)
    strategy.base.assignment = np.array([1, 0])
    strategy.round(fleet, 1)
    # One step from the centre itself: (12)'s pull is still zero, so the numbers are those of ifca+cam.
    assert np.sort(strategy.base.clusters.values.ravel()).tolist() == pytest.approx([-1.3, 1.1], rel=1e-6)
    assert strategy.addons[0].shared.tolist() == pytest.approx([0.4], rel=1e-6)


def test_pull_to_the_centre_changes_the_numbers_of_parameter_based_bases_only():
    for method, differs in (("fesem+cam", True), ("ifca+cam", False)):
        outcomes = []
        for lam in (0.0, 1.0):
            session = session_of(f"method={method}", f"cam.lam={lam}", "cam.warmup=0.25")
            outcomes.append(outcome(session, run(session, 3)))
        assert (outcomes[0] != outcomes[1]) is differs


def test_warm_up_is_fedavg_for_loss_based_bases():
    cam = session_of("method=ifca+cam", "cam.warm=base", "cam.warmup=0.5", "rounds=4")
    session_rounds = run(cam, 2)
    strategy = cam.server.method
    # FedAvg on the shared model alone: the same steps by hand.
    other = session_of("method=fedavg", "rounds=4")
    fleet, model = other.fleet, None
    for number in (1, 2):
        fleet.begin(number)
        model = fleet.initial(1, "initial shared model")[0] if model is None else model
        model = fleet.train(start=model, slot="shared").average(weights=fleet.sizes)
        fleet.commit()
    assert np.array_equal(strategy.addons[0].shared, model)
    assert (strategy.base.assignment == -1).all() and session_rounds[-1].metrics["micro_accuracy"] > 0.1
    report = cam.run_round(3)
    assert (strategy.base.assignment >= 0).all() and report.round == 3


def test_warm_up_is_local_training_for_parameter_based_bases_and_ends_in_clusters():
    cam, local = (
        session_of("method=wecfl+cam", "cam.warm=local", "cam.warmup=0.5"),
        session_of("method=local"),
    )
    run(cam, 1)
    run(local, 1)
    warm = [state["model/warm"] for state in checkpoint_of(cam).clients.values()]
    alone = [state["model/model"] for state in checkpoint_of(local).clients.values()]
    assert all(np.array_equal(a, b) for a, b in zip(warm, alone, strict=True))
    assert (cam.server.method.base.assignment == -1).all()
    cam.run_round(2)
    assert (cam.server.method.base.assignment >= 0).all()


@pytest.mark.parametrize("base", ["ifca", "fesem", "wecfl"])
def test_with_a_shared_model_that_stays_zero_it_is_the_base(base):
    plain = session_of(f"method={base}")
    cam = session_of(f"method={base}+cam", "cam.warmup=0", "cam.lam=0")
    addon = cam.server.method.addons[0]
    zero = np.zeros_like(addon.shared)  # an MLP of zeros answers zero
    addon.shared = zero
    for number in (1, 2, 3):
        plain.run_round(number)
        cam.run_round(number)
        addon.shared = zero
    assert np.array_equal(plain.server.method.base.clusters.values, cam.server.method.base.clusters.values)
    assert np.array_equal(plain.server.method.base.assignment, cam.server.method.base.assignment)


def test_with_cluster_models_that_stay_zero_it_is_fedavg():
    cam = session_of("method=oracle+cam", "cam.warmup=0", "cam.schedule=simultaneous", "clusters=2")
    strategy = cam.server.method
    zero = Models(np.zeros_like(strategy.base.clusters.values))
    strategy.base.clusters = zero
    other = session_of("method=fedavg").fleet
    model = strategy.addons[0].shared
    for number in (1, 2):
        cam.run_round(number)
        strategy.base.clusters = zero
        other.begin(number)
        model = other.train(start=model, slot="shared").average(weights=other.sizes)
        other.commit()
    assert np.array_equal(strategy.addons[0].shared, model)


@pytest.mark.parametrize(
    "method", ["ifca+cam", "fesem+cam", "wecfl+cam+finetune", "wecfl+con+cks", "ifca+con+prox"]
)
def test_layouts_kills_and_restores_change_no_bit(method):
    setting = [f"method={method}", *(["cam.warmup=0.25"] if "cam" in method else [])]
    setting += ["model=cnn_digits"] if "con+cks" in method else []
    whole = session_of(*setting)
    first = run(whole, 4)
    split = session_of(*setting, blocks=[[7, 0, 3], [1, 2], [4, 5, 6]])
    assert outcome(split, run(split, 4)) == outcome(whole, first)
    half = session_of(*setting)
    reports = run(half, 2)
    again = session_of(*setting, blocks=[[0, 1, 2, 3], [4, 5, 6, 7]], checkpoint=checkpoint_of(half))
    assert outcome(again, reports + run(again, 2, first=3)) == outcome(whole, first)


@pytest.mark.parametrize("seed", [0, 1])
def test_ground_truth_rotations_are_recovered_by_fesem_cam(seed):
    session = session_of("method=fesem+cam", f"seed={seed}", "rounds=10", *GOOD)
    assert run(session, 10)[-1].metrics["ari"] >= 0.9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ifca_collapses_where_groups_have_much_in_common_and_cam_cures_it(seed):
    """benchmarks/collapse.py says why; one cluster of IFCA is FedAvg, and the noise alone is an error of 1."""
    ends = {m: collapse.outcome(m, 5.0, seed, "rounds=10") for m in ("fedavg", "ifca", "ifca+cam")}
    assert ends["ifca"]["used"] == 1
    assert ends["ifca"]["mse"] == pytest.approx(ends["fedavg"]["mse"], rel=0.01) and ends["ifca"]["mse"] > 5
    assert ends["ifca+cam"]["ari"] == 1.0 and ends["ifca+cam"]["mse"] < 1.5


@pytest.mark.parametrize(
    "base", ["fedavg", "local", "fedprox", "fedem", "fedsoft", "femam", "ditto", "fedper"]
)
def test_base_without_clusters_is_refused_with_a_reason(base):
    with refused("add-on", addon="cam", base=base) as caught:
        parse_method(f"{base}+cam")
    assert "clustered base" in str(caught.value)


def test_two_steps_with_the_pull_to_the_centre_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, steps=2)
    cam = CAMOptions(warmup=0.0, lam=0.5)
    strategy = method_of("fesem+cam", fleet, clusters=1, rounds=4, options={"cam": cam})
    strategy.base.clusters = Models(np.float32([[1.0]]))
    strategy.addons[0].shared = np.float32([0.0])
    strategy.round(fleet, 1)
    # As FedProx with mu = 0.5: w = 1.2, then g = 2 (1.2 - 2) + 0.5 * 0.2 = -1.5, w = 1.35
    assert strategy.base.clusters.values[0].tolist() == pytest.approx([1.35], rel=1e-6)


def test_new_client_is_adopted_by_the_loss_of_the_sum():
    fleet, strategy = joint()
    # Alone, cluster 1 (w = 1) is nearer to client 0's 2 than cluster 0; under a shared model of 3.5 it is not.
    strategy.addons[0].shared = strategy.base.underlay = np.float32([3.5])
    assert strategy.labels(fleet)[0] == 0
    strategy.base.underlay = None
    assert strategy.labels(fleet)[0] == 1


def test_restored_session_predicts_as_before():
    for method in ("ifca+cam", "fesem+cam"):
        session = session_of(f"method={method}", "cam.warmup=0.25")
        run(session, 3)
        again = session_of(f"method={method}", "cam.warmup=0.25", checkpoint=checkpoint_of(session))
        before, after = (
            s.fleet.evaluate(s.server.method.prediction(s.fleet))["loss"] for s in (session, again)
        )
        assert np.array_equal(before, after)


def test_few_shots_count_from_the_first_assignment():
    session = session_of(
        "method=ifca+cam+few_shots", "rounds=8", "cam.warm=base", "cam.warmup=0.5", "few_shots.rounds=2"
    )
    objectives = ["clustering_objective" in report.metrics for report in run(session, 8)]
    assert objectives == [False] * 4 + [True] * 2 + [False] * 2


def test_alternating_waits_for_the_new_cluster_model_where_cluster_first_takes_the_clients_own():
    # Both clients in cluster 0. theta: 1 - 0.2 (1.5 - 2) = 1.1 and 1 - 0.1 * 4 (2 * 1.5 - 4) = 1.4, mean 1.25.
    # On their own: 0.5 - 0.2 (1.6 - 2) = 0.58 and 0.5 - 0.4 (2 * 1.9 - 4) = 0.58. On the mean:
    # 0.5 - 0.2 (1.75 - 2) = 0.55 and 0.5 - 0.4 (2 * 1.75 - 4) = 0.7.
    for schedule, shared in (("cluster_first", 0.58), ("alternating", 0.625)):
        fleet = scalar_fleet([[(1.0, 2.0)], [(2.0, 4.0)]], lr=0.1)
        cam = CAMOptions(schedule=schedule, warmup=0.0)
        strategy = method_of("ifca+cam", fleet, clusters=2, rounds=10, options={"cam": cam})
        strategy.base.clusters, strategy.addons[0].shared = (
            Models(np.float32([[1.0], [-5.0]])),
            np.float32([0.5]),
        )
        strategy.round(fleet, 1)
        assert strategy.base.clusters.values.ravel().tolist() == pytest.approx([1.25, -5.0], rel=1e-6)
        assert strategy.addons[0].shared.tolist() == pytest.approx([shared], rel=1e-6)


def test_fine_tuning_by_hand_moves_the_cluster_part_and_then_the_shared_one():
    fleet = scalar_fleet(TWO, lr=0.1)
    options = {"cam": CAMOptions(schedule="simultaneous", warmup=0.0)}
    strategy = method_of("ifca+cam+finetune", fleet, clusters=2, rounds=1, options=options)
    strategy.base.clusters, strategy.addons[0].shared = Models(np.float32([[-1.0], [1.0]])), np.float32([0.5])
    strategy.round(fleet, 1)  # clusters -1.3 and 1.1, shared 0.4: as above
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    # 1.1 - 0.2 (1.5 - 2) = 1.2, 0.4 - 0.2 (1.6 - 2) = 0.48: 1.68; -1.3 - 0.2 (-0.9 + 2) = -1.52,
    # 0.4 - 0.2 (-1.12 + 2) = 0.224: -1.296.
    assert mse.tolist() == pytest.approx([0.32**2, 0.704**2], rel=1e-5)
    assert strategy.base.clusters.values.ravel().tolist() == pytest.approx([-1.3, 1.1], rel=1e-6)


def test_client_absent_in_the_last_round_of_warm_up_is_clustered_by_what_it_was():
    settings = ("participation.fraction=0.5", "cam.warm=local", "cam.warmup=0.75", "rounds=4", "clients=12")
    session = session_of("method=fesem+cam", *settings)
    run(session, 2)
    states = checkpoint_of(session).clients
    seen = {client for client, state in states.items() if "model/warm" in state}
    assert len(seen) > 6, "two rounds of half of the clients have seen more than half of them"
    session.run_round(3)
    assigned = np.flatnonzero(session.server.method.base.assignment >= 0)
    assert seen <= set(assigned.tolist())
    assert not any("model/warm" in state for state in checkpoint_of(session).clients.values())


def test_clusterability_is_measured_at_the_sum_of_both_parts():
    settings = ("evaluation.clusterability=true", "cam.warmup=0", "clusters=2")
    session = session_of("method=oracle+cam", *settings, "data.rotations=2")
    report = session.run_round(1)
    strategy, fleet = session.server.method, session.fleet
    fleet.begin(2)
    at, shared = strategy.base.clusters[strategy.base.assignment], strategy.addons[0].shared
    gradients = fleet.gradients(at, on_top_of=shared).gather().astype(np.float64)
    alone = fleet.gradients(at).gather().astype(np.float64)
    assert not np.allclose(gradients, alone)
    found = []
    for k in range(2):
        own = strategy.base.assignment == k
        mean = fleet.sizes[own] @ gradients[own] / fleet.sizes[own].sum()
        found.append(np.linalg.norm(mean - gradients[own], axis=1).max() / np.linalg.norm(mean))
    assert report.metrics["clusterability"] == pytest.approx(max(found), rel=1e-4)


def test_clusterability_in_the_warm_up_is_measured_at_the_model_that_clients_predict_with():
    settings = ("evaluation.clusterability=true", "cam.warm=base", "cam.warmup=0.5", "clusters=2", "rounds=4")
    session = session_of("method=ifca+cam", *settings)
    report = session.run_round(1)
    shared, fleet = session.server.method.addons[0].shared, session.fleet
    fleet.begin(2)
    every = fleet.select(np.arange(8))
    gradients = every.gradients(shared).gather().astype(np.float64)
    labels = session.server.method.labels(every)
    found = []
    for k in np.unique(labels):
        mean = np.average(gradients[labels == k], axis=0, weights=every.sizes[labels == k])
        away = np.linalg.norm(gradients[labels == k] - mean, axis=1).max()
        found.append(away / np.linalg.norm(mean))
    assert report.metrics["clusterability"] == pytest.approx(max(found), rel=1e-4)
