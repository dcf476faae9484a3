"""The cells of the grid: which there are, which are known already, and how the others are run.

A finished cell is kept in `cells.jsonl` under the identity of its run: its settings, and the code that it ran (comments
and documentation aside). So a stop costs nothing, and after a change only the cells are run again that it can change.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.behaviour.cells import Cell, registered, run_cell
from benchmarks.behaviour.situations import BASELINE, SEEDS, settings

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ROOT / "archipelago" / "strategies"
PROMISES = STRATEGIES / "expectations.py"
SHARED = ("actors", "lightning_modules", "archipelago/core", "archipelago/data", "archipelago/experiments",
          "benchmarks/behaviour/cells.py", "benchmarks/behaviour/parts.py")  # fmt: skip
# CI has the time for bases that the engine `compiled` runs, and that do not work in stages: these are left out.
DEAR = ("apfl", "femam", "fedrep", "moon", "perfedavg", "pfedme")
TAKER = "ifca"  # takes every add-on of ours


def expectations(method: str) -> Any:
    """What a method with its add-ons is held to."""
    from archipelago.strategies import parts_of
    from archipelago.strategies.expectations import expected

    base, *addons = (entry.value for entry in parts_of(method))
    return expected(base, addons)


def whole(methods: Sequence[str], situations: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[Cell]:
    """Every method in every situation with every seed: one seed after the other, bases before those with add-ons."""
    ordered = sorted(methods, key=lambda name: "+" in name)
    return [
        Cell(method, situation, seed, expectations(method).length)
        for seed in seeds
        for composed in (False, True)
        for situation in situations
        for method in ordered
        if ("+" in method) == composed
    ]


def reduced() -> list[Cell]:
    """What CI has the time for: most bases and each add-on once with two groups, and with none where they would show.

    An add-on is on `TAKER`, or on the first base that takes it.
    """
    names = registered()
    bases = [name for name in names if "+" not in name and name not in DEAR]
    composed = [name for name in names if "+" in name]
    composed.sort(key=lambda name: not name.startswith(f"{TAKER}+"))  # it comes first
    addons = {name.partition("+")[2]: name for name in reversed(composed)}
    growing = [name for name in bases if not expectations(name).splits_iid]
    seeds = SEEDS[:1]
    return [
        *whole([*bases, *sorted(addons.values())], ["rotations"], seeds),
        *whole(growing, ["iid"], seeds),
    ]


def with_baselines(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and those of FedAvg that they are compared with, each once."""
    return list(dict.fromkeys([*map(baseline, cells), *cells]))


def baseline(cell: Cell) -> Cell:
    """FedAvg in the same situation, with the same seed, for as many rounds."""
    return Cell(BASELINE, cell.situation, cell.seed, cell.length)


# What a cell is --------------------------------------------------------------------------------------------


def identity(cell: Cell) -> str:
    """A hash of the settings of a run and of the code that it runs, where their defaults are."""
    return _hash(*settings(cell.method, cell.situation, cell.seed, cell.length), code_of(cell.method))


@cache
def code_of(method: str) -> str:
    """A hash of the shared packages, and of what a method's own modules import of the strategies."""
    from archipelago.strategies import parts_of

    files = {file for name in SHARED for file in _files(ROOT / name)}
    for entry in parts_of(method):
        files |= _closure(_source(entry.value.__module__))
    files |= _closure(STRATEGIES / "method.py")
    return _hash(*(_code(file) for file in sorted(files)))


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else path.rglob("*")
    return [file for file in found if file.suffix in (".py", ".c", ".h")]


def _closure(file: Path) -> set[Path]:
    """A module and all that it imports of the strategies, which import each other by full names."""
    found, left = set(), [file]
    while left:
        found.add(file := left.pop())
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        own = [ROOT / Path(*name.split(".")).with_suffix(".py") for name in names if "strategies." in name]
        left += [other for other in own if other.is_file() and other not in found]
    return found - {PROMISES}


def _source(module: str) -> Path:
    file = sys.modules[module].__file__
    assert file is not None
    return Path(file)


@cache
def _code(file: Path) -> str:
    """What a file says to the machine: comments and documentation left out."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value = ast.Constant(None)
        if isinstance(node, ast.ClassDef | ast.Module):  # what is promised does not change what is done
            node.body = [each for each in node.body if not _is_promise(each)]
    return ast.dump(tree)


def _is_promise(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return str(node.module).endswith(".expectations")
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return any(isinstance(target, ast.Name) and target.id == "expects" for target in targets)


def _hash(*texts: str) -> str:
    made = hashlib.blake2b(digest_size=12)
    for text in texts:
        made.update(text.encode() + b"\0")
    return made.hexdigest()


# Running ---------------------------------------------------------------------------------------------------


class Kept:
    """Facts of finished cells, one line each, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                name, facts = json.loads(line)
            except ValueError:  # the line that a stop cut off
                continue
            self.facts[name] = facts

    def add(self, name: str, facts: dict[str, Any]) -> None:
        """Keep it, for good."""
        self.facts[name] = facts
        with self.path.open("a") as file:
            file.write(json.dumps([name, facts]) + "\n")


def facts_of(
    cells: Sequence[Cell],
    kept: Kept,
    processes: int = 1,
    plugins: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    minutes: float | None = None,
) -> dict[Cell, dict[str, Any]]:
    """The facts of all cells: known ones as they are, the others by running them, for so many `minutes` at most.

    Cells with the same identity are one run: a method that does not read `clusters` runs once for every K.
    """
    names = {cell: identity(cell) for cell in cells}
    missing = list({names[cell]: cell for cell in reversed(cells) if names[cell] not in kept.facts}.values())[
        ::-1
    ]
    known = sum(name in kept.facts for name in names.values())
    say(f"{len(cells)} cells, {known} of them known already, the others in {len(missing)} runs")
    began = last = time.monotonic()
    for done, (cell, facts) in enumerate(_run_all(missing, processes, plugins), start=1):
        kept.add(names[cell], facts)
        if time.monotonic() - last > 5 or done == len(missing):
            last = time.monotonic()
            left = (last - began) / done * (len(missing) - done)
            say(f"{done} of {len(missing)} ({left / 60:.1f} minutes left): {cell}")
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            say(f"the {minutes:g} minutes are over: {len(missing) - done} runs are left for another time")
            break
    return {cell: kept.facts[name] for cell, name in names.items() if name in kept.facts}


def known(cells: Sequence[Cell], kept: Kept) -> list[Cell]:
    """Those of the cells that are finished, and FedAvg's beside them."""
    return [cell for cell in cells if identity(cell) in kept.facts and identity(baseline(cell)) in kept.facts]


def _run_all(
    cells: Sequence[Cell], processes: int, plugins: Sequence[str]
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if processes <= 1 or len(cells) < 2:
        yield from ((cell, run_cell(cell)) for cell in cells)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _begin, (list(plugins),)) as pool:
        yield from pool.imap_unordered(_with_facts, cells)


def _begin(plugins: list[str]) -> None:
    for plugin in plugins:
        importlib.import_module(plugin)
    registered(["fedavg"], addons=False)


def _with_facts(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    return cell, run_cell(cell)
