"""Modules of users: what they draw is seeded, what they add is noticed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.experiments import outcome, run, session_of


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
def test_draws_of_a_module_from_global_generators_are_seeded_on_any_packing(method: str) -> None:
    settings = (f"method={method}", "model.target=tests.support.modules.Drawing")
    found = []
    for blocks in (None, [[0, 3], [1, 2, 4, 5, 6, 7]]):
        random.seed()
        np.random.seed()  # noqa: NPY002  (another process begins with another state)
        session = session_of(*settings, blocks=blocks)
        found.append(outcome(session, run(session, 2)))
    assert found[0] == found[1]


def test_parameter_that_is_added_in_training_is_refused() -> None:
    session = session_of("method=fedavg", "model.target=tests.support.modules.Growing")
    with refused("added-later"):
        run(session, 1)
