"""Ray clusters of the tests' own: short temporary folders, a token, and no process left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short path: the sockets of Ray must fit into 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def new_token() -> str:
    """A token for one cluster."""
    return secrets.token_hex(32)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def family(pid: int) -> list[psutil.Process]:
    """A process and all that came from it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ray_processes(folder: Path) -> list[psutil.Process]:
    """Processes whose command line or environment names the temporary folder of a cluster."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def still_alive(processes: Sequence[psutil.Process], seconds: float = 20.0) -> list[str]:
    """Those that have not ended after `seconds`, as lines that say what they are."""
    deadline = time.monotonic() + seconds
    while True:
        lines = []
        for process in processes:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.1)


@contextmanager
def own_cluster(cpus: int, gpus: int, **environment: str) -> Iterator[Path]:
    """This process connected to a local cluster of its own; yields the cluster's temporary folder.

    `environment` reaches every worker. Ends exactly what was started, and fails if anything stayed.
    """
    import ray

    assert not ray.is_initialized(), "a test left its connection to Ray open"
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        # Ray itself switches tokens on for a local cluster, through this variable: have it put back afterwards.
        patch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", ""))
        if not os.environ["RAY_AUTH_MODE"]:
            patch.delenv("RAY_AUTH_MODE")
        for name, value in environment.items():
            patch.setenv(name, value)
        before = {process.pid for process in family(os.getpid())}
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(folder),
        )
        try:
            yield folder
        finally:
            started = [process for process in family(os.getpid()) if process.pid not in before]
            ray.shutdown()
        left = still_alive(started)
        assert not left, f"processes that outlived their cluster: {left}"
