"""Several hosts on one machine: network namespaces on a bridge, each with a /dev/shm, HOME and /tmp of its own.

    with Network() as network:
        first, second = network.host(), network.host()
        first.start_ray(cpus=1)
        second.start_ray(cpus=1, head=first)
        first.run("python", "-m", "platform.launch", ...)      # on the cluster of both
        second.cut(); second.mend(); second.kill()

A real network runs between them: what is not sent does not arrive, a cut link drops packets without a word, and a
killed host answers nobody. `network.shared` is the one folder that all of them see (NFS, say). Needs root and
`ip netns` (`possible` says whether they are there); ends everything that it started.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GCS = 6379  # every host has all ports to itself
STORE = 120 * 2**20  # bytes of each host's object store


@functools.cache
def possible() -> bool:
    """Whether this machine lets us make hosts; found out by making one, once."""
    hidden = any(
        Path(each).is_relative_to("/tmp") for each in (ROOT, sys.prefix)
    )  # every host has a /tmp of its own
    if hidden or os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "nsenter", "unshare")):
        return False
    name = f"try-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@functools.cache
def _fonts() -> str:
    """Where this user's list of fonts is: every host would make one, in each of its processes at the same time."""
    import matplotlib

    return matplotlib.get_cachedir()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """A bridge that hosts are plugged into, and the folder they share."""

    def __init__(self, disk: int | None = None) -> None:
        self._disk = disk  # MB of the shared folder, where it shall be a disk of its own
        self.tag = secrets.token_hex(2)
        self.hosts: list[Host] = []
        self._switch = f"arc{self.tag}"
        token = secrets.token_hex(32)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TMPDIR"))},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "OMP_NUM_THREADS": "1",
            # Ray's workers stand back by 15 behind everything else, which starves them where others compute.
            "RAY_worker_niceness": "0",
        }

    def __enter__(self) -> Network:
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        if self._disk is not None:
            _do("mount", "-t", "tmpfs", "-o", f"size={self._disk}m", "none", str(self.shared))
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "bridge", "up")
        return self

    def __exit__(self, *failure: object) -> None:
        for host in self.hosts:
            host.close()
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True)
        if self._disk is not None:
            subprocess.run(["umount", "--lazy", str(self.shared)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def host(self) -> Host:
        """One more host, plugged in."""
        number = len(self.hosts) + 1
        made = Host(self, f"arc{self.tag}-{number}", f"10.97.{int(self.tag[:2], 16)}.{number}", number)
        self.hosts.append(made)
        made.boot()
        return made


@dataclass
class Host:
    """One namespace. Processes are started in it through `popen` and `run`."""

    network: Network
    name: str
    address: str
    number: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _keeper: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """Where its own files lie, as seen from outside."""
        return self.network.folder / f"host-{self.number}"

    @property
    def gcs(self) -> str:
        """The address of a cluster whose head it is."""
        return f"{self.address}:{GCS}"

    def boot(self) -> None:
        """Plug it in, with folders of its own mounted over the usual ones."""
        switch, plug = self.network._switch, f"plug{self.number}"
        _do("ip", "netns", "add", self.name)
        _do(
            "ip",
            "link",
            "add",
            plug,
            "netns",
            switch,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.name,
        )
        _do("ip", "-n", switch, "link", "set", plug, "master", "bridge")
        _do("ip", "-n", switch, "link", "set", plug, "up")
        _do("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _do("ip", "-n", self.name, "link", "set", "lo", "up")
        _do("ip", "-n", self.name, "link", "set", "eth0", "up")
        for name in ("tmp", "home"):
            (self.folder / name).mkdir(parents=True)
        mounts = (
            f"mount -t tmpfs none /dev/shm && mount --bind {self.folder / 'tmp'} /tmp && exec sleep infinity"
        )
        self._keeper = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self.name,
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                mounts,
            ],
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self._keeper.pid}/comm").read_text().strip() != "sleep":
            if time.monotonic() > deadline or self._keeper.poll() is not None:
                raise RuntimeError(f"{self.name} did not come up")
            time.sleep(0.02)

    def _inside(self, command: tuple[str, ...], **environment: str) -> dict[str, Any]:
        """The arguments of a process in this host's namespaces."""
        assert self._keeper is not None
        enter = ["nsenter", "--target", str(self._keeper.pid), "--net", "--mount", f"--wd={ROOT}"]
        home = {"HOME": str(self.folder / "home"), "XDG_CACHE_HOME": str(self.folder / "home" / ".cache")}
        return {
            "args": [*enter, *command],
            "env": {
                **self.network.environment,
                **home,
                "ARCHIPELAGO_CACHE": home["XDG_CACHE_HOME"],
                "MPLCONFIGDIR": _fonts(),
                **environment,
            },
        }

    def popen(self, *command: str, log: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process here; `log` gets what it prints."""
        with (log or Path(os.devnull)).open("ab") as output:
            process = subprocess.Popen(
                **self._inside(command, **environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    def run(
        self, *command: str, seconds: float = 300.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end."""
        return subprocess.run(
            **self._inside(command, **environment),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start_ray(self, cpus: int, head: Host | None = None, gpus: int = 0, **environment: str) -> None:
        """Be the head of a cluster, or a node of another host's; `environment`: of Ray's own processes."""
        role = ["--address", head.gcs] if head is not None else ["--head", "--port", str(GCS)]
        role += ["--include-dashboard", "false"] if head is None else []
        before = self._ray_nodes(head or self) if head is not None else 0
        self.popen(
            "ray", "start", *role, "--block", "--disable-usage-stats", "--num-cpus", str(cpus), "--num-gpus", str(gpus),
            "--node-ip-address", self.address, "--object-store-memory", str(STORE),
            log=self.folder / "ray.log", **environment,
        )  # fmt: skip
        deadline = time.monotonic() + 300  # of a machine that is busy with other things
        while self._ray_nodes(head or self) <= before:
            if time.monotonic() > deadline or self.processes[-1].poll() is not None:
                raise RuntimeError((self.folder / "ray.log").read_text(errors="replace")[-2000:])
            time.sleep(0.5)

    @staticmethod
    def _ray_nodes(head: Host) -> int:
        """How many nodes the head counts as alive."""
        code = (
            "import sys; from ray._raylet import GcsClient; "
            "client = GcsClient(address=sys.argv[1]); "
            "print(sum(node.state == 0 for node in client.get_all_node_info().values()))"
        )
        try:
            done = head.run(sys.executable, "-c", code, head.gcs, seconds=60)
        except subprocess.TimeoutExpired:  # a machine with more to do than it can: asked again
            return 0
        return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else 0

    def pids(self) -> list[int]:
        """Everything that runs here, but for the process that keeps the host."""
        said = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        keeper = self._keeper.pid if self._keeper is not None else -1
        return [int(pid) for pid in said.stdout.split() if int(pid) != keeper]

    def named(self, text: str) -> list[int]:
        """Processes here whose command line has `text` in it (`ray::ClientActor`, say)."""
        found = []
        for pid in self.pids():
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found.append(pid)
        return found

    def signal(self, number: signal.Signals, pids: list[int]) -> None:
        """Send a signal to processes of this host, as long as they are there."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self) -> None:
        """Pull the plug of its network: nothing arrives, and nobody is told."""
        _do("ip", "-n", self.network._switch, "link", "set", f"plug{self.number}", "down")

    def mend(self) -> None:
        """Plug it in again."""
        _do("ip", "-n", self.network._switch, "link", "set", f"plug{self.number}", "up")

    def kill(self) -> None:
        """As if its power were gone: the link first, so that no process has a last word."""
        self.cut()
        self.signal(signal.SIGKILL, self.pids())
        for process in self.processes:
            process.wait(30)
        self.processes.clear()
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        (self.folder / "tmp").mkdir(exist_ok=True)

    def restart(self) -> None:
        """Boot again after `kill`: other processes, an empty /tmp and /dev/shm, the same address."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.boot()

    @contextmanager
    def slowed(self, share: float = 0.25, period: float = 0.4) -> Iterator[None]:
        """Let its processes run a share of the time only."""
        over = threading.Event()

        def pace() -> None:
            while not over.is_set():
                stopped = self.named("ray::")
                self.signal(signal.SIGSTOP, stopped)
                over.wait((1 - share) * period)
                self.signal(signal.SIGCONT, stopped)
                time.sleep(share * period)

        thread = threading.Thread(target=pace, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """End everything here, and the host."""
        self.signal(signal.SIGKILL, self.pids())
        for process in (*self.processes, *([self._keeper] if self._keeper is not None else [])):
            process.kill()
            process.wait(30)
        self.processes.clear()
        self._keeper = None
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)
        subprocess.run(
            ["ip", "-n", self.network._switch, "link", "del", f"plug{self.number}"], capture_output=True
        )
