"""What a round moves and computes, per participant: by hand, and as multiples of FedAvg."""

import numpy as np
import pytest

from tests.support.experiments import run, session_of
from tests.support.methods import compositions


def costs(*setting, round=1, rounds=4):
    session = session_of(*setting, f"rounds={rounds}")
    reports = run(session, round)
    return {
        name[5:]: value for name, value in reports[-1].metrics.items() if name.startswith("cost_")
    }, session


def test_fedavg_is_the_unit():
    found, _ = costs("method=fedavg")
    assert (found["models_down"], found["models_up"], found["forwards"]) == (1.0, 1.0, 0.0)
    assert found["gradients"] == 3 * 16  # steps x batch


def test_ifca_sends_all_clusters_and_evaluates_all_of_them():
    found, session = costs("method=ifca", "clusters=3")
    assert (found["models_down"], found["models_up"]) == (3.0, 1.0)
    assert found["forwards"] == pytest.approx(3 * session.server.setup.sizes.mean())


def test_ifca_cam_moves_and_trains_twice():
    found, session = costs("method=ifca+cam", "clusters=3", "cam.warmup=0")
    assert (found["models_down"], found["models_up"]) == (4.0, 2.0)
    assert found["gradients"] == 2 * 3 * 16
    # (K + 1) forward passes over the own data for (2), and each frozen part once per distinct sample.
    sizes = session.server.setup.sizes.mean()
    assert 4 * sizes < found["forwards"] <= 4 * sizes + 2 * 3 * 16


@pytest.mark.parametrize("method", ["fesem", "wecfl"])
def test_parameter_based_methods_cost_what_fedavg_costs(method):
    found, _ = costs(f"method={method}", round=2)
    assert (found["models_down"], found["models_up"], found["forwards"]) == (1.0, 1.0, 0.0)


def test_fesem_cam_doubles_fedavg_as_the_thesis_says():
    found, _ = costs("method=fesem+cam", "cam.warmup=0", round=2)
    assert (found["models_down"], found["models_up"], found["gradients"]) == (2.0, 2.0, 2 * 3 * 16)


def test_local_training_moves_nothing_after_the_first_round():
    first, _ = costs("method=local")
    found, _ = costs("method=local", round=2)
    assert (first["models_down"], first["models_up"]) == (1.0, 0.0)
    assert (found["models_down"], found["models_up"], found["models_stored"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("method", "stored", "down", "up", "trainings"),
    [
        ("fedavg", 1, 1, 1, 1),
        ("ifca", 3, 3, 1, 1),  # thesis, Table 7.6: K times FedAvg's storage and communication
        ("ifca+cam", 4, 4, 2, 2),  # and K + 1 times
        ("fedem", 3, 3, 3, 3),
        ("fedsoft", 4, 3, 1, 1),  # the centres, and the client's own model
        ("ditto", 2, 1, 1, 2),
        ("fedper", 2, 1, 1, 1),
        ("cfl", 1, 1, 1, 1),
        ("robust", 1, 1, 1, 1),
        ("feddist", 1, 1, 1, 1),
        ("scaffold", 3, 2, 2, 1),  # the model, both controls
        ("fedbn", 2, 1, 1, 1),
        ("fednova", 1, 1, 1, 1),
        ("moon", 2, 1, 1, 1),  # the model, and the client's last one
        ("pfedme", 2, 1, 1, 5),
        ("apfl", 2, 1, 1, 2),
        ("perfedavg", 1, 1, 1, 2),
        ("fedgwc", 1, 1, 1, 1),
        ("feddrift", 1, 1, 1, 1),
        ("ifca+rr_cluster", 3, 3, 1, 1),  # what IFCA costs
    ],
)
def test_models_stored_moved_and_trained_in_the_second_round(method, stored, down, up, trainings):
    more = ("cam.warmup=0",) if "cam" in method else ()
    found, _ = costs(f"method={method}", "clusters=3", *more, round=2)
    assert (found["models_stored"], found["models_down"], found["models_up"]) == (stored, down, up)
    assert found["gradients"] == trainings * 3 * 16


def test_feddane_takes_a_full_gradient_and_brings_the_mean_back():
    found, session = costs("method=feddane", round=2)
    assert (found["models_down"], found["models_up"]) == (
        2.0,
        2.0,
    )  # model and mean gradient, gradient and model
    assert found["gradients"] == pytest.approx(3 * 16 + session.server.setup.sizes.mean())


@pytest.mark.parametrize("method", ["fedem", "fedsoft"])
def test_losses_under_all_models_count_as_they_do_for_ifca(method):
    found, session = costs(f"method={method}", "clusters=3")
    assert found["forwards"] == pytest.approx(3 * session.server.setup.sizes.mean())
    # Backward is two forward passes: 48 trained samples are 144.
    trainings = 3 if method == "fedem" else 1
    assert found["computation"] == pytest.approx(trainings + found["forwards"] / 144)


def test_femam_moves_its_newest_level_only():
    schedule = ("method=femam", "femam.levels=[1,2]", "femam.schedule=[1,2]", "femam.prune=none")
    by_round = [costs(*schedule, round=number)[0] for number in (1, 2, 3)]
    # Level 2 opens in round 2: its start, and what level 1 came to at its end.
    assert [found["models_down"] for found in by_round] == [1.0, 2.0, 1.0]
    assert [found["models_stored"] for found in by_round] == [1.0, 2.0, 2.0]
    assert [found["models_up"] for found in by_round] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("method", compositions())
def test_every_method_says_what_it_costs_as_multiples_of_fedavg(method):
    found, _ = costs(f"method={method}", "participation.stragglers=0.5", round=2)
    multiples = [found[name] for name in ("computation", "models_stored", "models_down", "models_up")]
    assert np.isfinite(multiples).all() and min(multiples) >= 0 and found["computation"] > 0
    if method == "fedavg":
        assert multiples == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "local",
    [("local.steps=2",), ("local.steps=37",), ("local.epochs=2",), ("local.steps=5", "local.batch=1000")],
)
def test_method_without_local_training_is_measured_by_the_one_that_fedavg_would_do(local):
    # Unequal clients, short last batches, stragglers: the samples are counted as FedAvg's training counts them.
    same = ("partition=dirichlet", "partition.alpha=0.5", "participation.stragglers=0.5", *local)
    trained, _ = costs("method=fedavg", *same)
    found, session = costs("method=fedsgd", *same)
    assert found["gradients"] == session.server.setup.sizes.mean()  # every sample once
    assert found["computation"] == pytest.approx(found["gradients"] / trained["gradients"], rel=1e-12)


def test_costs_are_per_participant():
    found, _ = costs("method=fedavg", "participation.fraction=0.5")
    assert found["models_down"] == 1.0 and np.isfinite(list(found.values())).all()
