"""From the start of the command to the first finished round of the demonstration."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, clean_environment, cpu_seconds
from benchmarks.tables import table, verdict

LIMIT = 30.0
WHOLE = 120.0  # seconds that the demonstration may take, start of Ray and report included
DEADLINE = 600.0


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` starts (3 by default), one after the other."""
    starts = [start_once() for _ in range(rounds or (1 if miniature else 3))]
    slowest = max(start["first_round_seconds"] for start in starts)
    whole = max(start["whole_seconds"] for start in starts)
    kept = slowest <= LIMIT and whole <= WHOLE
    return {"limit": LIMIT, "slowest_seconds": slowest, "whole_limit": WHOLE, "whole_seconds": whole, "kept": kept,
            "starts": starts}  # fmt: skip


def start_once() -> dict[str, Any]:
    """The demonstration in a folder of its own; the first row of a trial's metrics says that a round is done."""
    import psutil

    with tempfile.TemporaryDirectory(prefix="archipelago-start-") as folder:
        command = [
            sys.executable, "-m", "platform.launch", "--config", "tune_configs/comparison.yaml",
            f"storage={folder}", "name=demo",
        ]  # fmt: skip
        output = Path(folder) / "output.txt"
        with output.open("wb") as file:
            started = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=clean_environment()
            )
            try:
                first = _first_round(process, Path(folder) / "demo" / "runs", started, output)
                known = psutil.Process(process.pid)
                used = cpu_seconds([known.pid, *(child.pid for child in known.children(recursive=True))])
                code = process.wait(timeout=DEADLINE)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(timeout=60)
        seconds = time.perf_counter() - started
        if code != 0:
            raise RuntimeError(f"the demonstration ended with code {code}:\n{output.read_text()}")
    return {"first_round_seconds": first, "processor_seconds_until_then": used, "whole_seconds": seconds}


def _first_round(process: subprocess.Popen[bytes], runs: Path, started: float, output: Path) -> float:
    while True:
        if any(metrics.read_bytes().count(b"\n") >= 2 for metrics in runs.glob("*/metrics.csv")):
            return time.perf_counter() - started
        if process.poll() is not None or time.perf_counter() - started > DEADLINE:
            raise RuntimeError(f"the demonstration finished no round:\n{output.read_text()}")
        time.sleep(0.02)


def report(result: dict[str, Any]) -> str:
    """Every start."""
    title = (
        f"Start of the command to the first finished round of the demonstration: at most "
        f"{result['slowest_seconds']:.1f} s, limit {result['limit']:.0f} s: "
        f"{verdict(result['slowest_seconds'], result['limit'])}; to its end: at most "
        f"{result['whole_seconds']:.1f} s, limit {result['whole_limit']:.0f} s: "
        f"{verdict(result['whole_seconds'], result['whole_limit'])}"
    )
    rows = [
        [
            f"{number}",
            f"{start['first_round_seconds']:.1f}",
            f"{start['processor_seconds_until_then']:.1f}",
            f"{start['whole_seconds']:.1f}",
        ]
        for number, start in enumerate(result["starts"], 1)
    ]
    return table(title, ["start", "first round s", "processor s until then", "whole run s"], rows)
