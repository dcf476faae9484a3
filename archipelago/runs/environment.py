"""What a run ran on: versions, processor, devices, commit and command, for `environment.json`."""

from __future__ import annotations

import datetime
import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# The packages that can move a number.
_PACKAGES = (
    "archipelago-fl", "ray", "lightning", "torch", "torchvision", "torchmetrics", "medmnist", "scikit-learn",
    "omegaconf", "numpy", "scipy", "safetensors", "pandas", "pyarrow", "threadpoolctl",
)  # fmt: skip


def describe_environment(command: str | None = None) -> dict[str, Any]:
    """Everything about this process that a reader of the results may ask for, as JSON can hold it.

    `command` is what the user typed; only the command line knows it.
    """
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": own_commit(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "system": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "cpu": _cpu(),
        "gpus": _gpus(),
    }


def environment_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Sentences about what changed between two environments in a way that may move the last bits.

    >>> environment_differences({"packages": {"torch": "2.12.0"}}, {"packages": {"torch": "2.13.0"}})
    ['torch was 2.12.0 when the run began and is 2.13.0 now: results may differ in the last bits.']
    """
    pairs: dict[str, tuple[Any, Any]] = {"Python": (before.get("python"), now.get("python"))}
    old, new = before.get("packages") or {}, now.get("packages") or {}
    pairs |= {name: (old.get(name), new.get(name)) for name in (*old, *(n for n in new if n not in old))}
    for key, label in (("instructions", "The CPU's instruction set"), ("model", "The CPU")):
        pairs[label] = ((before.get("cpu") or {}).get(key), (now.get("cpu") or {}).get(key))
    pairs["The code's commit"] = (before.get("commit"), now.get("commit"))
    return [
        f"{label} was {was or 'absent'} when the run began and is {is_now or 'absent'} now: "
        "results may differ in the last bits."
        for label, (was, is_now) in pairs.items()
        if was != is_now
    ]


@functools.cache
def own_commit() -> str | None:
    """The commit of this code, asked for once a process: that is when the code was read."""
    return git_commit(Path(__file__).resolve().parents[2])


def git_commit(root: Path) -> str | None:
    """The commit of the code in `root`, with `+changes` if files differ from it; None outside a repository.

    A repository that merely surrounds `root` (a virtual environment inside somebody's project) says nothing
    about this code, so its commit is not taken.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changes else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        # --no-optional-locks: `status` must not touch the index of a repository somebody is working in.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import psutil
    import torch

    model = os.uname().machine
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model,
        "cores": usable,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
