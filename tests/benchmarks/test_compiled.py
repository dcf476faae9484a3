"""The comparison with torch: both sides compute the same losses; nothing here looks at a clock."""

import pytest

from benchmarks import compiled
from lightning_modules.engines.compiled.build import CannotBuild, chosen_instructions, library

try:
    library()
except CannotBuild as missing:
    pytest.skip(str(missing), allow_module_level=True)


def test_compiled_measures_what_has_a_limit_and_says_what_was_missed():
    instructions, _ = chosen_instructions()
    with compiled.built_for(instructions):
        found = compiled.measured(1, 40)  # compares the losses of both sides
    found["workload W"] = {"compiled_ms": 1.0, "torch_ms": 2.0, "ratio": 0.5}
    assert set(compiled.LIMITS[instructions]) <= set(found)
    text = compiled.report({"instructions": {instructions: found}, "limits": compiled.LIMITS})
    assert "cnn_cifar step" in text and "IFCA losses" in text
    assert ("MISSED" in text.splitlines()[-1]) == (compiled.LIMITS[instructions]["workload W"] < 0.5)
