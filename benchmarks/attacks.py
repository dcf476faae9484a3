"""Which rule resists what: accuracy of the clients that do not attack, on embedded data.

The trials of `tune_configs/attacks.yaml --small` with the compiled engine, seed by seed; each is a line of
`results/attacks.jsonl` and is not run again (`benchmarks/kept.py`).
"""

from __future__ import annotations

from typing import Any

from benchmarks import kept
from benchmarks.kept import Line

KEPT = kept.RESULTS / "attacks.jsonl"


def outcome(trial: Any, rounds: int | None = None) -> Line:
    """What one trial comes to after its last round; without attackers everybody is honest."""
    last = kept.reports_of(trial.config, rounds)[-1].metrics
    honest = last.get("honest_micro_accuracy", last.get("micro_accuracy", 0.0))
    return {"trial": trial.name, "group": trial.group, "seed": trial.seed, "honest": honest}


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """All trials; `rounds` stands for the number of seeds here. A miniature runs one, and keeps nothing."""
    return kept.measured(KEPT, kept.trials("attacks-small"), outcome, rounds, miniature)


def report(result: dict[str, Any]) -> str:
    """The table of `results/attacks.md`: a row for each method, a column for each attack."""
    groups = kept.by_group(result["found"])
    cases = list(dict.fromkeys(case for _, case in groups))
    rows = []
    for method in dict.fromkeys(method for method, _ in groups):
        found = [groups.get((method, case), []) for case in cases]
        cells = [kept.percent([line["honest"] for line in lines]) if lines else "" for lines in found]
        rows.append([method, *cells, str(min(map(len, found)))])
    return kept.markdown(("", *cases, "seeds"), rows)
