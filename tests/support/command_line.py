"""The command line as tests call it: in this process, or as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.clusters import ROOT

IN_PROCESS = ["fleet.backend=in_process", "local.steps=1", "rounds=2", "clients=4"]


def started(
    *arguments: str, module: str = "platform.launch", cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS` to its end."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd, env={**env, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
