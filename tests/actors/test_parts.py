"""The parts of an additive method, measured alone: FeMAM's levels, worked out by hand and in a run."""

import numpy as np
import pytest

from actors.parts import part_metrics
from archipelago.strategies.femam import FeMAMOptions
from archipelago.strategies.references import Models
from tests.support.experiments import run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Both clients see x = 1; client 0 wants w = 2, client 1 wants w = -2 and has three times the data.
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
SIZES = np.array([1.0, 3.0])
FRESH = 0.5


@pytest.mark.parametrize("prune", ["none", "real"])
def test_levels_of_femam_are_measured_by_hand(prune):
    """A global level of -0.2, then a personal one of which client 0, if it may, uses nothing."""
    fleet = scalar_fleet(TWO, lr=0.1)
    options = FeMAMOptions(levels=[1], schedule=[1, 1], mu=0.0, prune=prune)
    femam = method_of("femam", fleet, rounds=100, options={"femam": options})
    femam.base.levels[0] = Models(np.float32([[-0.2]]))
    femam.base.closed, femam.base.curve = True, np.ones(1)
    femam.base.reference = np.array([1.0, 100.0])
    fleet.begin(2)
    femam.round(fleet, 2)
    fleet.commit()
    # From -0.2, on (G + theta) / 2 - y: theta_0 = -0.2 + 0.1 * 2.2 = 0.02 and theta_1 = -0.2 - 0.1 * 1.8 = -0.38.
    prediction = femam.prediction(fleet)
    assert prediction.names == ["level_1", "level_2"]
    found = part_metrics(fleet, prediction, np.arange(2), SIZES, FRESH, ["loss"])
    assert found["part_level_1_norm"] == pytest.approx(0.2 / FRESH)
    assert found["part_level_1_loss"] == pytest.approx((2.2**2 + 3 * 1.8**2) / 4)
    shares = {
        # Covariance with the sum, over the four samples: client 0's sum is -0.18, or -0.2 alone; client 1's is -0.58.
        "none": (0.2 * 0.18 + 3 * 0.2 * 0.58, -0.02 * 0.18 + 3 * 0.38 * 0.58),
        "real": (0.2 * 0.2 + 3 * 0.2 * 0.58, 3 * 0.38 * 0.58),
    }[prune]
    assert found["part_level_1_variance"] == pytest.approx(shares[0] / sum(shares), rel=1e-5)
    assert found["part_level_2_variance"] == pytest.approx(shares[1] / sum(shares), rel=1e-5)
    if prune == "real":  # of those who use it
        assert found["part_level_2_norm"] == pytest.approx(0.38 / FRESH)
        assert found["part_level_2_loss"] == pytest.approx(1.62**2, rel=1e-5)
    else:
        assert found["part_level_2_norm"] == pytest.approx((0.02 + 0.38) / 2 / FRESH)
        assert found["part_level_2_loss"] == pytest.approx((1.98**2 + 3 * 1.62**2) / 4, rel=1e-5)


def test_runs_of_femam_measure_every_level_that_is_in_use():
    session = session_of("method=femam", "femam.levels=[1,2]", "femam.schedule=[1,1]", "femam.prune=none")
    first, *later = [report.metrics for report in run(session, 4)]
    assert not any(name.startswith("part_") for name in first)  # one level is no sum
    for number, metrics in zip((2, 3, 3), later, strict=True):
        levels = [f"part_level_{level + 1}" for level in range(number)]
        measured = {name for name in metrics if name.startswith("part_")}
        assert measured == {
            f"{level}_{each}" for level in levels for each in ("norm", "accuracy", "variance")
        }
        assert sum(metrics[f"{level}_variance"] for level in levels) == pytest.approx(1.0)
        # Levels begin as copies of the global model, which few steps move little.
        assert all(metrics[f"{level}_norm"] == pytest.approx(1.0, abs=0.3) for level in levels)
