"""Ditto, by hand; its global model is FedAvg's, and lambda = 0 is local training."""

import numpy as np
import pytest

from archipelago.strategies.ditto import DittoOptions
from archipelago.strategies.references import Prediction, Private
from tests.support.equality import assert_same_bits_everywhere
from tests.support.experiments import checkpoint_of, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once, client 1 holds (1, -2) three times: gradients 2 (w - 2) and 2 (w + 2).
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2")


def ditto_on(fleet, lam):
    ditto = method_of("ditto", fleet, options={"ditto": DittoOptions(lam=lam)})
    ditto.base.model = ditto.base.start = np.float32([1.0])
    return ditto


def personal(fleet):
    return [float(state["model/personal"][0]) for _, state in sorted(fleet.snapshot()[0].items())]


def test_two_rounds_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1, steps=2)
    ditto = ditto_on(fleet, 0.5)
    ditto.base.round(fleet)
    fleet.commit()
    # Global: 1, 1.2, 1.36 and 1, 0.4, -0.08; (1 * 1.36 + 3 * -0.08) / 4 = 0.28.
    assert ditto.base.model.tolist() == pytest.approx([0.28], rel=1e-5)
    # v_0: 1.2, then 2 (1.2 - 2) + 0.5 (1.2 - 1) = -1.5, 1.35.
    # v_1: 0.4, then 2 (0.4 + 2) + 0.5 (0.4 - 1) = 4.5, -0.05.
    assert personal(fleet) == pytest.approx([1.35, -0.05], rel=1e-5)
    # F_k + 0.25 (v - 1)^2 at each step: 1, 0.64 + 0.01 and 9, 5.76 + 0.09; (1 * 0.825 + 3 * 7.425) / 4
    assert ditto.report["personal_objective"] == pytest.approx(5.775, rel=1e-6)
    fleet.begin(2)
    ditto.base.round(fleet)
    fleet.commit()
    # v_0 continues from 1.35, pulled towards the 0.28 it received:
    #   2 (1.35 - 2) + 0.5 (1.35 - 0.28) = -0.765, 1.4265
    #   2 (1.4265 - 2) + 0.5 (1.4265 - 0.28) = -0.57375, 1.483875
    # v_1: 2 (-0.05 + 2) + 0.5 (-0.05 - 0.28) = 3.735, -0.4235
    #   2 (-0.4235 + 2) + 0.5 (-0.4235 - 0.28) = 2.80125, -0.703625
    assert personal(fleet) == pytest.approx([1.483875, -0.703625], rel=1e-5)


def test_lambda_zero_is_local_training():
    fleet, alone = scalar_fleet(TWO, lr=0.1, steps=2), scalar_fleet(TWO, lr=0.1, steps=2)
    ditto, local = ditto_on(fleet, 0.0), method_of("local", alone)
    local.base.start = np.float32([1.0])
    for number in range(2, 5):
        ditto.base.round(fleet)
        local.base.round(alone)
        fleet.commit()
        alone.commit()
        fleet.begin(number)
        alone.begin(number)
    own = [float(state["model/model"][0]) for state in alone.snapshot()[0].values()]
    assert personal(fleet) == pytest.approx(own, rel=1e-6)


def test_lambda_zero_is_local_training_to_the_last_bit():
    session, alone = session_of("method=ditto", "ditto.lam=0"), session_of("method=local")
    start = session.server.method.base.start
    run(session, 3)
    for number in range(1, 4):  # local training on the batches of the slot "personal"
        alone.fleet.begin(number)
        alone.fleet.train(start=Private("personal", default=start), slot="personal", keep="personal")
        alone.fleet.commit()
    mine, theirs = checkpoint_of(session).clients, checkpoint_of(alone).clients
    for client in range(8):
        assert np.array_equal(mine[client]["model/personal"], theirs[client]["model/personal"])


def test_global_model_is_that_of_fedavg():
    ditto, fedavg = session_of("method=ditto", *SKEWED), session_of("method=fedavg", *SKEWED)
    run(ditto, 3)
    run(fedavg, 3)
    assert np.array_equal(ditto.server.method.base.model, fedavg.server.method.base.model)


def test_larger_lambda_keeps_personal_models_closer():
    away = []
    for lam in (0.0, 1.0, 10.0):
        session = session_of("method=ditto", f"ditto.lam={lam}", *SKEWED, "local.momentum=0")
        received = session.server.method.base.model
        run(session, 1)
        models = [state["model/personal"] for state in checkpoint_of(session).clients.values()]
        away.append(np.mean([np.linalg.norm(model - received) for model in models]))
    assert away[0] > away[1] > away[2]


def test_personal_models_serve_skewed_clients_better_than_the_global_one():
    session = session_of("method=ditto", *SKEWED, "local.steps=10", "local.lr=0.1", "model.hidden=[32]")
    report = run(session, 5)[-1]
    session.fleet.begin(6)
    everyone = session.fleet.everyone
    shared = everyone.evaluate(Prediction([session.server.method.base.model]))["accuracy"]
    assert report.clients["accuracy"].mean() > shared.mean() + 0.1


def test_client_that_never_took_part_predicts_with_the_global_model():
    session = session_of("method=ditto", "participation.fraction=0.25")
    report = session.run_round(1)
    seen = {client for client, state in checkpoint_of(session).clients.items() if "model/personal" in state}
    assert len(seen) == 2
    session.fleet.begin(2)
    shared = session.fleet.everyone.evaluate(Prediction([session.server.method.base.model]))
    for client in range(8):
        same = report.clients["loss"][client] == shared["loss"][client]
        assert same == (client not in seen)


def test_client_that_blows_up_keeps_no_personal_model_and_the_others_continue():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1)
    ditto = ditto_on(fleet, 0.5)
    ditto.base.round(fleet)
    fleet.commit()
    assert ditto.base.model.tolist() == pytest.approx([1.2], rel=1e-6)
    assert "model/personal" not in fleet.snapshot()[0][1]
    assert ditto.report["personal_objective"] == pytest.approx(1.0, rel=1e-6)  # (1 - 2)^2 of client 0


def test_no_two_models_share_storage():
    session = session_of("method=ditto")
    run(session, 2)
    strategy = session.server.method
    models = [state["model/personal"] for state in checkpoint_of(session).clients.values()]
    models += [strategy.base.model, strategy.base.start]
    assert len({model.tobytes() for model in models}) == len(models) == 10
    assert not any(np.shares_memory(a, b) for i, a in enumerate(models) for b in models[:i])


def test_same_bits_everywhere():
    assert_same_bits_everywhere("method=ditto")
