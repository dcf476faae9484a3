"""Penalties that know their gradient say what autograd says, bit by bit."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from archipelago.strategies.cks import SharedPull
from archipelago.strategies.penalties import Linear, Proximal, ProximalToMixture, knows_gradient

P = 1003


def numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


CASES = [
    (Proximal(0.95, None), {"anchor": numbers(1, P)}),
    (ProximalToMixture(0.7, None, None), {"centres": numbers(2, 3, P), "importance": torch.tensor([0.2, 0.5, 0.3])}),
    (Linear(-0.3, None, None), {"slope": numbers(3, P), "origin": numbers(4, P)}),
    (SharedPull(0.3, np.arange(7, 90), None), {"mean": numbers(5, P)}),
    (SharedPull(0.3, np.array([0, 3, 900]), None), {"mean": numbers(5, P)}),
]  # fmt: skip


@pytest.mark.parametrize(("penalty", "anchors"), CASES)
def test_penalty_gradient_has_the_bits_of_autograd(penalty, anchors):
    parameters = numbers(0, P)
    live = parameters.clone().requires_grad_()
    value = penalty.value(live, anchors)
    value.backward()
    assert knows_gradient(penalty)
    found, gradient = penalty.gradient(parameters, anchors)
    assert found.item() == value.item()
    assert torch.equal(gradient, live.grad)


def test_penalty_with_a_value_of_its_own_does_not_inherit_a_gradient():
    @dataclass(frozen=True)
    class Stronger(Proximal):
        def value(self, parameters, anchors):
            return 2 * super().value(parameters, anchors)

    assert not knows_gradient(Stronger(0.5, None))
