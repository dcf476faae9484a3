"""Runs across real hosts: a network between them, folders of their own, and whatever can happen to one of them.

`make check-hosts` runs them all (root and `ip netns` needed): a minute or two each, which is more than CI
has. It runs the first one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from benchmarks.hosts import Host, Network, possible
from tests.support.runs import assert_equal_runs, events

pytestmark = [
    pytest.mark.ray,
    pytest.mark.hosts,
    pytest.mark.timeout(1800),  # with many others on the machine a cluster takes minutes to start
]

ROUNDS = 60
SETTINGS = (
    "method=ifca", "clusters=2", "clients=8", "model=mlp", "model.hidden=[8]", "local.steps=20", "local.batch=16",
    "participation.fraction=0.75", "checkpoint.every=5", f"rounds={ROUNDS}", "evaluation.every=5",
)  # fmt: skip


OFTEN = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture
def network() -> Iterator[Network]:
    if not possible():
        pytest.skip("needs root and `ip netns`")
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of vectors in two groups of clients' own: what a host without it cannot read."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 400)
    x = (np.eye(4)[labels] @ rng.normal(size=(4, 12)) + 0.3 * rng.normal(size=(400, 12))).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    np.savez(
        path, train_images=x[:300], train_labels=labels[:300], test_images=x[300:], test_labels=labels[300:]
    )
    return path


def settings_with(*changed: str) -> list[str]:
    """The settings above, each said once."""
    given = dict(each.split("=", 1) for each in (*SETTINGS, *changed))
    return [f"{key}={value}" for key, value in given.items()]


def undisturbed(data: Path, storage: Path, *changed: str) -> Path:
    """The same experiment in this process."""
    settings = [*settings_with(*changed), "data=npz", f"data.root={data}", "fleet.backend=in_process"]
    return run_experiment(load_config(None, [*settings, f"storage={storage}"], env={}), quiet=True)


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(data, tmp_path_factory.mktemp("expected"))


class OnHosts:
    """A driver on the first host of a cluster, and what its run directory says."""

    def __init__(self, driver: Host, data: Path, *settings: str) -> None:
        # The file is on the driver's host alone, under its /tmp.
        (driver.folder / "tmp" / "mine.npz").write_bytes(data.read_bytes())
        self.path = driver.network.shared / "run"
        self.log = driver.network.folder / "driver.log"
        self.process = driver.popen(
            sys.executable, "-m", "platform.launch", *settings_with(*settings), "data=npz", "data.root=/tmp/mine.npz",
            "fleet.actors=2", f"storage={driver.network.shared}", "name=run",
            log=self.log, RAY_ADDRESS=driver.gcs,
        )  # fmt: skip

    def rounds_done(self) -> int:
        file = self.path / "metrics.csv"
        return file.read_bytes().count(b"\n") - 1 if file.is_file() else 0

    def wait_for_round(self, round: int, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while self.rounds_done() < round:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def lost(self) -> list[str]:
        file = self.path / "events.jsonl"
        return [line for line in file.read_text().splitlines() if "Lost" in line] if file.is_file() else []

    def cost_of_the_next_loss(self, seconds: float = 600.0) -> str:
        """Waits for it, and for the round after it."""
        began, done, noticed = time.monotonic(), self.rounds_done(), 0.0
        while self.rounds_done() <= done or not noticed:
            now = time.monotonic() - began
            if not noticed and self.lost():
                noticed = now
            assert now < seconds and (noticed or self.process.poll() is None), self.said()
            time.sleep(0.02)
        now = time.monotonic() - began
        return f"rebuilt, and noticed, in {noticed:.1f} s; a round more after {now:.1f} s: {self.lost()[0]}"

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def assert_finished_as(self, expected: Path, seconds: float = 800.0) -> None:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.said()}") from None
        assert code == 0, self.said()
        assert_equal_runs(self.path, expected)


def cluster(network: Network, hosts: int) -> list[Host]:
    """A cluster of hosts with one CPU each; the first is its head."""
    made = [network.host() for _ in range(hosts)]
    for host in made:
        host.start_ray(cpus=1, head=None if host is made[0] else made[0])
    return made


def test_hosts_give_the_bits_of_one_process(network: Network, data: Path, tmp_path: Path) -> None:
    few = ("rounds=6", "local.steps=5")
    first, second = cluster(network, 2)
    run = OnHosts(first, data, *few)
    run.wait_for_round(1)
    assert second.named("ray::ClientActor") and first.named("ray::ClientActor")
    run.assert_finished_as(undisturbed(data, tmp_path, *few))
    assert not run.lost()


@pytest.mark.full
def test_hosts_give_the_bits_of_one_process_though_one_of_them_is_killed(
    network: Network, data: Path, expected: Path
) -> None:
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    assert second.named("ray::ClientActor") and first.named("ray::ClientActor")
    second.kill()
    assert run.rounds_done() < ROUNDS  # else nothing was lost
    print("killed host:", run.cost_of_the_next_loss())
    run.assert_finished_as(expected)
    assert any("Lost" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_whose_link_is_cut_are_replaced(network: Network, data: Path, expected: Path) -> None:
    """Nobody is told of a cut link: it is noticed by silence."""
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    second.cut()
    print("cut link:", run.cost_of_the_next_loss())
    run.assert_finished_as(expected)
    assert any("Lost" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_whose_link_is_cut_are_replaced_sooner_where_ray_looks_more_often(
    network: Network, data: Path, expected: Path
) -> None:
    """The settings of the head that docs/promises.md names."""
    first, second = network.host(), network.host()
    first.start_ray(cpus=1, **OFTEN)
    second.start_ray(cpus=1, head=first)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    began = time.monotonic()
    second.cut()
    print("cut link, OFTEN:", run.cost_of_the_next_loss())
    assert time.monotonic() - began < 60
    run.assert_finished_as(expected)


@pytest.mark.full
def test_hosts_whose_link_comes_back_soon_lose_nothing(network: Network, data: Path, expected: Path) -> None:
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    second.cut()
    time.sleep(5)
    second.mend()
    run.assert_finished_as(expected)
    assert not run.lost()


@pytest.mark.full
def test_hosts_that_are_slow_are_waited_for(network: Network, data: Path, expected: Path) -> None:
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(2)
    with second.slowed(0.3):
        run.assert_finished_as(expected)
    assert not any("Lost" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_that_come_back_are_used_again(network: Network, data: Path, tmp_path: Path) -> None:
    """A fleet that shrank grows back."""
    long = ("local.steps=800",)  # a minute: the host needs half of one to come back
    first, second = cluster(network, 2)
    run = OnHosts(first, data, *long)
    run.wait_for_round(6)
    second.kill()
    deadline = time.monotonic() + 300
    while "8 clients on 1 Ray actor" not in run.said():  # a host that is back sooner is used at once
        assert run.process.poll() is None and time.monotonic() < deadline, run.said()
        time.sleep(0.1)
    second.restart()
    second.start_ray(cpus=1, head=first)
    deadline = time.monotonic() + 120
    while not second.named("ray::ClientActor"):
        assert run.process.poll() is None and time.monotonic() < deadline, run.said()
        time.sleep(0.1)
    run.assert_finished_as(undisturbed(data, tmp_path, *long))
    assert run.lost() and any("Nodes are back" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_that_join_late_are_waited_for(network: Network, data: Path, expected: Path) -> None:
    """A cluster that is still growing, as with an autoscaler: two actors are asked for where one CPU is."""
    first = network.host()
    first.start_ray(cpus=1)
    run = OnHosts(first, data, "fleet.wait=300")
    deadline = time.monotonic() + 120
    while "waiting for nodes" not in run.said():
        assert run.process.poll() is None and time.monotonic() < deadline, run.said()
        time.sleep(0.1)
    assert run.process.poll() is None, run.said()
    second = network.host()
    second.start_ray(cpus=1, head=first)
    run.wait_for_round(1)
    assert second.named("ray::ClientActor")
    run.assert_finished_as(expected)


@pytest.mark.full
def test_hosts_go_on_with_a_run_whose_driver_s_host_is_lost(
    network: Network, data: Path, expected: Path
) -> None:
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    first.kill()  # the driver, the server and the head of the cluster with it
    second.restart()
    second.start_ray(cpus=1)
    (second.folder / "tmp" / "mine.npz").write_bytes(data.read_bytes())
    done = second.run(
        sys.executable,
        "-m",
        "platform.launch",
        "resume",
        str(run.path),
        seconds=800.0,
        RAY_ADDRESS=second.gcs,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal_runs(run.path, expected)
