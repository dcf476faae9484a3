"""Seconds to divide 60,000 samples among 10,000 clients, by every partition, against a limit of 5 s."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.schema import composed
from archipelago.core.settings import PartitionSettings
from archipelago.data import PARTITIONS, Labels
from archipelago.data.division import Task, divide
from benchmarks.tables import table, verdict

LIMIT = 5.0  # seconds
CASES: dict[str, dict[str, Any]] = {
    "iid": {},
    "quantity": {"alpha": 1.0},
    "dirichlet": {"alpha": 0.1},
    "dirichlet, alpha 0.01": {"alpha": 0.01},
    "dirichlet, alpha 0.01, as fedbase": {"alpha": 0.01, "compat": "fedbase"},
    "dirichlet, shared out anew": {"alpha": 0.1, "test_share": 0.25, "min_size": 3},
    "cluster_dirichlet": {"groups": 100},
    "n_class": {},
    "cluster_n_class": {"groups": 100, "classes": 3, "classes_within": 2},
    "balanced_dirichlet": {},
    "femam_cluster": {"groups": 5, "classes": 5},
    "multilevel": {"level_groups": [2, 4], "level_classes": [1, 2], "test_share": 0.25, "min_size": 2},
    "mixture": {"mixture": "random"},
    "natural": {},
}


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """The best of a few measurements of each partition; no cache."""
    samples, clients = (1200, 20) if miniature else (60_000, 10_000)
    train, test = np.arange(samples) % 10, np.arange(samples // 6) % 10
    owners, sources = np.arange(samples) * clients // samples, np.arange(samples) // 10 % 2
    labels = Labels(
        "generated", train, test, 10, sources, sources[: len(test)], owners, np.arange(len(test)) % clients
    )
    plain = Labels("generated", train, test, 10)
    rows: list[dict[str, Any]] = []
    for case, settings in CASES.items():
        name = case.partition(",")[0]
        chosen: Any = composed(PartitionSettings)(
            name=name, **({"groups": 5} if miniature else {}) | settings
        )
        if miniature:
            chosen.groups = min(chosen.groups, 5)
        seconds, outcome = [], ""
        for _ in range(rounds or 3):
            started = time.perf_counter()
            try:
                known = labels if name in ("mixture", "natural") else plain
                made = divide(PARTITIONS.find(name), Task(known, chosen, clients, 0))
                outcome = f"{sum(len(client.train) for client in made.clients):,} samples"
            except UserError as error:
                outcome = f"refused: {error}"
            seconds.append(time.perf_counter() - started)
        rows.append({"partition": case, "seconds": min(seconds), "outcome": outcome})
    kept = max(row["seconds"] for row in rows) <= LIMIT
    return {"limit": LIMIT, "kept": kept, "clients": clients, "samples": samples, "rows": rows}


def report(result: dict[str, Any]) -> str:
    """Every partition and its seconds."""
    worst = max(row["seconds"] for row in result["rows"])
    title = (
        f"{result['samples']:,} samples among {result['clients']:,} clients: at most {worst:.2f} s, limit "
        f"{result['limit']:g} s: {verdict(worst, result['limit'])}"
    )
    rows = [[row["partition"], f"{row['seconds']:.2f}", row["outcome"][:100]] for row in result["rows"]]
    return table(title, ["partition", "seconds", "outcome"], rows)
