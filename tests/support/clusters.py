"""Ray clusters of the tests' own: short temporary folders, a token, and no process left behind."""

from __future__ import annotations

import multiprocessing.resource_tracker
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

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


def assert_idle(seconds: float = 20.0) -> None:
    """Fail unless every resource of the connected cluster is free again, after a moment to let go."""
    import ray

    deadline = time.monotonic() + seconds
    while True:
        total, free = ray.cluster_resources(), ray.available_resources()
        used = {name: total[name] - free.get(name, 0.0) for name in ("CPU", "GPU") if name in total}
        if not any(used.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not any(used.values()), f"a test left something running: {used}"


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
        # Python's own book-keeper of shared memory: whoever needs it first starts it, and it stays to the end of
        # this process. Started here, it is not taken for something that the cluster left behind.
        multiprocessing.resource_tracker.ensure_running()
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


@dataclass(frozen=True)
class Head:
    """A cluster started as an administrator would start it, with `ray start --head`."""

    gcs: str  # host:port
    dashboard: str  # http://host:port, which jobs are submitted to
    folder: Path
    environment: dict[str, str]  # of somebody who knows the token

    def call(self, *command: str, seconds: float = 240.0, **environment: str) -> CompletedProcess[str]:
        """Run a command in the project's root, as somebody who knows the token."""
        return subprocess.run(
            command, cwd=ROOT, env={**self.environment, **environment},
            capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip


@contextmanager
def head_node(cpus: int, *more: str, **environment: str) -> Iterator[Head]:
    """`ray start --head` in the project's root, with a token, on ports of its own; ended with all it started.

    `more` are arguments of that command, `environment` is for it alone.
    """
    gcs, dashboard, agent, client = free_ports(4)
    tools = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = kept | {
        "PATH": os.pathsep.join([tools, kept.get("PATH", "")]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    env.pop("PYTHONPATH", None)
    with short_folder() as folder:
        log = folder / "head.log"
        command = [
            f"{tools}/ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", str(cpus),
            "--node-ip-address", "127.0.0.1", "--port", str(gcs), "--temp-dir", str(folder / "t"),
            "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard),
            "--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client),
            "--object-store-memory", str(200 * 2**20), "--min-worker-port", "0", "--max-worker-port", "0", *more,
        ]  # fmt: skip
        with _running(command, {**env, **environment}, log) as process:
            _wait_for_port(dashboard, process, log)
            yield Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", folder / "t", env)


@contextmanager
def another_node(
    head: Head, cpus: int, hidden: Path | None = None, root: Path | None = None, gpus: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """One more node of that cluster; yields the process that all others of the node come from.

    `root`: a folder for this node's own temporary files, home and caches. `hidden`: a folder that this node does not
    see what others have in.
    """
    environment = dict(head.environment)
    command = [
        f"{Path(sys.executable).parent}/ray", "start", "--address", head.gcs, "--block", "--num-cpus", str(cpus),
        "--node-ip-address", "127.0.0.1", "--dashboard-agent-listen-port", str(free_ports(1)[0]),
        "--object-store-memory", str(200 * 2**20), "--min-worker-port", "0", "--max-worker-port", "0",
    ]  # fmt: skip
    if gpus:
        command += ["--num-gpus", str(gpus)]  # declared, not there
    if root is not None:
        command += ["--temp-dir", str(root / "t")]
        for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "ARCHIPELAGO_CACHE"):
            (root / name).mkdir(parents=True)
            environment[name] = str(root / name)
    if hidden is not None:
        mount = f"mount -t tmpfs none {shlex.quote(str(hidden))} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", mount]
    with _running(command, environment, head.folder / f"node-{uuid.uuid4().hex[:6]}.log") as process:
        yield process


def can_hide() -> bool:
    """Whether this machine lets us mount over a folder for one process alone."""
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )


@contextmanager
def _running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start --block`, ended with all it started; fails if anything stayed."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
    try:
        yield process
    finally:
        started = family(process.pid)
        process.terminate()  # `--block` ends its children first
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        left = still_alive(started, 30)
        for member in started:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    assert not left, f"processes that outlived their cluster: {left}"


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
