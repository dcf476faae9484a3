"""Rows of the committed table as runs again: what is not run anew is held to what is declared now.

A row has the number of every check, and a text for each that was missed. Of which check a text is, and its number, are
read from it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.core.errors import UserError
from archipelago.strategies.expectations import SITUATIONS
from benchmarks.behaviour import grid
from benchmarks.behaviour.checks import Finding, Run

if TYPE_CHECKING:
    from benchmarks.behaviour.page import Result

OLDEST = "6139782ba4"  # of rows without a commit of their own
# Of each check the texts that it writes; a group is its number.
TEXTS: tuple[tuple[str, str, float], ...] = (
    ("accuracy", r"(-?[\d.]+) points below FedAvg \(", 0.01),
    ("splits", r"splits clients that are alike into (\d+) clusters", 1.0),
    ("groups", r"(?:ARI|homogeneity) (-?[\d.]+), expected", 1.0),
    ("groups", r"has no clusters yet", 0.0),
    ("parts", r"model \d+ of the sum ", 1.0),
    ("oscillation", r"accuracy falls by ([\d.]+) points", 0.01),
    ("oscillation", r"(\d+)% of the clients change cluster", 0.01),
    ("progress", r"ends ([\d.]+) points below its best", 0.01),
    ("progress", r"(\d+) of (\d+) results were not finite", 1.0),
    ("progress", r"stands still below FedAvg", 1.0),
    ("cost", r"(?:down|up|trainings) ([\d.]+), declared", 1.0),
)


@dataclass(frozen=True)
class Recorded(Run):
    """A run of which a row is left."""

    row: Mapping[str, str]

    @property
    def commit(self) -> str:
        """What it was run from."""
        return self.row["commit"]

    def final(self, facts: object = None) -> float:
        """Mean accuracy of the last evaluations."""
        return float(self.row["final_accuracy"])

    @property
    def margin(self) -> float:
        """Accuracy over FedAvg's."""
        return float(self.row["margin"])

    def found(self) -> Iterator[Finding]:
        """What was missed, with or without a reason then."""
        texts = [*self.row["missed"].split("; "), *self.row["explained"].split("; ")]
        yield from (finding(text, self.row) for text in texts if text)


def finding(text: str, row: Mapping[str, str]) -> Finding:
    """What a text says was found."""
    for check, pattern, unit in TEXTS:
        if found := re.match(pattern, text):
            numbers = [float(number) for number in found.groups()]
            if len(numbers) == 2:
                value = numbers[0] / numbers[1]
            elif numbers:
                value = unit * numbers[0]
            else:
                value = float(row[check] or 0.0)
            return Finding(check, False, value, text)
    raise ValueError(f"expected what a check writes, got {text!r}: add it to TEXTS")


def rows(path: Path) -> dict[tuple[str, str, int], dict[str, str]]:
    """By method, situation and seed."""
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["method"], row["situation"], int(row["seed"])): row for row in csv.DictReader(file)}


def run_of(row: dict[str, str]) -> Run:
    """A row as a run."""
    row.setdefault("commit", OLDEST)
    facts: dict[str, object] = {"seconds": float(row["seconds"])}
    if not row["final_accuracy"]:
        broke = "failed" if re.match(r"\w+(Error|Exception)\b", row["missed"]) else "refused"
        facts[broke] = row["missed"]
    return Recorded(row["situation"], facts, {}, grid.expectations(row["method"]), row)


def beside(result: Result, path: Path) -> Result:
    """What was run, and of the table at `path` what was not: of a cell that was run no other seeds are left."""
    runs, seeds = {**result.runs}, {key: list(each) for key, each in result.seeds.items()}
    for (method, situation, seed), row in rows(path).items():
        key = method, situation
        if key in result.runs or situation not in SITUATIONS:
            continue
        try:
            made = run_of(row)
        except UserError:  # a method that is no longer registered, or no longer taken by an add-on
            continue
        runs[key] = [*runs.get(key, ()), made]
        seeds.setdefault(key, []).append(seed)
    whole = replace(result, runs=runs, seeds=seeds)
    return replace(whole, seconds=sum(facts["seconds"] for facts in whole.facts))
