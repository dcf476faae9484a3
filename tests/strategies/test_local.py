"""Local training: private models, never averaged."""

import numpy as np
import pytest

from tests.support.experiments import checkpoint_of, run, session_of
from tests.support.scalar import method_of, scalar_fleet


def test_two_rounds_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)]], lr=0.1)
    local = method_of("local", fleet)
    local.base.start = np.float32([1.0])
    local.base.round(fleet)  # 1 + 0.2 = 1.2 and 1 - 0.6 = 0.4
    fleet.commit()
    fleet.begin(2)
    local.base.round(fleet)  # 1.2 + 0.16 = 1.36 and 0.4 - 0.48 = -0.08
    fleet.commit()
    states = fleet.snapshot()[0]
    assert states[0]["model/model"].tolist() == pytest.approx([1.36], rel=1e-6)
    assert states[1]["model/model"].tolist() == pytest.approx([-0.08], rel=1e-5)


def test_no_two_clients_share_a_model_and_the_server_keeps_the_start():
    session = session_of("method=local")
    start = session.server.method.base.start.copy()
    run(session, 2)
    models = [state["model/model"] for state in checkpoint_of(session).clients.values()]
    assert len({model.tobytes() for model in models}) == len(models)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(models) for b in models[:i])
    assert np.array_equal(session.server.method.base.start, start)


def test_client_that_has_not_trained_predicts_with_the_common_start():
    session = session_of("method=local", "participation.fraction=0.25")
    report = session.run_round(1)
    assert report.metrics["participants"] == 2
    assert sum("model/model" in state for state in checkpoint_of(session).clients.values()) == 2
    assert len(report.clients["client"]) == 8
