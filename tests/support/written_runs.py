"""Run directories and sweeps written by hand: what a report reads, with numbers that a test can work out."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def write_run(
    path: Path,
    *,
    method: str = "ifca",
    seed: int = 0,
    accuracy: Sequence[float] = (0.1, 0.2, 0.3, 0.4),
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Sequence[Any]] | None = None,
    state: str = "finished",
    sentence: str | None = None,
) -> Path:
    """A run of as many rounds as there are accuracies; macro-F1 is half of each, a round takes a second."""
    path.mkdir(parents=True)
    rounds = len(accuracy)
    settings = {
        "method": method, "ensemble": [], "clients": 4, "clusters": 2, "rounds": rounds, "seed": seed,
        "data": {"name": "digits"}, "partition": {"name": "iid"}, "evaluation": {"last": 3},
        **(config or {}),
    }  # fmt: skip
    (path / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    status = {"state": state, "rounds_done": rounds, "rounds": rounds, "sentence": sentence}
    (path / "status.json").write_text(json.dumps(status))
    columns = {
        "round": range(1, rounds + 1),
        "micro_accuracy": accuracy,
        "micro_macro_f1": [value / 2 for value in accuracy],
        "micro_loss": [1 - value for value in accuracy],
        "cost_models_stored": [3.0] * rounds,
        "cost_models_down": [2.0] * rounds,
        "cost_models_up": [1.0] * rounds,
        "cost_computation": [1.5] * rounds,
        **(metrics or {}),
    }
    write_csv(path / "metrics.csv", columns)
    write_csv(
        path / "timings.csv",
        {"round": range(1, rounds + 1), "train": [0.75] * rounds, "total": [1.0] * rounds},
    )
    return path


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Columns as a CSV file; None is an empty cell, lists are JSON."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow(["" if value is None else json.dumps(value) if isinstance(value, list) else value
                             for value in row])  # fmt: skip


def write_sweep(
    path: Path, trials: Sequence[Mapping[str, Any]], sweep: Mapping[str, Any] | None = None
) -> Path:
    """`sweep.yaml` and `trials.csv`; a trial says its group, seed, status, reason and run, or leaves them out."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "sweep.yaml").write_text(yaml.safe_dump({"sweep": {"seeds": [0, 1], **(sweep or {})}}))
    columns: dict[str, list[Any]] = {}
    for number, trial in enumerate(trials):
        full = {
            "trial": f"t{number}",
            "group": "",
            "seed": 0,
            "status": "finished",
            "reason": "",
            "run": "",
            **trial,
        }
        for name, value in full.items():
            columns.setdefault(name, []).append(value)
    write_csv(path / "trials.csv", columns)
    return path
