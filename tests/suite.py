"""The test suite as `make test` runs it: in parts beside each other, since tests with a Ray cluster mostly wait for it.

    python -m tests.suite

Bare `pytest` runs the same tests in one process. Output comes part after part and ends with the closing line of each.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

TESTS = Path(__file__).parent
# Reading all files to find that few have tests with a cluster takes twenty seconds.
WITH_CLUSTER = [
    str(path.relative_to(TESTS.parent))
    for path in sorted(TESTS.rglob("test_*.py"))
    if "mark.ray" in path.read_text(encoding="utf-8")
]
# By name: how its pytest is called. Tests without a cluster leave the processor to those that take longest anyway.
PARTS: dict[str, list[str]] = {
    "without a cluster": ["nice", "-n", "15", sys.executable, "-m", "pytest", "-n", "2", "-m", "not ray and not full"],
    "with a Ray cluster": [sys.executable, "-m", "pytest", "-m", "ray and not full", *WITH_CLUSTER],
}  # fmt: skip
PATIENCE = 60.0  # seconds that an interrupted part may take to end


def run_parts(parts: Mapping[str, Sequence[str]], output: TextIO) -> int:
    """Run all parts at once; returns 0, or the exit code of the first part that failed."""
    width = str(shutil.get_terminal_size().columns)
    colour = {"FORCE_COLOR": "1"} if output.isatty() else {}
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(len(parts))]
        processes = []
        for log, command in zip(logs, parts.values(), strict=True):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, stdout=file, stderr=file, env={**os.environ, "COLUMNS": width, **colour}
                    )
                )
        try:
            for name, process, log in zip(parts, processes, logs, strict=True):
                output.write(f"\nTests {name}\n")
                _follow(process, log, output)
        finally:  # an interrupt, or CI's time limit
            _end([process for process in processes if process.poll() is None])
        output.write("\n")
        for log in logs:
            lines = log.read_text(errors="replace").split("\n")
            output.write(next((line for line in reversed(lines) if line.strip()), "") + "\n")
        output.flush()
    return next((process.returncode for process in processes if process.returncode), 0)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt pytest, so that it ends the clusters of its fixtures; kill it if it will not hear."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _follow(process: subprocess.Popen[bytes], log: Path, output: TextIO) -> None:
    """Copy a log while its process writes it."""
    with log.open(errors="replace") as file:
        while True:
            ended = process.poll() is not None
            output.write(file.read())
            output.flush()
            if ended:
                return
            time.sleep(0.1)


def end_when_told() -> None:
    """End the parts on SIGTERM and SIGINT, also where a shell's background started this with SIGINT ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)


if __name__ == "__main__":
    end_when_told()
    sys.exit(run_parts(PARTS, sys.stdout))
