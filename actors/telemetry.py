"""What a run reports to Ray's metrics endpoint every round, for Prometheus and `actors/grafana_dashboard.json`.

Ray puts `ray_` before every name. Where this process is not connected to Ray, nothing is reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from actors.reports import RoundReport
from archipelago.core.traffic import bytes_moved
from archipelago.core.vocabulary import Vocabulary, built_in, registered

TAGS = ("run", "method", "data", "seed")


def _measured(known: Vocabulary) -> dict[str, str]:
    """A gauge for every metric that asks for one."""
    return {
        f"archipelago_{each.name}": f"Test {each.label}, weighted by training samples"
        for each in known.shown("monitor")
    }


GAUGES = {
    "archipelago_round": "Rounds done",
    **_measured(built_in()),
    "archipelago_cluster_size": "Clients in each cluster",
    "archipelago_round_seconds": "Seconds of the last round by stage; `round` is the whole",
}
COUNTERS = {
    "archipelago_rounds_total": "Rounds run, repeated ones included",
    "archipelago_bytes_total": "Bytes of models that clients received and of updates that they sent, by direction",
}
EXTRA = {
    "archipelago_cluster_size": ("cluster",),
    "archipelago_round_seconds": ("stage",),
    "archipelago_bytes_total": ("direction",),
}


@functools.lru_cache(maxsize=1)
def _instruments() -> dict[str, Any]:
    from ray.util.metrics import Counter, Gauge

    made: dict[str, Any] = {}
    for kind, names in ((Gauge, GAUGES | _measured(registered())), (Counter, COUNTERS)):
        for name, about in names.items():
            made[name] = kind(name, description=about, tag_keys=(*TAGS, *EXTRA.get(name, ())))
    return made


class Telemetry:
    """The metrics of one run."""

    def __init__(self, run: str, method: str, data: str, seed: int) -> None:
        self._tags = dict(zip(TAGS, (run, method, data, str(seed)), strict=True))
        self._model_bytes = 0

    def update(self, report: RoundReport, spec: Callable[[], Any]) -> None:
        """Tell about a finished round; `spec` gives the layout of a model, and is asked once."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if not self._model_bytes:
            self._model_bytes = 4 * max((part["stop"] for part in spec()), default=0)
        metrics = report.metrics
        self._set("archipelago_round", report.round)
        for each in registered().shown("monitor"):
            self._set(f"archipelago_{each.name}", metrics.get(f"micro_{each.name}"))
        sizes = metrics.get("cluster_sizes")
        for cluster, size in enumerate(sizes if isinstance(sizes, list) else []):
            self._set("archipelago_cluster_size", size, cluster=str(cluster))
        for stage, seconds in report.timings.items():
            if not stage.startswith("share_"):
                self._set("archipelago_round_seconds", seconds, stage=stage)
        instruments = _instruments()
        instruments["archipelago_rounds_total"].inc(1, tags=self._tags)
        for direction, size in (bytes_moved(metrics, self._model_bytes) or {}).items():
            moved = size * float(metrics["participants"])  # type: ignore[arg-type]  # counted by the server
            if moved > 0:
                instruments["archipelago_bytes_total"].inc(moved, tags={**self._tags, "direction": direction})

    def _set(self, name: str, value: Any, **extra: str) -> None:
        if isinstance(value, int | float) and name in _instruments():
            _instruments()[name].set(value, tags={**self._tags, **extra})
