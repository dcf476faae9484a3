"""The machine, the versions, and what a tree of processes costs in memory and processor time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "lightning", "ray", "numpy", "torchvision", "torchmetrics")


def facts() -> dict[str, Any]:
    """Everything a reader needs to judge a number: machine, load, versions, commit."""
    import psutil

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "system": f"{os.uname().sysname} {os.uname().release}",
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain").splitlines(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _git(*words: str) -> str:
    try:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.rstrip()


def clean_environment() -> dict[str, str]:
    """A cluster that happens to be around must not be joined: the local start is what is measured."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def launch(*arguments: str) -> None:
    """`python -m platform.launch ARGUMENTS` to its end; a failure has all that it printed."""
    command = [sys.executable, "-m", "platform.launch", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )


def tree(root: int | None = None) -> list[int]:
    """A process (default: this one) and everything below it: with a local Ray cluster, all of Ray too."""
    import psutil

    try:
        top = psutil.Process(root)
        return [top.pid, *(child.pid for child in top.children(recursive=True))]
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time, user and system, that these processes have used so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """PSS: a page shared by n processes counts 1/n in each, hence once in the sum over a tree."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def memory_by_process(pids: Iterable[int]) -> dict[str, int]:
    """PSS in bytes of each process, by name and id."""
    found = {}
    for pid in pids:
        if size := proportional_bytes(pid):
            found[f"{_name(pid)} ({pid})"] = size
    return found


class Peak(threading.Thread):
    """Looks at a process tree until it is stopped; keeps the largest sum it has seen, and what it was."""

    def __init__(self, root: int | None = None, pause: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.largest: dict[str, int] = {}
        self._root, self._pause = root, pause  # seconds between two looks
        self._over = threading.Event()

    def run(self) -> None:
        """Look, wait, look again."""
        while not self._over.wait(self._pause):
            self.look()

    def look(self) -> dict[str, int]:
        """Memory now, by process."""
        now = memory_by_process(tree(self._root))
        if sum(now.values()) > sum(self.largest.values()):
            self.largest = now
        return now

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()


def watched(command: Sequence[str]) -> tuple[float, dict[str, int]]:
    """(seconds of a command, memory of its processes when they had most together)."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = Peak(process.pid, pause=0.1)
    peak.start()
    code = process.wait()
    seconds = time.perf_counter() - started
    peak.stop()
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}")
    return seconds, peak.largest


def _name(pid: int) -> str:
    try:
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return "?"
    if words and words[0].startswith("ray::"):
        return words[0]
    shown = [Path(word).name for word in words if not word.startswith("-")][:2]
    return " ".join(shown) or "?"
