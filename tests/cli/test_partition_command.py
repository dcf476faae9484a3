"""`partition`: what it prints, draws and writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def test_partition_is_described_and_drawn(command: Any, tmp_path: Path) -> None:
    code, out, error = command("partition", "clients=6", "clusters=2", "partition=n_class", "name=mine")
    assert (code, error) == (0, "")
    assert re.search(r"classes per client +2", out) and "label divergence" in out
    folder = tmp_path / "runs" / "mine"
    assert {file.name for file in (folder / "figures").iterdir()} == {
        f"partition-{name}.{kind}" for name in ("classes", "similarity") for kind in ("png", "svg")
    }
    assert all(
        str(Path("runs") / "mine" / "figures" / file.name) in out for file in (folder / "figures").iterdir()
    )
    for wrong in (
        ("partition", "n_class"),
        ("partition", "partition=n_clas"),
        ("partition", "clients=100000"),
    ):
        code, out, error = command(*wrong)
        assert (code, out) == (2, "") and len(error.splitlines()) == 1


def test_partition_goes_to_an_object_store_and_says_who_never_trains(command: Any, tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/bucket"
    code, out, error = command(
        "partition", "clients=6", "holdout_clients=0.4", "name=mine", f"storage={storage}"
    )
    assert (code, error) == (0, "")
    assert re.search(r"held-out clients\s+2 that never train and are adopted afterwards: \d, \d\s", out)
    assert (
        f"Tables and indices: {storage}/mine" in out
        and f"{storage}/mine/figures/partition-classes.png" in out
    )
    assert {path.name for path in tmp_path.iterdir()} == {"bucket"}  # no folder called file:
    there = {path.name for path in (tmp_path / "bucket" / "mine").rglob("*") if path.is_file()}
    assert {"partition.safetensors", "facts.json", "partition-similarity.svg"} <= there
