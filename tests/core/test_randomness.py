"""Draws depend on what they are for, and leave torch's global generator as it was."""

import random

import numpy as np
import pytest
import torch

from archipelago.core.randomness import generator, seeded_globals, seeded_torch, torch_seed


def test_seeded_torch_draws_what_manual_seed_draws_and_puts_the_generator_back():
    seed = torch_seed(3, "training", slot="main", round=2, client=1)
    with torch.random.fork_rng():
        torch.random.manual_seed(seed)
        expected = torch.rand(5)
    before = torch.get_rng_state()
    with seeded_torch(seed):
        drawn = torch.rand(5)
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_torch_puts_the_generator_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded_torch(5):
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_globals_draws_the_same_and_puts_all_generators_back():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002  (what users do)

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    found = []
    for seed in (2**62 + 1, 2**62 + 1, 7):
        with seeded_globals(seed):
            found.append(draws())
    assert found[0] == found[1] and all(a != b for a, b in zip(found[0], found[2], strict=True))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after


@pytest.mark.parametrize("changed", [{"slot": "shared"}, {"round": 2}, {"client": 4}])
def test_every_part_of_the_key_changes_the_draws(changed):
    key = {"slot": "main", "round": 1, "client": 3}
    assert generator(0, "batches", **key).random() != generator(0, "batches", **key | changed).random()
    assert torch_seed(0, "batches", **key) != torch_seed(0, "batches", **key | changed)
