"""Whether methods behave off the beaten track: every method, plain situations, declared expectations.

    python -m benchmarks behaviour                  # the whole; writes results/behaviour.md, .csv and .png
    python -m benchmarks behaviour --processes 2
    python -m benchmarks behaviour --reduced        # CI's grid
    python -m benchmarks behaviour --finished       # the page of what is kept, run nothing
    python -m benchmarks behaviour --minutes 30     # as far as it comes: bases first, one seed after the other
    python -m benchmarks behaviour --methods ifca ifca+cam --plugins my_package.my_method
    python -m benchmarks behaviour --update --methods flux+cam --situations rotations --rounds 1
                                                    # these anew, all others as results/behaviour.csv has them

What methods are held to is declared beside them (`archipelago/strategies/expectations.py`), the situations as settings
are in `situations.py`, the checks in `checks.py`. Finished runs are kept: a stop costs nothing. Red cells make the
command fail.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archipelago.strategies.expectations import SITUATIONS
from benchmarks.behaviour import grid, recorded
from benchmarks.behaviour.cells import Cell, registered
from benchmarks.behaviour.checks import RED, Run
from benchmarks.behaviour.page import Result, cell_text, page, table
from benchmarks.behaviour.picture import draw
from benchmarks.behaviour.situations import SEEDS

RESULTS = Path(__file__).resolve().parents[1] / "results"  # which nobody commits
COMMITTED = grid.ROOT / "results"
KEPT = RESULTS / "behaviour" / "cells.jsonl"


def run(
    rounds: int | None,
    miniature: bool,
    *,
    reduced: bool = False,
    finished: bool = False,
    update: bool = False,
    minutes: float | None = None,
    processes: int = 1,
    methods: Sequence[str] = (),
    situations: Sequence[str] = (),
    plugins: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """The grid, or a part of it; `rounds` stands for the number of seeds here."""
    for plugin in plugins:
        importlib.import_module(plugin)
    seeds = tuple(range(rounds)) if rounds else SEEDS
    cells = chosen(reduced or miniature, methods, seeds, situations)
    kept = grid.Kept(KEPT)
    if finished:
        cells = grid.known(cells, kept)
    facts = grid.facts_of(
        grid.with_baselines(cells), kept, processes, plugins, lambda text: print(text, flush=True), minutes
    )
    result = collected([cell for cell in cells if cell in facts and grid.baseline(cell) in facts], facts)
    part = reduced or miniature or methods or situations or plugins or rounds or finished or minutes
    folder = out or (RESULTS if part and not update else COMMITTED)
    if update:
        result = recorded.beside(result, COMMITTED / "behaviour.csv")
    write(result, folder)
    verdicts = result.verdicts()
    reds = [f"{method} in {situation}" for (method, situation), each in verdicts.items() if each.state == RED]
    return {
        "kept": not reds,
        "red": reds,
        "page": str(folder / "behaviour.md"),
        "cells": {
            f"{method} in {situation}": cell_text(each) for (method, situation), each in verdicts.items()
        },
    }


def chosen(
    reduced: bool, methods: Sequence[str], seeds: Sequence[int], situations: Sequence[str] = ()
) -> list[Cell]:
    """The cells that were asked for."""
    names = registered()
    if methods or situations:
        return grid.whole(methods or names, situations or list(SITUATIONS), seeds)
    return grid.reduced() if reduced else grid.whole(names, list(SITUATIONS), seeds)


def collected(cells: Sequence[Cell], facts: dict[Cell, dict[str, Any]]) -> Result:
    """Runs by method and situation, each beside FedAvg's."""
    runs: dict[tuple[str, str], list[Run]] = {}
    seeds: dict[tuple[str, str], list[int]] = {}
    for cell in dict.fromkeys(cells):
        beside = facts[grid.baseline(cell)]
        made = Run(cell.situation, facts[cell], beside, grid.expectations(cell.method))
        runs.setdefault((cell.method, cell.situation), []).append(made)
        seeds.setdefault((cell.method, cell.situation), []).append(cell.seed)
    seconds = sum({id(each): each["seconds"] for each in facts.values()}.values())
    return Result(runs, seeds, seconds, code_state())


def write(result: Result, folder: Path) -> None:
    """The page, the numbers and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "behaviour.md").write_text(page(result), encoding="utf-8")
    (folder / "behaviour.csv").write_text(table(result), encoding="utf-8")
    draw(result, folder / "behaviour.png")


def code_state() -> str:
    """The commit that the results were made from."""
    files = (*grid.SHARED, "archipelago/strategies", "benchmarks")
    edited = _git("status", "--porcelain", "--untracked-files=no", "--", *files)
    commit = _git("rev-parse", "--short=10", "HEAD") or "unknown"
    return f"{commit}{', with changes' if edited else ''}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=grid.ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def report(result: dict[str, Any]) -> str:
    """What is red, and where the page is."""
    reds = result["red"]
    lines = [f"{len(result['cells'])} cells, {len(reds)} red. The page: {result['page']}"]
    return "\n".join([*lines, *(f"  red: {name} {result['cells'][name]}" for name in reds)])
