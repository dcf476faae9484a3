"""FedAvg, by hand and by its identities."""

import numpy as np
import pytest

from tests.support.experiments import run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once, client 1 holds (1, -2) three times: gradients 2 (w - 2) and 2 (w + 2).
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]


def test_one_round_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1)
    fedavg = method_of("fedavg", fleet)
    fedavg.base.model = np.float32([1.0])
    fedavg.base.round(fleet)
    # theta_0 = 1 - 0.1 * 2 * (1 - 2) = 1.2; theta_1 = 1 - 0.1 * 2 * (1 + 2) = 0.4
    # (2.6): (1 * 1.2 + 3 * 0.4) / 4 = 0.6
    assert fedavg.base.model.tolist() == pytest.approx([0.6], rel=1e-6)


def test_uniform_weights_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1)
    fedavg = method_of("fedavg", fleet, weights="uniform")
    fedavg.base.model = np.float32([1.0])
    fedavg.base.round(fleet)
    assert fedavg.base.model.tolist() == pytest.approx([0.8], rel=1e-6)  # (1.2 + 0.4) / 2


def test_two_steps_with_momentum_kept_across_rounds_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, momentum=0.5)
    fedavg = method_of("fedavg", fleet)
    fedavg.base.model = np.float32([1.0])
    fedavg.base.round(fleet)  # g = -2, v = -2, w = 1.2
    fleet.commit()
    fleet.begin(2)
    fedavg.base.round(fleet)  # g = -1.6, v = 0.5 * -2 - 1.6 = -2.6, w = 1.46
    assert fedavg.base.model.tolist() == pytest.approx([1.46], rel=1e-6)


def test_momentum_is_forgotten_where_the_setting_says_so():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, momentum=0.5, keep_optimizer=False)
    fedavg = method_of("fedavg", fleet)
    fedavg.base.model = np.float32([1.0])
    fedavg.base.round(fleet)
    fleet.commit()
    fleet.begin(2)
    fedavg.base.round(fleet)  # v = g = -1.6, w = 1.36
    assert fedavg.base.model.tolist() == pytest.approx([1.36], rel=1e-6)


def test_it_learns_iid_digits():
    session = session_of(
        "method=fedavg", "data.rotations=1", "local.steps=10", "local.lr=0.1", "model.hidden=[32]"
    )
    reports = run(session, 10)
    assert reports[-1].metrics["micro_accuracy"] > 0.85 > reports[0].metrics["micro_accuracy"]
