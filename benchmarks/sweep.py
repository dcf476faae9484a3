"""What a sweep costs beyond its training: 100 trials of about ten seconds, against the sum of their rounds.

The work is what the same trials' rounds take alone, one process on an idle machine. The cost is the wall-clock time of
the whole command times the cores it may use, Ray's start and end included.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import launch
from benchmarks.tables import table, verdict

LIMIT = 1.5
TRIALS = 100
SECONDS = 10.0  # of training in a trial
SETTINGS = (
    "method=ifca",
    "data=digits",
    "data.rotations=4",
    "clients=20",
    "clusters=4",
    "evaluation.every=5",
)


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` is the number of trials (100 by default)."""
    trials = rounds or (4 if miniature else TRIALS)
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="archipelago-sweep-") as folder:
        each = seconds_per_round(Path(folder) / "calibration", 5)
        count = max(3, round((0.3 if miniature else SECONDS) / each))
        alone = [
            _rounds_alone(Path(folder) / f"alone-{seed}", count, seed)
            for seed in range(1 if miniature else 3)
        ]
        before = time.time()
        swept = _sweep(Path(folder), trials, count)
        spans = [_span(path) for path in sorted((Path(folder) / "sweep" / "runs").iterdir())]
    if len(spans) != trials:
        raise RuntimeError(f"{len(spans)} of {trials} trials have run")
    work = float(np.mean(alone)) * trials
    busy = sum(span["rounds"] for span in spans)
    first, last = min(span["began"] for span in spans) - before, max(span["ended"] for span in spans) - before
    cost = swept * cores
    parts = {
        "training, as it takes alone": work,
        "training slowed down by the trials beside it": busy - work,
        "start of Ray and of the trials' processes": first * cores,
        "between rounds: set-up, checkpoints, files, waiting for the last trial": (last - first) * cores
        - busy,
        "end: report, Ray's shutdown": (swept - last) * cores,
    }
    return {
        "limit": LIMIT, "ratio": cost / work, "kept": cost / work <= LIMIT, "trials": trials, "cores": cores,
        "rounds": count, "seconds_of_a_trial_alone": float(np.mean(alone)), "wall_seconds": swept,
        "core_seconds": parts,
    }  # fmt: skip


def seconds_per_round(path: Path, rounds: int) -> float:
    """From a short run in a process of its own."""
    return _rounds_alone(path, rounds, 0) / rounds


def _rounds_alone(path: Path, rounds: int, seed: int) -> float:
    """Seconds of all rounds of one trial, in one process, with nothing beside it."""
    launch(
        *SETTINGS,
        f"storage={path.parent}",
        f"name={path.name}",
        f"rounds={rounds}",
        f"seed={seed}",
        "fleet.backend=in_process",
    )
    return _span(path)["rounds"]


def _sweep(folder: Path, trials: int, rounds: int) -> float:
    began = time.perf_counter()
    launch(
        *SETTINGS,
        f"storage={folder}",
        "name=sweep",
        f"rounds={rounds}",
        f"sweep.seeds={trials}",
        "fleet.dashboard=false",
    )
    return time.perf_counter() - began


def _span(run: Path) -> dict[str, float]:
    from archipelago import open_run

    seconds = float(open_run(run).timings["total"].sum())
    return {
        "rounds": seconds,
        "began": (run / "config.yaml").stat().st_mtime,
        "ended": (run / "summary.md").stat().st_mtime,
    }


def report(result: dict[str, Any]) -> str:
    """Where the core seconds went."""
    title = (
        f"{result['trials']} trials of {result['seconds_of_a_trial_alone']:.1f} s ({result['rounds']} rounds) on "
        f"{result['cores']} cores: {result['ratio']:.3f} of the training work, limit {result['limit']}: "
        f"{verdict(result['ratio'], result['limit'])}"
    )
    whole = sum(result["core_seconds"].values())
    rows = [
        [name, f"{value:.1f}", f"{100 * value / whole:.1f} %"]
        for name, value in result["core_seconds"].items()
    ]
    return table(title, ["where", "core seconds", "share"], rows)
