"""The Grafana dashboard asks for what runs tell; tests/sweeps/test_ray.py scrapes it from a cluster."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from actors import telemetry
from actors.reports import RoundReport

DASHBOARD = Path(telemetry.__file__).with_name("grafana_dashboard.json")


def test_every_panel_asks_for_a_metric_that_exists_by_tags_that_it_has() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    known = {f"ray_{name}": {*telemetry.TAGS, *telemetry.EXTRA.get(name, ())}
             for name in (*telemetry.GAUGES, *telemetry.COUNTERS)}  # fmt: skip
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"ray_archipelago_\w+", target["expr"])
            by = re.search(r" by \(([^)]*)\)", target["expr"])
            tags = re.findall(r"(\w+)=~", target["expr"]) + re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert {*tags, *(by.group(1).split(", ") if by else [])} <= known[name], panel["title"]
            asked.add(name)
    assert asked == set(known)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_nothing_is_reported_where_there_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    telemetry.Telemetry("run", "ifca", "digits", 0).update(RoundReport(1), lambda: 1 / 0)
