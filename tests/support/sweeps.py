"""Tiny sweeps, and what two of them must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from archipelago.runs.sweeps import Row, read_rows
from archipelago.sweeps.config import Sweep, load_sweep
from tests.support.experiments import TINY
from tests.support.runs import assert_equal_runs


def settings_of(*overrides: str) -> list[str]:
    """The tiny experiment on Ray, with some settings changed."""
    replaced = {override.partition("=")[0] for override in overrides} | {"fleet.backend"}
    if "model.target" in replaced:
        replaced.add("model")
    if "model" in replaced and "model=mlp" not in overrides:
        replaced.add("model.hidden")
    return [*(each for each in TINY if each.partition("=")[0] not in replaced), *overrides]


def sweep_of(folder: Path, *overrides: str) -> Sweep:
    """A sweep of the tiny experiment."""
    sweep = load_sweep(None, [*settings_of(*overrides), f"storage={folder}"], env={"RAY_ADDRESS": "auto"})
    assert sweep is not None
    return sweep


def rows_of(address: str | Path) -> dict[str, Row]:
    """`trials.csv` by trial."""
    return {row.trial: row for row in read_rows(address)}


def assert_equal_sweeps(one: str | Path, other: str | Path, trials: Sequence[str] | None = None) -> None:
    """Fail unless both hold the same trials in the same state, with the same bits in their runs."""
    left, right = rows_of(one), rows_of(other)
    assert left == right, [(left.get(name), row) for name, row in right.items() if left.get(name) != row]
    for name in left if trials is None else trials:
        assert_equal_runs(Path(one) / left[name].run, Path(other) / right[name].run)
