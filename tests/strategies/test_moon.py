"""MOON: by hand, by its identities, and what its term does to the gradient."""

import math

import numpy as np
import pytest
import torch

from archipelago.strategies.moon import ModelContrast
from tests.support.equality import assert_same_bits_everywhere
from tests.support.experiments import checkpoint_of, run, session_of

SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2", "clusters=1")


def test_moon_the_term_by_hand():
    nothing = np.zeros(1, np.float32)
    term = ModelContrast(2.0, 0.5, nothing, nothing)
    anchors = {
        "own_features": torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        "received": torch.tensor([[1.0, 0.0], [1.0, 0.0]]),
        "previous": torch.tensor([[0.0, 1.0], [-1.0, -1.0]]),
    }
    # Cosines 1 and 0; sqrt(1/2) and -1. Over tau: 2, 0; sqrt(2), -2.
    first = -math.log(math.exp(2) / (math.exp(2) + 1))
    second = -math.log(math.exp(2**0.5) / (math.exp(2**0.5) + math.exp(-2)))
    assert float(term.value(nothing, anchors)) == pytest.approx(2.0 * (first + second) / 2, rel=1e-6)


def test_moon_the_gradient_of_the_term_is_its_finite_difference():
    nothing = np.zeros(1, np.float32)
    term = ModelContrast(1.5, 0.5, nothing, nothing)
    draw = torch.Generator().manual_seed(0)
    z, received, previous = (torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    z.requires_grad_()
    given = {"received": received, "previous": previous}
    (gradient,) = torch.autograd.grad(term.value(nothing, {**given, "own_features": z}), z)
    move = torch.zeros_like(z)
    move[1, 2] = 1e-6
    up, down = (float(term.value(nothing, {**given, "own_features": z.detach() + s * move})) for s in (1, -1))
    assert float(gradient[1, 2]) == pytest.approx((up - down) / 2e-6, rel=1e-5) != 0.0


def test_moon_without_mu_is_fedavg_to_the_last_bit():
    moon, fedavg = session_of("method=moon", "moon.mu=0", *SKEWED), session_of("method=fedavg", *SKEWED)
    run(moon, 2)
    run(fedavg, 2)
    assert np.array_equal(moon.server.method.base.model, fedavg.server.method.base.model)


def test_moon_the_first_round_has_nothing_to_contrast():
    moon, fedavg = session_of("method=moon", "moon.mu=5", *SKEWED), session_of("method=fedavg", *SKEWED)
    run(moon, 1)
    run(fedavg, 1)
    assert np.allclose(moon.server.method.base.model, fedavg.server.method.base.model, rtol=0, atol=1e-6)
    run(moon, 1, first=2)
    run(fedavg, 1, first=2)
    assert not np.allclose(moon.server.method.base.model, fedavg.server.method.base.model, rtol=0, atol=1e-4)


def test_moon_one_step_adds_the_gradient_of_the_term():
    # A second round of one full-batch step: the local model moves by -lr (grad l_sup + mu grad l_con).
    settings = ("local.steps=1", "local.batch=2000", "local.momentum=0", "local.lr=0.1", "clients=3", *SKEWED)
    moved = {}
    for mu in (0.0, 1.0, 2.0):
        session = session_of("method=moon", f"moon.mu={mu}", *settings)
        run(session, 2)
        moved[mu] = checkpoint_of(session).clients[1]["model/previous"].astype(np.float64)
    one, two = moved[1.0] - moved[0.0], moved[2.0] - moved[0.0]
    assert np.linalg.norm(one) > 1e-5 and np.allclose(two, 2 * one, atol=1e-6)
    # By torch, from the models themselves.
    session = session_of("method=moon", "moon.mu=0", *settings)
    run(session, 1)
    received, previous = session.server.method.base.model, checkpoint_of(session).clients[1]["model/previous"]
    block = session.fleet.blocks[0]
    index = block.clients[1].train
    features = {name: block.forward.features(vector, index) for name, vector in
                (("received", received), ("previous", previous))}  # fmt: skip
    block.model.load(received)
    block.model.touch()
    x, _ = block.samples.batch(index)
    network = block.model.module.network
    z = network.features(x)
    value = ModelContrast(1.0, 0.5, received, previous).value(z, {**features, "own_features": z})
    block.model.zero_grad()
    value.backward()
    assert np.allclose(one, -0.1 * block.model.flat_gradient(), atol=1e-6)


def test_moon_mu_and_tau_change_the_numbers():
    ends = []
    for more in ((), ("moon.mu=5",), ("moon.tau=2",)):
        session = session_of("method=moon", *SKEWED, *more)
        run(session, 2)
        ends.append(session.server.method.base.model)
    assert not any(np.array_equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_moon_makes_local_models_agree_with_the_received_one_rather_than_with_their_last():
    contrast = []
    for mu in (0.0, 10.0):
        session = session_of("method=moon", f"moon.mu={mu}", *SKEWED, "local.steps=10", "local.momentum=0")
        run(session, 2)
        received, before = session.server.method.base.model, checkpoint_of(session).clients
        run(session, 1, first=3)
        block, values = session.fleet.blocks[0], []
        for client, state in checkpoint_of(session).clients.items():
            models = {
                "own_features": state["model/previous"],
                "received": received,
                "previous": before[client]["model/previous"],
            }
            index = block.clients[client].train
            seen = {name: block.forward.features(model, index) for name, model in models.items()}
            values.append(float(ModelContrast(1.0, 0.5, received, received).value(received, seen)))
        contrast.append(np.mean(values))
    assert contrast[1] < contrast[0] - 0.05


@pytest.mark.parametrize("engine", ["stacked", "trainer", "compiled"])
def test_moon_in_every_engine(engine):
    settings = ("method=moon", *SKEWED, "moon.mu=2", "participation.stragglers=0.5")
    loop, other = session_of(*settings), session_of(*settings, f"local.engine={engine}")
    run(loop, 3)
    events = [event for report in run(other, 3) for event in report.events]
    mine, theirs = (each.server.method.base.model for each in (loop, other))
    tolerance = {"trainer": 0.0, "stacked": 2e-4, "compiled": 1e-5}[engine]
    assert np.allclose(mine, theirs, rtol=0, atol=tolerance)
    assert any("loop" in event for event in events) == (engine == "compiled")


def test_moon_says_when_a_network_has_no_features():
    report = session_of("method=moon", "model=linear").run_round(1)
    assert any("nothing to contrast" in event for event in report.events)


def test_moon_takes_prox_and_finetune():
    session = session_of("method=moon+prox+finetune", "prox.mu=0.5", "rounds=2")
    run(session, 2)
    plain = session_of("method=moon", "rounds=2")
    run(plain, 2)
    assert not np.array_equal(session.server.method.base.model, plain.server.method.base.model)


def test_moon_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=moon")
