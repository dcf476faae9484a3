"""What client-level privacy costs: accuracy and epsilon of clustered methods, on embedded data.

The trials of `tune_configs/privacy.yaml --small` with the compiled engine, seed by seed; each is a line of
`results/privacy.jsonl` and is not run again (`benchmarks/kept.py`).
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import kept
from benchmarks.kept import Line

KEPT = kept.RESULTS / "privacy.jsonl"
HEAD = ("method", "", "accuracy (%)", "worst 10%", "ARI", "epsilon", "moved", "seeds")


def outcome(trial: Any, rounds: int | None = None) -> Line:
    """What one trial comes to after its last round; `moved` clients a round, by RR-Cluster."""
    reports = kept.reports_of(trial.config, rounds)
    last = reports[-1].metrics
    moved = [report.metrics["rebalanced"] for report in reports if "rebalanced" in report.metrics]
    return {
        "trial": trial.name, "group": trial.group, "seed": trial.seed,
        "accuracy": last.get("micro_accuracy", 0.0), "worst": last.get("worst10_accuracy", 0.0),
        "ari": last.get("ari"), "epsilon": last.get("epsilon"), "moved": statistics.fmean(moved) if moved else None,
    }  # fmt: skip


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """All trials; `rounds` stands for the number of seeds here. A miniature runs one, and keeps nothing."""
    return kept.measured(KEPT, kept.trials("privacy-small"), outcome, rounds, miniature)


def report(result: dict[str, Any]) -> str:
    """The table of `results/privacy.md`."""
    rows = []
    for (method, case), lines in kept.by_group(result["found"]).items():
        accuracy = kept.percent([line["accuracy"] for line in lines])
        worst = f"{100 * statistics.fmean(line['worst'] for line in lines):.1f}"
        cells = [kept.mean(lines, name) for name in ("ari", "epsilon", "moved")]
        rows.append([method, case, accuracy, worst, *cells, str(len(lines))])
    return kept.markdown(HEAD, rows, left=2)
