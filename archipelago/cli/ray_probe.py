"""What the Ray cluster has that a run would join."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from archipelago.cli.output import count


class RayProbe:
    """Asks the Ray cluster that a run would join, in another process: if it hangs, nothing else does."""

    CODE = (
        "import json, ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
        "print(json.dumps([node['Resources'] for node in ray.nodes() if node['Alive']]))"
    )
    SECONDS = 30.0  # importing Ray and joining a cluster takes a busy machine that long; a dead port answers at once

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.address = env.get("RAY_ADDRESS") or "local"
        self.problem = ""
        self.deadline = time.monotonic() + self.SECONDS
        self.process: subprocess.Popen[str] | None = None
        if self.address == "local":
            return
        self.problem = connection_problem(self.address)
        if not self.problem:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.CODE, self.address],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    @functools.cached_property
    def nodes(self) -> list[dict[str, float]] | None:
        """The resources of each node of the cluster; None if there is none or it did not answer."""
        if self.process is None:
            return None
        try:
            output, errors = self.process.communicate(timeout=max(self.deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self.close()
            self.problem = f"no answer in {self.SECONDS:g} s"
            return None
        if self.process.returncode != 0:
            lines = [line for line in errors.splitlines() if line.strip()]
            self.problem = lines[-1].strip() if lines else f"exit code {self.process.returncode}"
            return None
        nodes: list[dict[str, float]] = json.loads(output.splitlines()[-1])
        return nodes

    def close(self) -> None:
        """End the asking process if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def rows(self) -> list[tuple[str, str]]:
        """What to print about Ray."""
        token = token_place(self.env)
        alone = "none (RAY_ADDRESS is not set): a run starts Ray on this machine"
        rows: list[tuple[str, str]] = [
            ("address", alone if self.address == "local" else self.address),
            ("token", f"set ({token})" if token else "none (a cluster may ask for one: RAY_AUTH_TOKEN)"),
        ]
        if self.address == "local":
            return rows
        nodes = self.nodes
        if nodes is None:
            return [*rows, ("reachable", f"no: {self.problem}")]
        cpus, gpus, memory = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU", "memory"))
        held = f"{count(len(nodes), 'node')}, {count(cpus, 'CPU')}, {count(gpus, 'GPU')}"
        return [*rows, ("reachable", f"yes: {held}, {memory / 2**30:.1f} GB memory")]


def connection_problem(address: str) -> str:
    """Why nothing answers at host:port, empty if something does (or if the address is no such pair)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def token_place(env: Mapping[str, str]) -> str:
    """Where Ray would find its token, empty if nowhere; never the token itself."""
    if env.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if env.get("RAY_AUTH_TOKEN_PATH"):
        return "RAY_AUTH_TOKEN_PATH" if Path(env["RAY_AUTH_TOKEN_PATH"]).expanduser().is_file() else ""
    return "~/.ray/auth_token" if Path("~/.ray/auth_token").expanduser().is_file() else ""
