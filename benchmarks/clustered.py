"""Clustered methods on embedded data: who finds the groups, who is worst off, what it costs.

The trials of `tune_configs/clustered.yaml --small` with the compiled engine, one after the other in this process, seed
by seed. What each came to is a line of `results/clustered.jsonl`, and a trial that is there already is not run again:
the command can be stopped and continued. To measure anew, move the file away.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks import kept
from benchmarks.kept import Line

KEPT = kept.RESULTS / "clustered.jsonl"
LAST_CASE = "other labels"
LONGER = 40  # rounds of two more groups of trials: whether CFL, FedEM and FedRC need more than the file has
HEAD = (
    "method", "accuracy (%)", "worst 10%", "ARI", "clusters", "silhouette", "WAS", "down", "up", "computation", "seeds",
)  # fmt: skip
COSTS = ("cost_models_down", "cost_models_up", "cost_computation")


def trials() -> list[Any]:
    """The trials of the file and the longer ones: two of its cases seed by seed, then the third."""
    found = [each for trial in kept.trials("clustered-small") for each in (trial, *longer(trial))]
    return sorted(found, key=lambda trial: (LAST_CASE in trial.group, trial.seed))


def longer(trial: Any) -> list[Any]:
    """The same trial with more rounds, of the methods whose result may be a matter of time; nothing of others."""
    method, _, case = trial.group.partition(" | ")
    if method not in ("fedavg", "CFL", "fedem", "fedrc") or case not in ("turned", LAST_CASE):
        return []
    config = dataclasses.replace(trial.config, rounds=LONGER)
    group = f"{trial.group}, {LONGER} rounds"
    return [dataclasses.replace(trial, name=f"{trial.name}-{LONGER}-rounds", group=group, config=config)]


def outcome(trial: Any, rounds: int | None = None) -> Line:
    """What one trial comes to: metrics of its last round, and its costs over all rounds."""
    reports = kept.reports_of(trial.config, rounds)
    last = reports[-1].metrics
    sizes = last.get("cluster_sizes")
    return {
        "trial": trial.name, "group": trial.group, "seed": trial.seed,
        "accuracy": last.get("micro_accuracy", 0.0), "worst": last.get("worst10_accuracy", 0.0),
        "used": None if sizes is None else sum(size > 0 for size in sizes),
        **{name: last.get(name) for name in ("ari", "silhouette", "was")},
        **{name: statistics.fmean(report.metrics[name] for report in reports) for name in COSTS},
    }  # fmt: skip


def rows(found: Iterable[Line]) -> dict[str, list[list[str]]]:
    """By case, a row for each method: means over seeds, and the standard deviation of accuracy."""
    cases: dict[str, list[list[str]]] = {}
    for (method, case), lines in kept.by_group(found).items():
        cells = [kept.mean(lines, name) for name in ("ari", "used", "silhouette", "was", *COSTS)]
        worst = statistics.fmean(100 * line["worst"] for line in lines)
        accuracy = kept.percent([line["accuracy"] for line in lines])
        cases.setdefault(case, []).append([method, accuracy, f"{worst:.1f}", *cells, str(len(lines))])
    return cases


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """All trials; `rounds` stands for the number of seeds here. A miniature runs one, and keeps nothing."""
    return kept.measured(KEPT, trials(), outcome, rounds, miniature)


def report(result: dict[str, Any]) -> str:
    """A table in Markdown for each case: those of `results/clustered.md`."""
    cases = rows(result["found"])
    return "\n\n".join(f"### {case}\n\n{kept.markdown(HEAD, lines)}" for case, lines in cases.items())
