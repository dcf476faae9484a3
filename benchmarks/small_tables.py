"""Every published table's small twin, at full length, as a user runs it: how long, and did all its trials finish.

Twins that differ in their name alone are run once.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.machine import ROOT, launch
from benchmarks.tables import table, verdict

LIMIT = 300.0  # seconds that a twin may take on 2 cores: "a few minutes", Ray's start and the report included


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` is the number of twins (all by default), one after the other, each in a folder of its own."""
    alike = sorted(same_work().values())[: rounds or (1 if miniature else None)]
    found = []
    for number, names in enumerate(alike, start=1):
        found.append(run_twin(names, ["rounds=2", "sweep.seeds=[0]"] if miniature else []))
        print(f"{number}/{len(alike)} {', '.join(names)}: {found[-1]['seconds']:.0f} s", flush=True)
    slowest = max(each["seconds"] for each in found)
    whole = all(set(each["statuses"]) == {"finished"} for each in found)
    return {"limit": LIMIT, "slowest_seconds": slowest, "kept": slowest <= LIMIT and whole, "twins": found}


def same_work() -> dict[str, list[str]]:
    """Twins by all that they say but their name: those of two tables that differ in their data alone are one."""
    alike: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tune_configs").glob("*-small.yaml")):
        settings = OmegaConf.load(path)
        settings.name = ""
        alike.setdefault(OmegaConf.to_yaml(settings), []).append(path.stem)
    return alike


def run_twin(names: list[str], less: list[str]) -> dict[str, Any]:
    """The first of some that do the same: its seconds, what became of its trials, the rows of its report's table."""
    with tempfile.TemporaryDirectory(prefix="archipelago-twin-") as folder:
        began = time.perf_counter()
        launch("--config", f"tune_configs/{names[0]}.yaml", f"storage={folder}", "name=twin", *less)
        seconds = time.perf_counter() - began
        trials = _rows(Path(folder) / "twin" / "trials.csv")
        figures = _rows(Path(folder) / "twin" / "report" / "table.csv")
    statuses = dict(Counter(row["status"] for row in trials))
    return {"names": names, "seconds": seconds, "statuses": statuses, "table": figures}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def report(result: dict[str, Any]) -> str:
    """One row a twin."""
    title = (
        f"Small twins of the published tables: the slowest takes {result['slowest_seconds']:.0f} s, limit "
        f"{result['limit']:.0f} s: {verdict(result['slowest_seconds'], result['limit'])}"
    )
    rows = [
        [", ".join(each["names"]), str(sum(each["statuses"].values())), f"{each['seconds']:.0f}",
         ", ".join(f"{count} {status}" for status, count in each["statuses"].items())]
        for each in result["twins"]
    ]  # fmt: skip
    return table(title, ["twin", "trials", "seconds", "what became of them"], rows)
