"""One round of the server: what it reports, and what it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.fleet import InProcessFleet
from tests.support.experiments import plan_of, session_of


def test_federated_objective_is_the_mean_local_objective_by_size() -> None:
    """One step on a whole client: what it minimised is its mean squared error at the initial model."""
    settings = (
        "method=fedavg", "data=synthetic", "data.rotations=1", "data.samples=200", "partition=quantity", "clients=5",
        "model=linear_regression", "local.steps=1", "local.batch=1000",
    )  # fmt: skip
    session = session_of(*settings)
    start, plan = session.server.method.base.model.copy(), plan_of(*settings)
    everyone = np.concatenate([client.train for client in plan.clients])
    by_hand = np.mean((plan.x[everyone] @ start - plan.y[everyone]) ** 2)
    assert len({len(client.train) for client in plan.clients}) > 1
    assert session.run_round(1).metrics["federated_objective"] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("blocks", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 5], [1, 2, 3], [4], [6, 7]]])
def test_round_places_a_model_once_and_gathers_sums_not_models(
    blocks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of("method=fedavg", "records.rounds=0", blocks=blocks)
    placed: list[Any] = []
    asked: list[tuple[str, int, Any]] = []
    place, reach = InProcessFleet._place, InProcessFleet._reach

    def placing(fleet: Any, array: Any) -> Any:
        placed.append(array.shape)
        return place(fleet, array)

    def reaching(fleet: Any, method: str, arguments: Any, arrays: Any = ()) -> Any:
        found = reach(fleet, method, arguments, arrays)
        asked.append((method, len(arguments), found))
        return found

    monkeypatch.setattr(InProcessFleet, "_place", placing)
    monkeypatch.setattr(InProcessFleet, "_reach", reaching)
    session.run_round(1)
    size = session.fleet.spec.size
    assert [np.prod(shape) for shape in placed if np.prod(shape) >= size] == [
        size,
        size,
    ]  # to train; to evaluate
    sums = [part for method, _, found in asked if method == "combine" for part in found.values()]
    assert len(sums) == len(blocks) and "columns" not in {method for method, _, _ in asked}
    assert {total.shape for _, total in sums} == {
        (1, size)
    }  # one sum a block, whatever the number of its clients
