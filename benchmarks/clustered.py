"""Clustered methods on embedded data: who finds the groups, who is worst off, what it costs.

The trials of `tune_configs/clustered.yaml --small` with the compiled engine, one after the other in this process, seed
by seed. What each came to is a line of `results/clustered.jsonl`, and a trial that is there already is not run again:
the command can be stopped and continued. To measure anew, move the file away.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = "clustered-small"
KEPT = Path(__file__).parents[1] / "results" / "clustered.jsonl"
LAST_CASE = "other labels"
LONGER = 40  # rounds of one more group of trials: whether CFL needs more than the file has
HEAD = (
    "method", "accuracy (%)", "worst 10%", "ARI", "clusters", "silhouette", "WAS", "down", "up", "computation", "seeds",
)  # fmt: skip
COSTS = ("cost_models_down", "cost_models_up", "cost_computation")


def trials() -> list[Any]:
    """The trials of the file and the longer ones: two of its cases seed by seed, then the third."""
    from archipelago.experiments.config_files import find_config
    from archipelago.sweeps.config import load_sweep

    sweep = load_sweep(find_config(CONFIG), ["local.engine=compiled"], env={})
    assert sweep is not None
    found = [each for trial in sweep.trials() for each in (trial, *longer(trial))]
    return sorted(found, key=lambda trial: (trial.group.endswith(LAST_CASE), trial.seed))


def longer(trial: Any) -> list[Any]:
    """The same trial with more rounds, of the methods whose result may be a matter of time; nothing of others."""
    if trial.group not in {f"{name} | turned" for name in ("fedavg", "CFL", "fedem", "fedrc")}:
        return []
    config = dataclasses.replace(trial.config, rounds=LONGER)
    group = f"{trial.group}, {LONGER} rounds"
    return [dataclasses.replace(trial, name=f"{trial.name}-{LONGER}-rounds", group=group, config=config)]


def outcome(trial: Any, rounds: int | None = None) -> dict[str, Any]:
    """What one trial comes to: metrics of its last round, and its costs over all rounds."""
    from actors.session import InProcessSession
    from archipelago.data import build_federation
    from archipelago.experiments.plan import make_plan

    config = trial.config
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    session = InProcessSession(make_plan(config, federation))
    reports = [session.run_round(round) for round in range(1, (rounds or config.rounds) + 1)]
    last = reports[-1].metrics
    sizes = last.get("cluster_sizes")
    return {
        "trial": trial.name, "group": trial.group, "seed": trial.seed,
        "accuracy": last.get("micro_accuracy", 0.0), "worst": last.get("worst10_accuracy", 0.0),
        "used": None if sizes is None else sum(size > 0 for size in sizes),
        **{name: last.get(name) for name in ("ari", "silhouette", "was")},
        **{name: statistics.fmean(report.metrics[name] for report in reports) for name in COSTS},
    }  # fmt: skip


def outcomes(kept: Path, asked: Sequence[Any], rounds: int | None = None) -> list[dict[str, Any]]:
    """Of all these trials, and others that the file has: those that it has, then the others."""
    known = (
        {line["trial"]: line for line in map(json.loads, kept.read_text().splitlines())}
        if kept.exists()
        else {}
    )
    for trial in asked:
        if trial.name not in known:
            known[trial.name] = outcome(trial, rounds)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[trial.name]) + "\n")
    return list(known.values())


def rows(found: Iterable[Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    """By case, a row for each method: means over seeds, and the standard deviation of accuracy.

    Seeds that some method of the case has not come to yet are left out, so that all rows are of the same ones.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in found:
        method, _, case = line["group"].partition(" | ")
        groups.setdefault((case, method), []).append(line)
    every: dict[str, set[int]] = {}
    for (case, _), lines in groups.items():
        seeds = {line["seed"] for line in lines}
        every[case] = every.get(case, seeds) & seeds
    groups = {at: [line for line in lines if line["seed"] in every[at[0]]] for at, lines in groups.items()}
    cases: dict[str, list[list[str]]] = {}
    for (case, method), lines in groups.items():
        accuracy = [100 * line["accuracy"] for line in lines]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        cells = [_mean(lines, name) for name in ("ari", "used", "silhouette", "was", *COSTS)]
        worst = statistics.fmean(100 * line["worst"] for line in lines)
        cases.setdefault(case, []).append(
            [
                method,
                f"{statistics.fmean(accuracy):.1f} ± {spread:.1f}",
                f"{worst:.1f}",
                *cells,
                str(len(lines)),
            ]
        )
    return cases


def _mean(lines: list[Mapping[str, Any]], name: str) -> str:
    known = [line[name] for line in lines if line[name] is not None and math.isfinite(line[name])]
    return f"{statistics.fmean(known):.2f}" if known else ""


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """All trials; `rounds` stands for the number of seeds here. A miniature runs one, and keeps nothing."""
    asked = trials()
    if miniature:
        with tempfile.TemporaryDirectory() as folder:
            return {"found": outcomes(Path(folder) / "kept.jsonl", asked[:1], rounds=1)}
    return {"found": outcomes(KEPT, [trial for trial in asked if rounds is None or trial.seed < rounds])}


def report(result: dict[str, Any]) -> str:
    """A table in Markdown for each case: those of `results/clustered.md`."""
    rule = "|".join(["", "---", *["---:"] * (len(HEAD) - 1), ""])
    parts = []
    for case, lines in rows(result["found"]).items():
        body = [f"| {' | '.join(cells)} |" for cells in (HEAD, *lines)]
        parts.append("\n".join([f"### {case}", "", body[0], rule, *body[1:]]))
    return "\n\n".join(parts)
