"""FedDANE, by hand, by its identities, and where its correction pays."""

import numpy as np
import pytest
import torch

from archipelago.strategies.feddane import FedDANEOptions
from archipelago.strategies.fedprox import FedProxOptions
from archipelago.strategies.penalties import Linear
from tests.support.equality import assert_same_bits_everywhere
from tests.support.experiments import run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once: gradient 2 (w - 2). Client 1 holds (2, -2) three times: gradient 8 (w + 1).
TWO = [[(1.0, 2.0)], [(2.0, -2.0)] * 3]


def after_one_round(samples, mu=0.0, method="feddane", **local):
    fleet = scalar_fleet(samples, **local)
    options = {"feddane": FedDANEOptions(mu=mu), "fedprox": FedProxOptions(mu=mu)}
    strategy = method_of(method, fleet, options=options, lr=local.get("lr", 0.1))
    strategy.base.model = np.float32([1.0])
    strategy.base.round(fleet)
    return strategy, fleet


def test_one_round_by_hand():
    feddane, _ = after_one_round(TWO, mu=0.5, lr=0.01, steps=2)
    # At w = 1: grad F_0 = -2, grad F_1 = 16, g_t = (1 * -2 + 3 * 16) / 4 = 11.5.
    # Client 0, correction 13.5: -2 + 13.5 = 11.5, w = 0.885; then
    #   2 (0.885 - 2) + 13.5 + 0.5 (0.885 - 1) = -2.23 + 13.5 - 0.0575 = 11.2125, w = 0.772875
    # Client 1, correction -4.5: 16 - 4.5 = 11.5, w = 0.885; then
    #   8 (0.885 + 1) - 4.5 + 0.5 (0.885 - 1) = 15.08 - 4.5 - 0.0575 = 10.5225, w = 0.779775
    # (1 * 0.772875 + 3 * 0.779775) / 4 = 0.77805
    assert feddane.base.model.tolist() == pytest.approx([0.77805], rel=1e-6)


def test_mu_and_the_linear_term_change_the_numbers():
    without_mu, _ = after_one_round(TWO, mu=0.0, lr=0.01, steps=2)
    # As above without -0.0575: 0.7723 and 0.7792.
    assert without_mu.base.model.tolist() == pytest.approx([0.777475], rel=1e-6)
    without_correction, _ = after_one_round(TWO, mu=0.5, method="fedprox", lr=0.01, steps=2)
    # FedProx: 1.02, then -1.96 + 0.01 = -1.95, 1.0395; 0.84, then 14.72 - 0.08 = 14.64, 0.6936.
    assert without_correction.base.model.tolist() == pytest.approx([0.780075], rel=1e-6)


def test_gradient_of_the_linear_term_is_its_finite_difference():
    theta = torch.linspace(-1, 2, 5, dtype=torch.float64).requires_grad_()
    anchors = {
        "slope": torch.linspace(3, -1, 5, dtype=torch.float64),
        "origin": torch.linspace(0, 1, 5, dtype=torch.float64),
    }
    nothing = np.zeros(5, np.float32)
    for coefficient in (1.0, -1.0, 0.3):
        term = Linear(coefficient, nothing, nothing)
        (gradient,) = torch.autograd.grad(term.value(theta, anchors), theta)
        assert torch.allclose(gradient, coefficient * anchors["slope"])
        for i in range(5):
            move = torch.zeros(5, dtype=torch.float64)
            move[i] = 1e-6
            slope = (term.value(theta + move, anchors) - term.value(theta - move, anchors)) / 2e-6
            assert float(slope.detach()) == pytest.approx(float(gradient[i]), rel=1e-6)
    assert float(Linear(1.0, nothing, nothing).value(anchors["origin"], anchors)) == 0.0


def test_with_everyone_the_corrections_cancel():
    session = session_of("method=feddane", "partition=dirichlet", "partition.alpha=0.5")
    fleet, model = session.fleet, session.server.method.base.model
    fleet.begin(1)
    g = fleet.gradients(at=model)
    mean = g.average(weights=fleet.sizes)
    corrections = mean.astype(np.float64) - g.gather()
    total = fleet.sizes @ corrections
    assert np.abs(total).max() < 1e-4 * (fleet.sizes @ np.abs(corrections)).max()  # float32's rounding
    assert np.linalg.norm(corrections, axis=1).min() > 0


def test_one_full_batch_step_is_fedsgd():
    data = ("partition=dirichlet", "partition.alpha=1.0", "local.lr=0.5")
    one_step = ("local.steps=1", "local.batch=2000", "local.momentum=0", "feddane.mu=0.7")
    dane, sgd = session_of("method=feddane", *data, *one_step), session_of("method=fedsgd", *data)
    run(dane, 3)
    run(sgd, 3)
    assert np.allclose(dane.server.method.base.model, sgd.server.method.base.model, rtol=0, atol=1e-6)


def test_clients_with_equal_data_need_no_correction():
    alike = [[(1.0, 2.0), (2.0, 1.0)]] * 3
    dane, _ = after_one_round(alike, mu=0.5, lr=0.05, steps=4)
    prox, _ = after_one_round(alike, mu=0.5, method="fedprox", lr=0.05, steps=4)
    assert dane.base.model.tolist() == pytest.approx(prox.base.model.tolist(), rel=1e-6)


def test_where_clients_disagree_it_finds_the_minimum_that_fedavg_drifts_from():
    # F_0 = (w - 2)^2 and F_1 = 4 (w + 1)^2 with equal weights: 2 (w - 2) + 8 (w + 1) = 0 at w = -0.4.
    ends = {}
    for method in ("feddane", "fedavg"):
        fleet = scalar_fleet([[(1.0, 2.0)], [(2.0, -2.0)]], lr=0.05, steps=10)
        strategy = method_of(method, fleet, options={"feddane": FedDANEOptions(mu=1.0)})
        strategy.base.model = np.float32([1.0])
        for number in range(2, 32):
            strategy.base.round(fleet)
            fleet.commit()
            fleet.begin(number)
        ends[method] = float(strategy.base.model[0])
    assert ends["feddane"] == pytest.approx(-0.4, abs=1e-3)
    assert abs(ends["fedavg"] + 0.4) > 0.2


def test_it_learns_iid_digits():
    session = session_of(
        "method=feddane", "data.rotations=1", "local.steps=10", "local.lr=0.1", "local.momentum=0",
        "model.hidden=[32]",
    )  # fmt: skip
    reports = run(session, 10)
    assert reports[-1].metrics["micro_accuracy"] > 0.8 > reports[0].metrics["micro_accuracy"]


def test_client_without_a_finite_gradient_sits_out_the_second_phase():
    feddane, fleet = after_one_round([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1)
    # Client 0 alone: g_t is its own gradient, no correction, w = 1 + 0.2.
    assert feddane.base.model.tolist() == pytest.approx([1.2], rel=1e-6)
    assert fleet.dropped == {1} and len(fleet.events) == 1
    assert fleet.objectives["main"][0].tolist() == [0]


def test_model_stays_where_it_is_if_nobody_delivers():
    feddane, _ = after_one_round([[(1e30, 1.0)]] * 2)
    assert feddane.base.model.tolist() == [1.0]


def test_clients_trained_as_one_batch_get_their_own_corrections():
    settings = ("method=feddane", "feddane.mu=0.3", "data.rotations=2")
    loop, batched = session_of(*settings), session_of(*settings, "local.engine=stacked")
    run(loop, 2)
    run(batched, 2)
    assert np.allclose(loop.server.method.base.model, batched.server.method.base.model, rtol=0, atol=1e-4)


def test_same_bits_everywhere():
    assert_same_bits_everywhere("method=feddane", "feddane.mu=0.3")
