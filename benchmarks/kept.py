"""Trials of a comparison in `tune_configs/`, one after the other in this process, each kept as a line of `results/`.

A trial whose line is there already is not run again: a command can be stopped and continued. To measure anew, move the
file away, or take lines out of it: each says of what commit it is.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
Line = Mapping[str, Any]


def trials(config: str) -> list[Any]:
    """The trials of a file, seed by seed, with the compiled engine."""
    from archipelago.experiments.config_files import find_config
    from archipelago.sweeps.config import load_sweep

    sweep = load_sweep(find_config(config), ["local.engine=compiled"], env={})
    assert sweep is not None
    return sorted(sweep.trials(), key=lambda trial: trial.seed)


_federations: dict[str, Any] = {}  # read-only values, so the methods of a case share them


def federation_of(config: Any) -> Any:
    """The clients of a trial; those of the last few trials are at hand."""
    from archipelago.data import build_federation

    asked = repr((config.data, config.partition, config.clients, config.seed))
    if asked not in _federations:
        if len(_federations) > 3:
            _federations.clear()
        _federations[asked] = build_federation(config.data, config.partition, config.clients, config.seed)
    return _federations[asked]


def reports_of(config: Any, rounds: int | None = None) -> list[Any]:
    """The rounds of a run in this process."""
    from actors.session import InProcessSession
    from archipelago.experiments.plan import make_plan

    session = InProcessSession(make_plan(config, federation_of(config)))
    return [session.run_round(round) for round in range(1, (rounds or config.rounds) + 1)]


def outcomes(
    kept: Path, asked: Sequence[Any], outcome: Callable[[Any, int | None], Line], rounds: int | None = None
) -> list[Line]:
    """Of all these trials, and others that the file has: those that it has, then the others."""
    from benchmarks.behaviour import code_state

    known = (
        {line["trial"]: line for line in map(json.loads, kept.read_text().splitlines())}
        if kept.exists()
        else {}
    )
    code = code_state()  # as it was loaded
    for trial in asked:
        if trial.name not in known:
            known[trial.name] = {**outcome(trial, rounds), "commit": code}
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[trial.name]) + "\n")
    return list(known.values())


def measured(
    kept: Path, asked: Sequence[Any], outcome: Callable[[Any, int | None], Line], seeds: int | None, miniature: bool
) -> dict[str, Any]:  # fmt: skip
    """What `run` of a benchmark gives: all trials of so many seeds; a miniature runs one, and keeps nothing."""
    if miniature:
        with tempfile.TemporaryDirectory() as folder:
            return {"found": outcomes(Path(folder) / "kept.jsonl", asked[:1], outcome, rounds=1)}
    return {"found": outcomes(kept, [t for t in asked if seeds is None or t.seed < seeds], outcome)}


def by_group(found: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """(method, case) -> the lines of its seeds.

    Seeds that some method of the case has not come to yet are left out, so that all rows are of the same ones.
    """
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        method, _, case = line["group"].partition(" | ")
        groups.setdefault((method, case), []).append(line)
    every: dict[str, set[int]] = {}
    for (_, case), lines in groups.items():
        seeds = {line["seed"] for line in lines}
        every[case] = every.get(case, seeds) & seeds
    return {at: [line for line in lines if line["seed"] in every[at[1]]] for at, lines in groups.items()}


def percent(values: Sequence[float], digits: int = 1) -> str:
    """The mean and standard deviation of some shares.

    >>> percent([0.5, 0.6]), percent([0.5])
    ('55.0 ± 7.1', '50.0 ± 0.0')
    """
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.{digits}f} ± {100 * spread:.{digits}f}"


def mean(lines: Sequence[Line], name: str) -> str:
    """The mean over seeds of what a metric was; empty where it never was a number."""
    known = [line[name] for line in lines if line[name] is not None and math.isfinite(line[name])]
    return f"{statistics.fmean(known):.2f}" if known else ""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are words."""
    rule = "|".join(["", *["---"] * left, *["---:"] * (len(head) - left), ""])
    body = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([body[0], rule, *body[1:]])
