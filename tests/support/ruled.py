"""Rounds of a method on a scalar fleet, and what every engine must make of steps by a rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.experiments import checkpoint_of, run, session_of

# Client 0 holds (1, 2) once, client 1 holds (1, -2) three times: gradients 2 (w - 2) and 2 (w + 2).
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]


def rounds(strategy: Any, fleet: Any, count: int, first: int = 1) -> None:
    """Some rounds of a strategy, each committed."""
    for number in range(first, first + count):
        strategy.round(fleet)
        fleet.commit()
        fleet.begin(number + 1)


def personal(fleet: Any) -> list[float]:
    """Every client's private model "personal", of one number."""
    return [float(state["model/personal"][0]) for _, state in sorted(fleet.snapshot()[0].items())]


def assert_engine_agrees(engine: str, *settings: str) -> None:
    """An engine gives the models, states and costs of `loop`; `compiled` leaves it to `loop` and says so."""
    settings = ("participation.stragglers=0.5", "partition=dirichlet", "partition.alpha=1.0", *settings)
    loop, other = session_of(*settings), session_of(*settings, f"local.engine={engine}")
    first, second = run(loop, 2), run(other, 2)
    tolerance = {"trainer": 0.0, "stacked": 2e-4, "compiled": 1e-5}[engine]
    mine, theirs = (each.server.method.base.model for each in (loop, other))
    assert np.allclose(mine, theirs, rtol=0, atol=tolerance)
    one, two = checkpoint_of(loop).clients, checkpoint_of(other).clients
    for client, state in one.items():
        assert state.keys() == two[client].keys()
        for name, value in state.items():
            if name.startswith("model/"):
                assert np.allclose(value, two[client][name], rtol=0, atol=2 * tolerance)
    for a, b in zip(first, second, strict=True):
        assert all(b.metrics[name] == value for name, value in a.metrics.items() if name.startswith("cost_"))
    said = [event for report in second for event in report.events if "loop" in event]
    assert bool(said) == (engine == "compiled")
