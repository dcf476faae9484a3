"""The result as people read it: a page with a matrix, and a table with the numbers behind it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archipelago.strategies.expectations import CHECKS, SITUATIONS
from benchmarks.behaviour import checks
from benchmarks.behaviour.checks import AMBER, GREEN, NONE, RED, Run, Verdict
from benchmarks.behaviour.recorded import Recorded
from benchmarks.behaviour.situations import CHANGES, COMMON

SYMBOLS = {GREEN: "🟩", AMBER: "🟨", RED: "🟥", NONE: "▫️"}
WORDS = {
    GREEN: "as expected, with every seed",
    AMBER: "an expectation is missed with a minority of the seeds, or with a reason that the method declares",
    RED: "an expectation is missed with half of the seeds or more, and no reason is declared",
    NONE: "does not apply: the platform refuses it, with a reason",
}
LETTERS = {
    "accuracy": "A", "splits": "S", "groups": "G", "parts": "D", "oscillation": "O", "progress": "P", "cost": "C",
}  # fmt: skip
TITLES = {
    "iid": "IID", "rotations": "rotations, K = true", "dirichlet": "cluster-wise Dirichlet",
    "participation": "20% take part",
    "slow": "lr / 10", "fast": "lr x 10", "one_cluster": "K = 1", "twice_clusters": "K = 2 x true", "sizes": "sizes",
    "one_class": "one class", "stragglers": "stragglers", "batchnorm": "BatchNorm",
}  # fmt: skip

# What a row of the table has between its names and its words.
ROW = ("final_accuracy", "fedavg_accuracy", "margin", "down", "up", "trainings", *CHECKS)
SMALL = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

Verdicts = Mapping[tuple[str, str], Verdict]  # by method and situation


@dataclass(frozen=True)
class Result:
    """Everything that was found: the runs of each method and situation, in the order of their seeds."""

    runs: Mapping[tuple[str, str], Sequence[Run]]
    seeds: Mapping[tuple[str, str], Sequence[int]]
    seconds: float  # of processor time
    code: str  # what it was made from

    @property
    def methods(self) -> list[str]:
        """Bases first, then those with add-ons."""
        return sorted(dict.fromkeys(method for method, _ in self.runs), key=lambda name: ("+" in name, name))

    @property
    def situations(self) -> list[str]:
        """Those that were run, in their own order."""
        found = {situation for _, situation in self.runs}
        return [name for name in SITUATIONS if name in found]

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        """Of every run, once: cells that differ by a setting that a method does not read are one."""
        return list({id(run.facts): run.facts for runs in self.runs.values() for run in runs}.values())

    def verdicts(self) -> dict[tuple[str, str], Verdict]:
        """One for each method and situation."""
        return {key: checks.verdict(runs) for key, runs in self.runs.items()}


def cell_text(found: Verdict | None) -> str:
    """`🟥 -12.3 A G`: the state, points of accuracy over FedAvg, and the checks that were missed."""
    if found is None:
        return ""
    margin = "" if found.margin is None else f" {100 * found.margin:+.1f}".replace("-", "−")
    letters = "".join(LETTERS[check] for check in found.missed)
    return f"{SYMBOLS[found.state]}{margin}{' ' if letters else ''}{letters}"


def page(result: Result) -> str:
    """The page, in GitHub's Markdown."""
    verdicts = result.verdicts()
    bases = [name for name in result.methods if "+" not in name]
    composed = [name for name in result.methods if "+" in name]
    lines = ["# How methods behave", "", *_summary(result, verdicts), "", *_legend(), ""]
    for title, names in (("Bases", bases), ("With an add-on", composed)):
        if names:
            lines += [f"## {title}", "", *_matrix(names, result, verdicts), ""]
    lines += _section("Red", _missed(verdicts, RED), "None.")
    lines += _section("Amber: with a minority of the seeds", _missed(verdicts, AMBER, known=False), "None.")
    lines += _section("Amber: with a reason", _reasons(verdicts), "None.")
    lines += _section(
        "Declared, and not seen", _unseen(result, verdicts), "Nothing: every declared reason was needed."
    )
    lines += _section("Not applicable", _refused(verdicts), "Everything applies.")
    lines += _settings(result)
    return "\n".join(lines).rstrip() + "\n"


def _summary(result: Result, verdicts: Verdicts) -> list[str]:
    counts = {state: sum(each.state == state for each in verdicts.values()) for state in SYMBOLS}
    cells, runs = sum(map(len, result.runs.values())), len(result.facts)
    each = sorted(set(map(len, result.seeds.values()))) or [0]
    seeds = (
        f"{each[0]} to {each[-1]} seeds" if len(each) > 1 else f"{each[0]} seed{'s' if each[0] != 1 else ''}"
    )
    missing = len(result.methods) * len(result.situations) - len(verdicts)
    return [
        f"{len(result.methods)} methods (every registered base, and every base with each add-on that fits) in "
        f"{len(result.situations)} plain situations, {seeds} each: {cells} results of {runs} runs on "
        "scikit-learn's digits (situations that differ by what a method does not read are one run), "
        f"{result.seconds / 60:.0f} minutes of processor time. Of {len(verdicts)} cells "
        f"{counts[GREEN]} are green, {counts[AMBER]} amber and {counts[RED]} red; {counts[NONE]} do not apply."
        + (f" {missing} more have not been run yet: their places are empty." if missing else ""),
        "",
        f"`python -m benchmarks behaviour` makes this page, [the picture](behaviour.png) and "
        f"[the numbers](behaviour.csv) again ({_commits(result)}). What each method is held to stands beside it, as "
        "`expects` on its class (`archipelago/strategies/expectations.py`).",
        "",
        "![The matrix as a heat map](behaviour.png)",
    ]


def _commits(result: Result) -> str:
    """What the runs were made from: `runs of commit 1a2b3c4d5e`, or of which how many."""
    of = [commit_of(run, result) for runs in result.runs.values() for run in runs]
    counts = sorted(
        {commit: of.count(commit) for commit in dict.fromkeys(of)}.items(), key=lambda each: -each[1]
    )
    if len(counts) < 2:
        return f"runs of commit {counts[0][0] if counts else result.code}"
    words = ", ".join(f"{count} of {commit}" for commit, count in counts)
    return f"runs of several commits: {words}, as the table says of each; all held to what is declared today"


def _legend() -> list[str]:
    return [
        "## How to read it",
        "",
        "The number is accuracy in points over FedAvg of the same situation and seeds, as mean over the seeds. Where "
        "cells have different numbers of them, that stands behind it, small.",
        "",
        *(
            f"- {SYMBOLS[state]} {state if state != NONE else 'no colour'}: {words}"
            for state, words in WORDS.items()
        ),
        "",
        "The letters say which expectations were missed:",
        "",
        *(f"- **{letter}** {CHECKS[check]}" for check, letter in LETTERS.items()),
    ]


def _matrix(names: Sequence[str], result: Result, verdicts: Verdicts) -> list[str]:
    head = ["", *(TITLES[name] for name in result.situations)]
    rows = [
        [f"`{method}`", *(_cell((method, each), result, verdicts) for each in result.situations)]
        for method in names
    ]
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _cell(key: tuple[str, str], result: Result, verdicts: Verdicts) -> str:
    """A cell of the matrix; its number of seeds behind it, small, where that is not the same of all."""
    text, seeds = cell_text(verdicts.get(key)), len(result.seeds.get(key, ()))
    counts = set(map(len, result.seeds.values()))
    return f"{text} {str(seeds).translate(SMALL)}" if text and len(counts) > 1 else text


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(title: str, rows: list[list[str]], nothing: str) -> list[str]:
    if not rows:
        return [f"## {title}", "", nothing, ""]
    head, *body = rows
    return [f"## {title}", "", _row(head), _row(["---"] * len(head)), *map(_row, body), ""]


def _missed(verdicts: Verdicts, state: str, known: bool | None = None) -> list[list[str]]:
    """A row for each cell of a colour and check without a reason: what was found, seed by seed."""
    rows = []
    for (method, situation), found in verdicts.items():
        if found.state != state:
            continue
        if found.note:
            rows.append([f"`{method}`", TITLES[situation], "", found.note])
        for check in found.missed:
            bare = found.unexplained(check)
            if bare:
                rows.append(
                    [f"`{method}`", TITLES[situation], LETTERS[check], "; ".join(each.text for each in bare)]
                )
    return [["method", "situation", "", "what was found"], *sorted(rows)] if rows else []


def _reasons(verdicts: Verdicts) -> list[list[str]]:
    """A row for each declared reason of a method that was needed, and where."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for (method, situation), found in verdicts.items():
        for check, misses in found.missed.items():
            for why in dict.fromkeys(miss.known.why for miss in misses if miss.known is not None):
                where.setdefault((LETTERS[check], why, method), []).append(TITLES[situation])
    methods: dict[tuple[str, str, str], list[str]] = {}
    for (letter, why, method), situations in where.items():
        methods.setdefault((letter, why, ", ".join(situations)), []).append(f"`{method}`")
    rows = [
        [", ".join(names), situations, letter, why] for (letter, why, situations), names in methods.items()
    ]
    return [["methods", "situations", "", "reason"], *sorted(rows)] if rows else []


def _unseen(result: Result, verdicts: Verdicts) -> list[list[str]]:
    """Reasons that no run of any method needed: they can go, or the situations are too easy for them."""
    declared = {known for runs in result.runs.values() for run in runs for known in run.expects.known}
    used = {
        miss.known
        for found in verdicts.values()
        for misses in found.missed.values()
        for miss in misses
        if miss.known
    }
    rows = [[LETTERS[known.check], known.why] for known in declared - used]
    return [["", "reason"], *sorted(rows)] if rows else []


def _refused(verdicts: Verdicts) -> list[list[str]]:
    why: dict[tuple[str, str], list[str]] = {}
    for (method, situation), found in verdicts.items():
        if found.state == NONE:
            why.setdefault((TITLES[situation], found.note), []).append(f"`{method}`")
    rows = [[", ".join(names), situation, note] for (situation, note), names in why.items()]
    return [["methods", "situation", "what the platform says"], *sorted(rows)] if rows else []


def _settings(result: Result) -> list[str]:
    """How to run one of the cells."""
    common = " ".join(f"{name}={value}" for name, value in COMMON.items())
    rows = [
        [TITLES[name], SITUATIONS[name], f"`{_changed(name)}`" if _changed(name) else ""]
        for name in result.situations
    ]
    return [
        "## The situations",
        "",
        f"All of them, as settings: `{common}`.",
        "",
        *_section("", [["situation", "what it is", "changed settings"], *rows], "")[2:],
        "Clients with fewer than "
        f"{checks.SMALL} training samples, and the one with samples of one class, do not count when groups are "
        "compared. Runs of a method that works in stages (`length`) are so many times as long, and FedAvg's with them.",
    ]


def _changed(situation: str) -> str:
    return " ".join(f"{name}={value}" for name, value in CHANGES[situation].items() if value)


def table(result: Result) -> str:
    """One row a run, as CSV: final accuracy, FedAvg's, and the number of every check, under its name."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "situation", "seed", *ROW, "missed", "explained", "seconds", "commit"])
    for (method, situation), runs in sorted(result.runs.items()):
        for seed, run in zip(result.seeds[method, situation], runs, strict=True):
            writer.writerow([method, situation, seed, *_numbers(run), commit_of(run, result)])
    return out.getvalue()


def _numbers(run: Run) -> list[str]:
    if "refused" in run.facts or "failed" in run.facts:
        return [
            *[""] * len(ROW),
            run.facts.get("refused") or run.facts["failed"],
            "",
            f"{run.facts['seconds']:.2f}",
        ]
    found = checks.findings(run)
    missed = [each for each in found if not each.ok]
    words = [
        "; ".join(each.text for each in missed if (each.known is None) == bare) for bare in (True, False)
    ]
    if isinstance(run, Recorded):
        return [*(run.row[name] for name in ROW), *words, run.row["seconds"]]
    worst = {}
    for check in CHECKS:
        of_check = [each for each in found if each.check == check]
        bad = [each for each in of_check if not each.ok] or of_check
        worst[check] = f"{bad[0].value:.4f}" if bad else ""
    costs = checks.dearest(run)
    return [
        f"{run.final():.4f}", f"{run.final(run.baseline):.4f}", f"{run.margin:+.4f}",
        *(f"{costs[name]:.3f}" for name in ("down", "up", "trainings")), *worst.values(),
        *words, f"{run.facts['seconds']:.2f}",
    ]  # fmt: skip


def commit_of(run: Run, result: Result) -> str:
    """What a run was made from."""
    return run.commit if isinstance(run, Recorded) else result.code


def margins(result: Result) -> np.ndarray:
    """(methods, situations) accuracy over FedAvg's; NaN where there is none."""
    verdicts = result.verdicts()
    rows = [
        [getattr(verdicts.get((method, situation)), "margin", None) for situation in result.situations]
        for method in result.methods
    ]
    return np.array(rows, dtype=float)
