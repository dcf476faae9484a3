"""Losses on Ray that cost the running round and nothing else: who is late is ended, who is lost is rebuilt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import remove_placement_group

import actors.ray_actors
from actors.reports import RoundReport
from actors.session import RaySession
from archipelago.experiments.runner import run_experiment
from tests.support import killers
from tests.support.callbacks import OnRound
from tests.support.clusters import ROOT, Head, another_node, family, head_node
from tests.support.experiments import TINY, config_of
from tests.support.runs import assert_equal_runs, events

pytestmark = pytest.mark.ray

SETTINGS = (
    *killers.MODULE,
    "method=ditto",
    "clients=4",
    "rounds=6",
    "checkpoint.every=10",
    "local.momentum=0.9",
)


def pids(session: Any) -> dict[Any, int]:
    return {key: member.pid for key, member in session.members.items()}


class Watched:
    """The processes of a run's session after every round, and what is done after some of them."""

    def __init__(self, **actions: Any) -> None:
        self.actions, self.pids, self.sessions = actions, [], []

    def __call__(self, report: RoundReport) -> None:
        session = self.sessions[-1]
        self.pids.append((report.round, pids(session)))
        action = self.actions.pop(f"after_{report.round}", None)
        if action is not None:
            action(session)


def run_watched(monkeypatch: pytest.MonkeyPatch, folder: Path, watched: Watched, *settings: str) -> Path:
    """A run on the shared cluster that does what `watched` says."""
    init = RaySession.__init__

    def seen(self: RaySession, *arguments: Any, **options: Any) -> None:
        watched.sessions.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(RaySession, "__init__", seen)
    return run_experiment(
        config_of(*settings, "fleet.backend=ray", "fleet.cpus=0.5"),
        folder / "lost",
        callbacks=[OnRound(watched)],
        quiet=True,
    )


def lost(run: Path) -> list[str]:
    return [event for event in events(run) if event.startswith("Lost an actor")]


def undisturbed(folder: Path, *settings: str) -> Path:
    """The same experiment in this process, where nothing is lost."""
    return run_experiment(config_of(*settings), folder / "undisturbed", quiet=True)


def from_rounds(run: Path) -> list[int]:
    """The rounds that a run resumed from after its losses."""
    return [int(text.rpartition("round ")[2].rstrip(".")) for text in lost(run)]


def arm(place: str, after: int = 0) -> Any:
    return lambda session: killers.arm(place, after)


def test_everybody_is_lost_once_and_each_loss_costs_a_round_while_healthy_actors_stay(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client actor is stopped, the server dies between training and averaging, the other client actor dies when
    round 5 is decided: momentum and private models come through, and no checkpoint is ever needed."""
    monkeypatch.setattr(actors.ray_actors, "ServerActor", killers.MurderousServer)
    watched = Watched(
        after_1=lambda session: os.kill(session.members[1].pid, signal.SIGSTOP),
        after_2=arm("server-before-combine"),
        after_4=arm("client-before-commit"),
    )
    run = run_watched(
        monkeypatch, tmp_path, watched, *SETTINGS, "fleet.actors=2", "fleet.patience=2", "fleet.restarts=3"
    )
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    assert not [*ray_cluster.iterdir()], "nobody was killed"
    # Round 5 was decided when its client died: it is not run again.
    assert from_rounds(run) == [1, 2, 5] and [round for round, _ in watched.pids] == [1, 2, 3, 4, 5, 6]
    assert len(watched.sessions) == 1 and sum("/server-" in text for text in lost(run)) == 1
    first, second, third, _, last, _ = (seen for _, seen in watched.pids)
    late = [event for event in events(run) if "is late" in event and "stopped" in event]
    assert len(late) == 1 and f"pid {first[1]} on node" in late[0] and "/clients-1" in late[0]
    assert (second[0], second["server"]) == (first[0], first["server"]) and second[1] != first[1]
    assert (third[0], third[1]) == (second[0], second[1]) and third["server"] != second["server"]
    assert set(third.values()) - set(last.values()) == {third[0]}


@pytest.mark.full
def test_stopped_server_is_named_ended_and_rebuilt(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(after_2=lambda session: os.kill(session.members["server"].pid, signal.SIGSTOP))
    run = run_watched(monkeypatch, tmp_path, watched, *SETTINGS, "fleet.actors=2", "fleet.patience=2")
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    (late,) = [event for event in events(run) if "is late" in event]
    assert "/server" in late and f"pid {watched.pids[1][1]['server']}" in late and from_rounds(run) == [2]
    before, after = watched.pids[1][1], watched.pids[2][1]
    assert [before[0], before[1]] == [after[0], after[1]]


@pytest.mark.full
def test_server_holds_the_copy_of_an_actor_that_is_alone(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(after_3=lambda session: os.kill(session.members[0].pid, signal.SIGKILL))
    run = run_watched(monkeypatch, tmp_path, watched, *SETTINGS, "fleet.actors=1")
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    assert from_rounds(run) == [3] and watched.pids[3][1]["server"] == watched.pids[2][1]["server"]


@pytest.mark.full
@pytest.mark.parametrize("stage", ["start", "receive"])
def test_actor_that_stops_while_it_is_rebuilt_is_named_ended_and_rebuilt_again(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    stopped: list[int] = []
    new_client, wait = RaySession.new_client, RaySession.wait

    def starting(self: RaySession, home: Any, block: Any, number: int) -> Any:
        member, started = new_client(self, home, block, number)
        if len(self.clients) == 1 and self.epoch and not stopped and stage == "start":
            stopped.append(ray.get(self.asked[member.name])["pid"])
            os.kill(stopped[0], signal.SIGSTOP)
        return member, started

    def waiting(self: RaySession, calls: Any, name: str, **options: Any) -> Any:
        if name == stage and not stopped:
            stopped.append(self.members[next(iter(calls))].pid)
            os.kill(stopped[0], signal.SIGSTOP)
        return wait(self, calls, name, **options)

    monkeypatch.setattr(RaySession, "new_client", starting)
    monkeypatch.setattr(RaySession, "wait", waiting)
    watched = Watched(after_2=lambda session: os.kill(session.members[1].pid, signal.SIGKILL))
    limits = ("fleet.patience=4", "fleet.start_patience=20", "fleet.restarts=9")
    run = run_watched(monkeypatch, tmp_path, watched, *SETTINGS, "fleet.actors=2", *limits)
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    (pid,) = stopped
    assert any("stopped" in event and f"pid {pid} on node" in event for event in events(run))
    assert lost(run) and not psutil.pid_exists(pid)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "victims"),
    [
        (("fleet.copies=false",), (1,)),  # nobody holds anything
        ((), (0, 1)),  # a block and the neighbour with its copy
        ((), (0, "server")),  # actor 0 has the server's copy
    ],
)
def test_what_nobody_holds_comes_from_the_last_checkpoint_on_actors_that_stay(
    ray_cluster: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    victims: tuple[Any, ...],
) -> None:
    def strike(session: Any) -> None:
        for victim in victims:
            os.kill(session.members[victim].pid, signal.SIGKILL)

    watched = Watched(after_3=strike)
    chosen = (*SETTINGS[:-2], "checkpoint.every=2", "local.momentum=0.9")
    run = run_watched(monkeypatch, tmp_path, watched, *chosen, "fleet.actors=3", *settings)
    assert_equal_runs(run, undisturbed(tmp_path, *chosen))
    assert from_rounds(run) == [2]
    before, after = watched.pids[2][1], watched.pids[3][1]
    assert {key for key in before if before[key] in after.values()} == {0, 1, 2, "server"} - set(victims)


@pytest.mark.full
def test_removed_placement_group_is_a_loss_of_everybody(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the actors of a group with it, and their homes are gone: another group, and the last checkpoint."""
    watched = Watched(after_3=lambda session: remove_placement_group(session.groups[0]))
    chosen = (*SETTINGS[:-2], "checkpoint.every=2", "local.momentum=0.9")
    run = run_watched(monkeypatch, tmp_path, watched, *chosen, "fleet.actors=2")
    assert_equal_runs(run, undisturbed(tmp_path, *chosen))
    assert from_rounds(run) == [2] and [round for round, _ in watched.pids] == [1, 2, 3, 3, 4, 5, 6]
    assert len(watched.sessions) == 2


def rounds_in(run: Path) -> int:
    file = run / "metrics.csv"
    return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


@pytest.mark.full
@pytest.mark.timeout(1200)  # nodes take their time to be missed
def test_fleet_that_lost_a_node_shrinks_and_grows_back_when_one_returns(tmp_path: Path) -> None:
    settings = ("method=ditto", "rounds=600", "checkpoint.every=1000", "checkpoint.minutes=0")
    run, log = tmp_path / "lost", tmp_path / "log"
    kept = [setting for setting in TINY if not setting.startswith(("fleet.", "rounds="))]
    command = [
        sys.executable, "-m", "platform.launch", *kept, *settings, f"storage={tmp_path}", "name=lost",
        "callbacks=[tests.support.callbacks.UntilTold]",
    ]  # fmt: skip
    with head_node(cpus=1) as head, ExitStack() as stack:
        with another_node(head, cpus=2) as node:
            while len(family(node.pid)) < 4:  # a raylet and its agents
                assert node.poll() is None
                time.sleep(0.2)
            driver = stack.enter_context(launched(command, head, log))
            wait_until(lambda: rounds_in(run) >= 5, driver, log)
            for member in family(node.pid):
                member.kill()
            wait_until(lambda: "8 clients on 1 Ray actor" in log.read_text(), driver, log)
        stack.enter_context(another_node(head, cpus=2))
        wait_until(lambda: "Nodes are back: 8 clients on 3 Ray actors" in log.read_text(), driver, log)
        (run / "continue").touch()
        assert driver.wait(600) == 0, log.read_text()
    assert_equal_runs(run, undisturbed(tmp_path, *settings))


@contextmanager
def launched(command: list[str], head: Head, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver on that cluster, ended whatever happens."""
    with log.open("wb") as output:
        environment = {**head.environment, "RAY_ADDRESS": head.gcs}
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def wait_until(reached: Callable[[], bool], driver: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while not reached():
        assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


AUTOSCALER = {
    "cluster_name": "here", "max_workers": 2, "upscaling_speed": 1.0, "idle_timeout_minutes": 5,
    "provider": {"type": "fake_multinode", "disable_node_updaters": True, "disable_launch_config_check": True},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 2, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    },
    "head_node_type": "ray.head.default", "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [],
    "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
    "head_start_ray_commands": [], "worker_start_ray_commands": [], "file_mounts_sync_continuously": False,
    "rsync_exclude": [], "rsync_filter": [],
}  # fmt: skip

DEMAND = """
import json, sys, ray
from ray.experimental.internal_kv import _internal_kv_get
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(json.loads(_internal_kv_get(b"__autoscaling_status"))["load_metrics_report"]["pg_demand"])
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_autoscaler_sees_the_gpus_that_are_wanted_and_is_waited_for(tmp_path: Path) -> None:
    """An autoscaler without any GPU node: the run waits, its demand is seen, and it runs when a node has come."""
    (tmp_path / "autoscaler.json").write_text(json.dumps(AUTOSCALER))
    log = tmp_path / "log"
    kept = [setting for setting in TINY if not setting.startswith("fleet.")]
    command = [
        sys.executable, "-m", "platform.launch", *kept, "fleet.gpus=0.5", "fleet.actors=2", f"storage={tmp_path}",
        "method=fedavg",
    ]  # fmt: skip
    more = ("--autoscaling-config", str(tmp_path / "autoscaler.json"))
    with head_node(1, *more, AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_FAKE_CLUSTER="1") as head:
        short = head.call(*command, "fleet.wait=3", RAY_ADDRESS=head.gcs)
        assert short.returncode == 2 and "fleet.wait" in short.stderr, short.stderr
        with launched(command, head, log) as driver:
            wait_until(lambda: "waiting for nodes, 900 s at most" in log.read_text(), driver, log)
            demand = head.call(sys.executable, "-c", DEMAND, head.gcs).stdout
            assert "'GPU': 0.5" in demand, demand
            with another_node(head, cpus=2, gpus=1):
                assert driver.wait(600) == 0, log.read_text()
