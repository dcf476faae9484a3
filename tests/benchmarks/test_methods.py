"""The bare rounds of the benchmark are the platform's methods, written down once more."""

import pytest

from benchmarks.methods import METHODS, compare
from benchmarks.workload import Workload

TINY = Workload(clients=5, samples=12, steps=3, batch=8)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if "cam" in name else pytest.mark.full) for name in METHODS]
)
def test_both_sides_end_at_the_same_models(method):
    found = compare(method, TINY, rounds=1)
    assert found["largest_difference"] < 1e-6
    assert len(found["seconds"]["bare"]) == len(found["seconds"]["platform"]) == 1
