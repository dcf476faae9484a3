"""What a round moves and computes, per participant: by hand, and as multiples of FedAvg."""

import numpy as np
import pytest

from tests.support.experiments import run, session_of


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
    found, _ = costs("method=local", round=2)
    assert found["models_up"] == 0.0


def test_costs_are_per_participant():
    found, _ = costs("method=fedavg", "participation.fraction=0.5")
    assert found["models_down"] == 1.0 and np.isfinite(list(found.values())).all()
