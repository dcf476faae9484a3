"""FedNova, by hand, by its identities, and where FedAvg minimises another objective."""

import numpy as np
import pytest

from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import config_of, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once: gradient 2 (w - 2). Client 1 holds (1, -2) three times: gradient 2 (w + 2).
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]


def after_one_round(method="fednova", shares=None, samples=TWO, momentum=0.0, steps=4, **context):
    fleet = scalar_fleet(samples, lr=0.1, steps=steps, momentum=momentum)
    fleet.begin(1, step_share=shares)
    made = method_of(method, fleet, lr=0.1, momentum=momentum, **context).base
    made.model = np.float32([1.0])
    made.round(fleet)
    return made


def test_fednova_one_round_by_hand():
    # Client 0 takes 1 of 4 steps: 1.2. Client 1 takes 4: 0.4, -0.08, -0.464, -0.7712.
    # a = (1, 4), p = (1, 3) / 4, tau_eff = 3.25:
    #   1 + 3.25 (0.25 * 0.2 / 1 + 0.75 * -1.7712 / 4) = 1 + 3.25 (0.05 - 0.3321) = 0.083175
    fednova = after_one_round(shares={0: 0.25})
    assert fednova.model.tolist() == pytest.approx([0.083175], rel=1e-5)
    assert fednova.report["effective_steps"] == pytest.approx(3.25)
    fedavg = after_one_round("fedavg", shares={0: 0.25})
    assert fedavg.model.tolist() == pytest.approx([(1.2 - 3 * 0.7712) / 4], rel=1e-5)


def test_fednova_momentum_enters_the_normalisation():
    # One step counts 1, two count 1.5 + 1 with momentum 0.5.
    # Client 0: 1.2. Client 1: 0.4; then 4.8 + 0.5 * 6 = 7.8, -0.38.
    # tau_eff = 0.25 + 0.75 * 2.5 = 2.125: 1 + 2.125 (0.25 * 0.2 + 0.75 * -1.38 / 2.5) = 0.2266
    fednova = after_one_round(shares={0: 0.5}, momentum=0.5, steps=2)
    assert fednova.model.tolist() == pytest.approx([1 + 2.125 * (0.05 - 0.414)], rel=1e-5)


@pytest.mark.parametrize("network", ["mlp", "cnn_fashion"])
def test_fednova_with_equal_steps_is_fedavg_to_the_last_bit(network):
    same = (
        "local.keep_optimizer=false",
        "partition=quantity",
        f"model={network}",
        "local.steps=2",
        "clients=4",
    )
    nova, fedavg = session_of("method=fednova", *same), session_of("method=fedavg", *same)
    run(nova, 2)
    run(fedavg, 2)
    assert np.array_equal(nova.server.method.base.model, fedavg.server.method.base.model)


def test_fednova_minimises_the_federations_objective_where_fedavg_follows_the_busy():
    # F_0 = (w - 2)^2, F_1 = (w + 2)^2, equal weights: the minimum is 0. Client 0 takes 1 of 8 steps in every round.
    ends = {}
    for method in ("fednova", "fedavg"):
        fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)]], lr=0.01, steps=8)
        made = method_of(method, fleet, lr=0.01).base
        made.model = np.float32([1.0])
        for number in range(1, 61):
            fleet.begin(number, step_share={0: 0.125})
            made.round(fleet)
            fleet.commit()
        ends[method] = float(made.model[0])
    assert abs(ends["fednova"]) < 0.1 and ends["fedavg"] < -1.0


def test_fednova_the_server_optimizer_steps_on_its_aggregate():
    plain = session_of("method=fednova", "participation.stragglers=0.5")
    half = session_of("method=fednova", "participation.stragglers=0.5", "server.lr=0.5")
    start = plain.server.method.base.model
    run(plain, 1)
    run(half, 1)
    one, other = (each.server.method.base.model - start for each in (plain, half))
    assert np.allclose(0.5 * one, other, atol=1e-6) and np.abs(one).max() > 1e-3


def test_fednova_the_model_stays_where_it_is_if_nobody_delivers():
    assert after_one_round(samples=[[(1e30, 1.0)]] * 2).model.tolist() == [1.0]


def test_fednova_takes_prox_and_refuses_other_rules_and_optimizers():
    session = session_of("method=fednova+prox+finetune", "prox.mu=2.0", "rounds=2")
    run(session, 2)
    with refused("aggregation", rule="median"):
        config_of("method=fednova", "aggregation=median")
    with refused("local-optimizer", optimizer="adam"):
        config_of("method=fednova", "local.optimizer=adam")


def test_fednova_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=fednova", "participation.stragglers=0.5")
