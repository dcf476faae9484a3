"""A sweep on two hosts while whatever can happen to a cluster happens to it, at random, with a seed.

    python -m benchmarks chaos --minutes 30 --seed 1

Hosts are network namespaces (`benchmarks/hosts.py`: root and `ip netns` needed) with a real network between them, and
storage is a small disk that both see. Each host has one CPU and each trial two actors, so that every trial is on both;
a fault counts if it hit something. Faults: a process with clients or a trial is killed or stopped for a while, the
driver is killed, a host is killed and comes back, a link is cut and mended, the disk is full. Sweeps follow each other
until time is up; a driver that ended is resumed, as a user would. The last one runs to its end undisturbed. Every
trial of every sweep must equal, by bytes, that of a sweep in one process to which nothing happened.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archipelago.core.signals import ended_in_order
from archipelago.runs.status import is_run, read_status
from benchmarks.hosts import Host, Network, possible
from benchmarks.tables import table

SETTINGS = (
    "data=digits", "data.rotations=2", "clusters=2", "clients=8", "model=mlp", "model.hidden=[16]", "local.steps=30",
    "rounds=60", "evaluation.every=5", "checkpoint.every=5", "participation.fraction=0.75", "fleet.restarts=1000",
)  # fmt: skip
SWEEP = ("sweep.methods=[fedavg,ifca,fesem+cam]", "sweep.seeds=[0,1]")
DISK = 192  # MB of the storage that both hosts see
PATIENCE = 1200.0  # seconds that the last sweep may take after the last fault
COMPARED = ("metrics.csv", "clients.parquet", "assignments.parquet")  # and every final model


def run(
    rounds: int | None, miniature: bool, *, minutes: float | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Minutes of faults; `rounds` stands for nothing here."""
    if not possible():
        return {"skipped": "needs root and `ip netns`"}
    length = 60.0 * (minutes or (0.5 if miniature else 3.0))
    settings = [*SETTINGS, *(("sweep.methods=[ifca]", "sweep.seeds=[0,1]") if miniature else SWEEP)]
    with ended_in_order(), Network(disk=DISK) as network:
        _undisturbed(settings, network.folder / "reference")
        return Chaos(network, settings, seed or 0).run(length)


def _undisturbed(settings: list[str], storage: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "platform.launch",
        *(setting for setting in settings if not setting.startswith("fleet.")),  # nobody reads them there
        "fleet.backend=in_process",
        f"storage={storage}",
    ]
    subprocess.run([*command, "name=sweep"], check=True, capture_output=True)


class Chaos:
    """The cluster, the sweep that runs on it, and what was done to both."""

    def __init__(self, network: Network, settings: list[str], seed: int) -> None:
        self.network, self.settings, self.rng = network, settings, random.Random(seed)
        self.seed = seed
        self.faults: list[dict[str, Any]] = []
        self.resumes = self.sweeps = self.trials = self.files = self.missed = 0
        self.different: list[str] = []
        self.first, self.second = network.host(), network.host()
        self.driver: subprocess.Popen[bytes] | None = None
        self._least = 0  # rounds that were there after a fault
        self._log = network.folder / "driver.log"

    # The sweep

    @property
    def _path(self) -> Path:
        return self.network.shared / f"sweep-{self.sweeps}"

    def _start(self) -> None:
        """Start the next sweep, or resume the one that is there."""
        if (self._path / "sweep.yaml").is_file():
            self.resumes += 1
            words = ["resume", str(self._path)]
        else:
            words = [
                *self.settings,
                f"storage={self.network.shared}",
                f"name={self._path.name}",
                "fleet.actors=2",
            ]
        command = (sys.executable, "-m", "platform.launch", *words)
        self.driver = self.first.popen(*command, log=self._log, RAY_ADDRESS=self.first.gcs)

    def _look(self) -> bool:
        """Whether a sweep has just been finished and compared; a driver that ended otherwise is started again."""
        assert self.driver is not None
        code = self.driver.poll()
        if code is None:
            return False
        if code == 0:
            self._compare()
            self.sweeps += 1
        self._ready()
        self._start()
        return code == 0

    def _compare(self, *, over: bool = False) -> None:
        """Every file of every trial that equal runs have in common; one that is missing differs.

        `over`: time is up, and only the trials that are finished are compared.
        """
        reference = self.network.folder / "reference" / "sweep" / "runs"
        for expected in sorted(reference.iterdir()):
            found = self._path / "runs" / expected.name
            if over and not (is_run(found) and read_status(found).state == "finished"):
                continue
            self.trials += 1
            files = [
                *COMPARED,
                *(path.relative_to(expected).as_posix() for path in expected.glob("models/*.safetensors")),
            ]
            assert len(files) > len(COMPARED) and (expected / "clients.parquet").is_file(), expected
            for file in files:
                wanted, given = expected / file, found / file
                if not wanted.is_file() and not given.is_file():
                    continue  # methods without clusters assign nobody
                self.files += 1
                if wanted.is_file() != given.is_file() or given.read_bytes() != wanted.read_bytes():
                    self.different.append(f"{self._path.name}/{expected.name}/{file}")
        subprocess.run(["rm", "-rf", str(self._path)], check=True)  # the disk is small

    def _progress(self) -> int:
        """Lines that all trials of the sweep have written so far."""
        return sum(
            file.read_bytes().count(b"\n") for file in self.network.shared.glob("sweep-*/runs/*/metrics.csv")
        )

    def _losses(self) -> int:
        """Losses that the runs there have met, by their events."""
        files = self.network.shared.glob("sweep-*/runs/*/events.jsonl")
        return sum(file.read_bytes().count(b"Lost an actor") for file in files)

    # The cluster

    def _spread(self) -> bool:
        """Wait until client actors are on both hosts; resumes what has ended."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if all(host.named("ray::ClientActor") for host in (self.first, self.second)):
                return True
            self._look()
            time.sleep(0.1)
        return False

    def _ready(self) -> None:
        """A cluster of both hosts, whatever is left of it."""
        if not self.first.named("gcs_server"):
            self.first.restart()
            self.first.start_ray(cpus=1)
            self.second.restart()
        if not self.second.named("raylet"):
            self.second.restart()
            self.second.start_ray(cpus=1, head=self.first)

    def _some(self, host: Host) -> list[int]:
        """A process with clients, or a trial, on a host."""
        found = host.named("ray::ClientActor") + host.named("ray::ServerActor") + host.named("ray::TuneTrial")
        return [self.rng.choice(sorted(found))] if found else []

    # What happens

    def kill_a_process(self) -> bool:
        """A process with clients, a server or a trial dies."""
        host = self.rng.choice([self.first, self.second])
        struck = self._some(host)
        host.signal(signal.SIGKILL, struck)
        return bool(struck)

    def stop_a_process(self) -> bool:
        """One hangs for a while."""
        host = self.rng.choice([self.first, self.second])
        stopped = self._some(host)
        host.signal(signal.SIGSTOP, stopped)
        time.sleep(self.rng.uniform(1, 12) if stopped else 0)
        host.signal(signal.SIGCONT, stopped)
        return bool(stopped)

    def kill_the_driver(self) -> bool:
        """The process that the user started dies."""
        assert self.driver is not None
        alive = self.driver.poll() is None
        self.first.signal(signal.SIGKILL, [self.driver.pid])
        return alive

    def kill_a_host(self) -> bool:
        """The second host loses its power, and comes back."""
        self.second.kill()
        time.sleep(self.rng.uniform(0, 10))
        self._ready()
        return True

    def kill_the_head(self) -> bool:
        """The host of the driver and of the cluster's head loses its power, and comes back."""
        self.first.kill()
        self._ready()
        return True

    def cut_the_link(self) -> bool:
        """Between the hosts, for a few seconds or for longer than anybody waits."""
        self.second.cut()
        time.sleep(self.rng.choice([2.0, 8.0, 20.0]))
        self.second.mend()
        return True

    def fill_the_disk(self) -> bool:
        """Nobody can write for a few seconds."""
        file = self.network.shared / "filler"
        with file.open("wb") as output:
            try:
                while True:
                    output.write(bytes(2**20))
                    output.flush()
            except OSError:
                pass
            time.sleep(self.rng.uniform(1, 5))
        file.unlink()
        return True

    def run(self, seconds: float) -> dict[str, Any]:
        """Faults for `seconds`, then the last sweep to its end."""
        kinds: list[Callable[[], bool]] = [
            self.kill_a_process, self.kill_a_process, self.stop_a_process, self.stop_a_process, self.kill_the_driver,
            self.kill_a_host, self.kill_the_head, self.cut_the_link, self.fill_the_disk,
        ]  # fmt: skip
        self._ready()
        self._start()
        self._wait_for_progress(time.monotonic() + PATIENCE)
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            kind = self.rng.choice(kinds)
            spread = self._spread()
            if self._strike(kind, spread, started + seconds + PATIENCE):
                print(f"{time.monotonic() - started:6.0f} s  {self.faults[-1]}", flush=True)
            pause = time.monotonic() + self.rng.uniform(1, 8)
            while time.monotonic() < pause:
                self._look()
                time.sleep(0.2)
        deadline = time.monotonic() + PATIENCE
        while not self._look() and time.monotonic() < deadline:
            time.sleep(0.2)
        finished = time.monotonic() < deadline
        if not finished:
            self._compare(over=True)
        return self._result(finished, time.monotonic() - started)

    def _strike(self, kind: Callable[[], bool], spread: bool, deadline: float) -> bool:
        """One fault, and what it cost; False where it found nothing to hit, which is no fault."""
        before, losses, resumes = self._progress(), self._losses(), self.resumes
        began = time.monotonic()
        if not kind():
            self.missed += 1
            return False
        lasted = time.monotonic() - began
        self._least = self._progress()
        recovered = self._wait_for_progress(deadline, before)
        self.faults.append(
            {
                "kind": kind.__name__,
                "spread": spread,
                "lasted": lasted,
                "seconds": time.monotonic() - began,
                "recovered": recovered,
                "losses": max(self._losses() - losses, 0) + self.resumes - resumes,
                "rounds_again": max(before - self._least, 0),
            }
        )
        return True

    def _wait_for_progress(self, deadline: float, before: int = 0) -> bool:
        """Until a round more is written than before, or the sweep is done; resumes what has ended."""
        while time.monotonic() < deadline:
            if self._look():
                return True
            progress = self._progress()
            self._least = min(self._least, progress)
            if progress > before:
                return True
            time.sleep(0.1)
        return False

    def _result(self, finished: bool, seconds: float) -> dict[str, Any]:
        return {
            "kept": finished
            and not self.different
            and self.trials > 0
            and all(fault["recovered"] and fault["spread"] for fault in self.faults),
            "seed": self.seed,
            "minutes": seconds / 60,
            "faults": self.faults,
            "missed": self.missed,
            "resumes": self.resumes,
            "sweeps": self.sweeps,
            "trials": self.trials,
            "files": self.files,
            "different": self.different,
            "last_finished": finished,
            "last_words": "" if finished else self._log.read_text(errors="replace")[-2000:],
        }


def report(result: dict[str, Any]) -> str:
    """What happened, how long it took until a round was written again, and whether anything was lost."""
    if "skipped" in result:
        return f"Chaos: not run ({result['skipped']})."
    kinds = Counter(fault["kind"] for fault in result["faults"])
    rows = []
    for kind, count in sorted(kinds.items()):
        mine = [fault for fault in result["faults"] if fault["kind"] == kind]
        lasted, seconds = ([fault[key] for fault in mine] for key in ("lasted", "seconds"))
        losses, again = (sum(fault[key] for fault in mine) for key in ("losses", "rounds_again"))
        rows.append(
            [kind.replace("_", " "), str(count), str(losses), str(again), f"{statistics.median(lasted):.1f}",
             f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        )  # fmt: skip
    equal = "all equal by bytes to an undisturbed sweep" if not result["different"] else (
        f"{len(result['different'])} files differ: {', '.join(result['different'][:3])}"
    )  # fmt: skip
    title = (
        f"Chaos: {result['minutes']:.1f} minutes, seed {result['seed']}, {len(result['faults'])} faults, "
        f"{result['resumes']} times resumed, {result['sweeps']} sweeps, {result['trials']} trials, "
        f"{result['files']} files: {equal}"
        + ("" if result["last_finished"] else "; THE LAST ONE DID NOT END")
    )
    header = [
        "fault",
        "times",
        "losses met",
        "rounds run again",
        "s that it lasted",
        "s to the next round, median",
        "longest",
    ]
    return table(title, header, rows)
