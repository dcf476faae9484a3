"""Runs across real hosts: a network between them, folders of their own, and whatever can happen to one of them.

`make check-hosts` runs them (root and `ip netns` needed): a minute or two each, which is more than CI has.
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
    pytest.mark.timeout(900),
    pytest.mark.skipif(not possible(), reason="needs root and `ip netns`"),
]

ROUNDS = 60
SETTINGS = (
    "method=ifca", "clusters=2", "clients=8", "model=mlp", "model.hidden=[8]", "local.steps=20", "local.batch=16",
    "participation.fraction=0.75", "checkpoint.every=5", f"rounds={ROUNDS}", "evaluation.every=5",
)  # fmt: skip


@pytest.fixture
def network() -> Iterator[Network]:
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


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same experiment in this process, undisturbed."""
    storage = tmp_path_factory.mktemp("expected")
    settings = [*SETTINGS, "data=npz", f"data.root={data}", "fleet.backend=in_process", f"storage={storage}"]
    return run_experiment(load_config(None, settings, env={}), quiet=True)


class OnHosts:
    """A driver on the first host of a cluster, and what its run directory says."""

    def __init__(self, driver: Host, data: Path, *settings: str) -> None:
        # The file is on the driver's host alone, under its /tmp.
        (driver.folder / "tmp" / "mine.npz").write_bytes(data.read_bytes())
        self.path = driver.network.shared / "run"
        self.log = driver.network.folder / "driver.log"
        self.process = driver.popen(
            sys.executable, "-m", "platform.launch", *SETTINGS, "data=npz", "data.root=/tmp/mine.npz", "fleet.actors=2",
            f"storage={driver.network.shared}", "name=run", *settings,
            log=self.log, RAY_ADDRESS=driver.gcs,
        )  # fmt: skip

    def rounds_done(self) -> int:
        file = self.path / "metrics.csv"
        return file.read_bytes().count(b"\n") - 1 if file.is_file() else 0

    def wait_for_round(self, round: int, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while self.rounds_done() < round:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def assert_finished_as(self, expected: Path, seconds: float = 400.0) -> None:
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
    run.assert_finished_as(expected)
    assert any("Lost" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_whose_link_is_cut_are_replaced(network: Network, data: Path, expected: Path) -> None:
    """Nobody is told of a cut link: it is noticed by silence."""
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    second.cut()
    run.assert_finished_as(expected)
    assert any("Lost" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_whose_link_comes_back_soon_lose_nothing(network: Network, data: Path, expected: Path) -> None:
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(8)
    second.cut()
    time.sleep(5)
    second.mend()
    run.assert_finished_as(expected)


@pytest.mark.full
def test_hosts_that_are_slow_are_waited_for(network: Network, data: Path, expected: Path) -> None:
    first, second = cluster(network, 2)
    run = OnHosts(first, data)
    run.wait_for_round(2)
    with second.slowed(0.3):
        run.assert_finished_as(expected)
    assert not any("Lost" in text for text in events(run.path))


@pytest.mark.full
def test_hosts_that_come_back_are_used_again(network: Network, data: Path, expected: Path) -> None:
    """A fleet that shrank grows back."""
    first, second = cluster(network, 2)
    run = OnHosts(first, data, "local.steps=20")
    run.wait_for_round(6)
    second.kill()
    second.restart()
    second.start_ray(cpus=1, head=first)
    run.assert_finished_as(expected)


@pytest.mark.full
def test_hosts_that_join_late_are_waited_for(network: Network, data: Path, expected: Path) -> None:
    """A cluster that is still growing, as with an autoscaler: two actors are asked for where one CPU is."""
    first = network.host()
    first.start_ray(cpus=1)
    run = OnHosts(first, data)
    time.sleep(10)
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
        sys.executable, "-m", "platform.launch", "resume", str(run.path), RAY_ADDRESS=second.gcs
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal_runs(run.path, expected)
