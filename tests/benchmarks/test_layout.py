"""The simulated layouts: measured clients, plain data, and no layout below what none can beat."""

import json

from benchmarks import layout


def test_layout_in_miniature():
    result = json.loads(json.dumps(layout.run(1, True)))
    assert set(result["cases"]) == set(layout.PARTITIONS)
    for case in result["cases"].values():
        assert all(seconds > 0 for stage in case["seconds"].values() for seconds in stage)
        for each in case["actors"].values():
            ratios = [each[name]["over_ideal"] for name in ("until 0.2.0", "expected", "rebalanced")]
            assert min(ratios) >= 1 - 1e-9 and min(each["participation"].values()) >= 1 - 1e-9
            assert each["ideal_seconds"] >= each["share_seconds"] * (1 - 1e-9)
    assert "re-balanced" in layout.report(result)
