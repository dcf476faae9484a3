"""Whether the memory of driver, server and client actors grows over many quick rounds on Ray.

A tiny experiment with everything that a round may keep: clusters, momentum, private models, copies, checkpoints. The
processes' own memory (not what they share through the object store) is read every few rounds; the slope is that of a
line through the later half.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet_memory import own_bytes
from benchmarks.tables import table, verdict

ROUNDS, EVERY = 2000, 25
LIMIT = 2048.0  # bytes a round: 2 MB in a thousand rounds


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` rounds (2,000 by default) of a run directory with everything in it."""
    from archipelago.experiments.callbacks.base import Callback, LiveRun
    from archipelago.experiments.config import load_config
    from archipelago.experiments.runner import run_experiment

    count = rounds or (12 if miniature else ROUNDS)
    every = 2 if miniature else EVERY
    seen: dict[str, list[int]] = {}
    at: list[int] = []

    class Sampled(Callback):
        """Reads the memory of everybody who takes part."""

        def on_round(self, run: LiveRun, report: Any) -> None:
            """Every few rounds."""
            if report.round % every:
                return
            session: Any = run.session
            gc.collect()
            at.append(report.round)
            seen.setdefault("driver", []).append(own_bytes(os.getpid()))
            for key, member in session.members.items():
                name = "server" if key == "server" else f"clients-{key}"
                seen.setdefault(name, []).append(own_bytes(member.pid))
            if report.round % 200 == 0:
                sizes = ", ".join(f"{name} {each[-1] / 1e6:.1f} MB" for name, each in seen.items())
                print(f"round {report.round}: {sizes}", flush=True)

    config = load_config(
        None,
        [
            "method=ditto", "clients=8", f"rounds={count}", "model=mlp", "model.hidden=[8]", "local.steps=1",
            "local.batch=8", "evaluation.every=10", "checkpoint.every=50", "fleet.actors=2", "fleet.cpus=0.5",
            "fleet.dashboard=false",
        ],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="archipelago-benchmark-") as folder:
        run_experiment(config, Path(folder) / "slope", callbacks=[Sampled()], quiet=True)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    half = len(at) // 2
    slopes = {
        name: float(np.polyfit(at[half:], sizes[half:], 1)[0]) if len(at) - half > 1 else 0.0
        for name, sizes in seen.items()
    }
    return {
        "limit": LIMIT,
        "rounds": at,
        "bytes": seen,
        "slopes": slopes,
        "run_bytes": size,
        "kept": max(slopes.values()) <= LIMIT,
    }


def report(result: dict[str, Any]) -> str:
    """A line for each process."""
    worst = max(result["slopes"].values())
    title = (
        f"Own memory over {result['rounds'][-1]:,} rounds on Ray: {worst:,.0f} bytes a round at most, limit "
        f"{result['limit']:,.0f}: {verdict(worst, result['limit'])}"
    )
    rows = [
        [name, f"{sizes[0] / 1e6:,.1f}", f"{sizes[len(sizes) // 2] / 1e6:,.1f}", f"{sizes[-1] / 1e6:,.1f}",
         f"{result['slopes'][name]:,.0f}"]
        for name, sizes in result["bytes"].items()
    ]  # fmt: skip
    header = ["process", "first, MB", "half way, MB", "last, MB", "bytes a round, later half"]
    return table(title, header, rows)
