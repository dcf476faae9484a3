"""Every published table's small variant, at full length, as a user runs it: how long, and did all its trials finish.

Variants that differ in their name alone are run once.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from archipelago.core.errors import UserError
from archipelago.experiments.config_files import read_config
from benchmarks.machine import ROOT, launch
from benchmarks.tables import table, verdict

LIMIT = (
    300.0  # seconds that a variant may take on 2 cores: "a few minutes", Ray's start and the report included
)


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` is the number of variants (all by default), one after the other, each in a folder of its own."""
    alike = sorted(same_work().values())[: rounds or (1 if miniature else None)]
    found = []
    for number, names in enumerate(alike, start=1):
        found.append(run_variant(names, ["rounds=2", "sweep.seeds=[0]"] if miniature else []))
        print(f"{number}/{len(alike)} {', '.join(names)}: {found[-1]['seconds']:.0f} s", flush=True)
    slowest = max(each["seconds"] for each in found)
    whole = all(set(each["statuses"]) == {"finished"} for each in found)
    return {"limit": LIMIT, "slowest_seconds": slowest, "kept": slowest <= LIMIT and whole, "variants": found}


def same_work() -> dict[str, list[str]]:
    """Small variants by all that they ask for but their name: tables that differ in their data alone are one."""
    alike: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tune_configs").glob("*.yaml")):
        try:
            settings = OmegaConf.create(read_config(path, small=True))
        except UserError:  # it has no small variant
            continue
        settings.name = ""
        alike.setdefault(OmegaConf.to_yaml(settings, sort_keys=True), []).append(f"{path.stem}-small")
    return alike


def run_variant(names: list[str], less: list[str]) -> dict[str, Any]:
    """The first of some that do the same: its seconds, what became of its trials, the rows of its report's table."""
    with tempfile.TemporaryDirectory(prefix="archipelago-small-") as folder:
        began = time.perf_counter()
        launch("--config", f"tune_configs/{names[0]}.yaml", f"storage={folder}", "name=small", *less)
        seconds = time.perf_counter() - began
        trials = _rows(Path(folder) / "small" / "trials.csv")
        figures = _rows(Path(folder) / "small" / "report" / "table.csv")
    statuses = dict(Counter(row["status"] for row in trials))
    return {"names": names, "seconds": seconds, "statuses": statuses, "table": figures}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def report(result: dict[str, Any]) -> str:
    """One row a variant."""
    title = (
        f"Small variants of the published tables: the slowest takes {result['slowest_seconds']:.0f} s, limit "
        f"{result['limit']:.0f} s: {verdict(result['slowest_seconds'], result['limit'])}"
    )
    rows = [
        [", ".join(each["names"]), str(sum(each["statuses"].values())), f"{each['seconds']:.0f}",
         ", ".join(f"{count} {status}" for status, count in each["statuses"].items())]
        for each in result["variants"]
    ]  # fmt: skip
    return table(title, ["variant", "trials", "seconds", "what became of them"], rows)
