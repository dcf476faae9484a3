"""Clustered methods of later papers: the same bits in any layout and after a restore, the same numbers in any engine.

The whole matrix (tests/actors/test_layouts.py, test_stacked_block.py) is for `make check-all`.
"""

import numpy as np
import pytest

from tests.support.experiments import checkpoint_of, outcome, run, session_of

METHODS = ("fedclust", "fedgroup", "fedgwc", "fedrc", "flhc", "flux", "ifca+rr_cluster", "pacfl", "stocfl")


@pytest.mark.parametrize("method", METHODS)
def test_same_bits_in_any_layout_and_after_a_restore(method):
    settings = (f"method={method}", "participation.fraction=0.75", "participation.dropouts=0.2", "rounds=3",
                "evaluation.every=3", "local.steps=2")  # fmt: skip
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 3))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]], checkpoint=checkpoint_of(first))
    assert outcome(second, reports + run(second, 1, first=3)) == expected


@pytest.mark.parametrize("method", METHODS)
def test_stacked_clients_give_the_same_numbers(method):
    settings = (f"method={method}", "rounds=2", "evaluation.every=2", "local.steps=2")
    loop, stacked = session_of(*settings), session_of(*settings, "local.engine=stacked")
    one, other = run(loop, 2)[-1], run(stacked, 2)[-1]
    assert one.metrics.get("cluster_sizes") == other.metrics.get("cluster_sizes")
    models = (session.server.models()["clusters"] for session in (loop, stacked))
    assert np.allclose(*models, atol=2e-4)
