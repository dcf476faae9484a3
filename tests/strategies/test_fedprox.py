"""FedProx, by hand; mu = 0 is FedAvg; the penalty changes the gradient."""

import numpy as np
import pytest
import torch

from archipelago.strategies.fedprox import FedProxOptions
from archipelago.strategies.penalties import Proximal
from tests.support.experiments import outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet


def test_two_steps_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, steps=2)
    fedprox = method_of("fedprox", fleet, options={"fedprox": FedProxOptions(mu=0.5)})
    fedprox.base.model = np.float32([1.0])
    fedprox.base.round(fleet)
    # step 1: g = 2 (1 - 2) + 0.5 * 0 = -2, w = 1.2; step 2: g = 2 (1.2 - 2) + 0.5 * 0.2 = -1.5, w = 1.35
    assert fedprox.base.model.tolist() == pytest.approx([1.35], rel=1e-6)


def test_two_clients_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)] * 2], lr=0.1, steps=2)
    fedprox = method_of("fedprox", fleet, options={"fedprox": FedProxOptions(mu=0.5)})
    fedprox.base.model = np.float32([1.0])
    fedprox.base.round(fleet)
    # Client 0 comes to 1.35, as above. Client 1: g = 2 (1 + 2) = 6, w = 0.4; g = 2 (0.4 + 2) + 0.5 (0.4 - 1) = 4.5,
    # w = -0.05. Mean by size: (1.35 + 2 * -0.05) / 3.
    assert fedprox.base.model.tolist() == pytest.approx([1.25 / 3], rel=1e-6)


def test_mu_zero_has_the_bits_of_fedavg():
    plain, prox = session_of("method=fedavg"), session_of("method=fedprox", "fedprox.mu=0")
    assert outcome(plain, run(plain, 3)) == outcome(prox, run(prox, 3))


def test_larger_mu_keeps_clients_closer():
    away = []
    for mu in (0.0, 0.5, 5.0):
        session = session_of("method=fedprox", f"fedprox.mu={mu}", "local.momentum=0", "local.steps=8")
        fleet, start = session.fleet, session.server.method.base.model
        fleet.begin(1)
        theta = fleet.train(start=start, penalties=[Proximal(mu, start)])
        away.append(float(theta.distances(start).mean()))
    assert away[0] > away[1] > away[2]


def test_gradient_of_the_penalty_is_its_finite_difference():
    theta = torch.linspace(-1, 2, 5, dtype=torch.float64).requires_grad_()
    anchor = {"anchor": torch.linspace(3, 0, 5, dtype=torch.float64)}
    penalty = Proximal(0.7, np.zeros(5, np.float32))
    (gradient,) = torch.autograd.grad(penalty.value(theta, anchor), theta)
    step = 1e-6
    for i in range(5):
        move = torch.zeros(5, dtype=torch.float64)
        move[i] = step
        slope = (penalty.value(theta + move, anchor) - penalty.value(theta - move, anchor)) / (2 * step)
        assert float(slope.detach()) == pytest.approx(float(gradient[i]), rel=1e-6)
    assert float(gradient.abs().sum()) > 0
