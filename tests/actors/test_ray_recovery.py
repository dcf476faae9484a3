"""Whatever is killed, a run continues by itself, or is resumed, and leaves the files of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

import actors.ray_actors
import actors.rebalancing
from actors.ray_actors import RayFleet
from actors.ray_errors import SurfacedErrors
from actors.reports import RoundReport
from actors.session import ActorsLost, RaySession
from archipelago import open_run
from archipelago.experiments.runner import resume, run_experiment
from tests.support import killers
from tests.support.callbacks import OnRound
from tests.support.clusters import ROOT, another_node, family, head_node, short_folder, still_alive
from tests.support.experiments import TINY, config_of, plan_of
from tests.support.methods import compositions
from tests.support.runs import assert_equal_runs, events

pytestmark = pytest.mark.ray

SETTINGS = (*killers.MODULE, "rounds=5", "checkpoint.every=2")


def once_after(round: int, action: Callable[[], Any]) -> OnRound:
    """Call `action` when this round is finished, the first time it is."""
    done: list[int] = []

    def on_round(report: RoundReport) -> None:
        if report.round == round and not done:
            done.append(round)
            action()

    return OnRound(on_round)


def undisturbed(folder: Path, *settings: str) -> Path:
    """The same experiment in this process, where nothing is killed."""
    return run_experiment(config_of(*settings), folder / "undisturbed", quiet=True)


def run_and_kill(folder: Path, place: str, after: int, *settings: str) -> Path:
    """A run on the shared cluster in which somebody dies at `place`, in the fourth round."""
    armed: list[Path] = []
    path = run_experiment(
        config_of(*settings, "fleet.backend=ray"),
        folder / "killed",
        callbacks=[once_after(3, lambda: armed.append(killers.arm(place, after)))],
        quiet=True,
    )
    assert len(armed) == 1 and not armed[0].exists(), "nobody was killed"
    return path


def lost(run: Path) -> list[str]:
    return [event for event in events(run) if event.startswith("Lost an actor")]


@pytest.mark.full
def test_client_actor_killed_while_it_trains(ray_cluster: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, "method=ifca", "participation.fraction=0.75")
    # The sixth step: one client of the block is done, the next is under way.
    killed = run_and_kill(tmp_path, "training", 5, *settings, "fleet.actors=2")
    assert_equal_runs(killed, undisturbed(tmp_path, *settings))
    assert len(lost(killed)) == 1
    assert "ifca-digits-seed0/clients-" in lost(killed)[0] and "from round 3" in lost(killed)[0]


@pytest.mark.full
def test_client_actor_killed_between_training_and_averaging(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.ray_actors, "ServerActor", killers.MurderousServer)
    settings = (*SETTINGS, "method=ifca", "local.optimizer=adam")
    killed = run_and_kill(tmp_path, "client-before-combine", 0, *settings, "fleet.actors=1")
    assert_equal_runs(killed, undisturbed(tmp_path, *settings))
    assert len(lost(killed)) == 1


def test_client_actor_killed_while_sums_are_added_is_a_loss(ray_cluster: Path) -> None:
    plan = plan_of("method=fedavg", "fleet.backend=ray", "fleet.actors=3", "fleet.cpus=0.5")
    session = RaySession(plan)
    try:
        fleet = RayFleet(session.clients, session.layout, plan.server.sizes)
        fleet.begin(1)
        trained = fleet.train(fleet.initial(1)[0])
        os.kill(ray.get(session.clients[1].about.remote())["pid"], signal.SIGKILL)
        # Another actor waits for the lost one's sums, and the server for that one.
        with pytest.raises(ActorsLost, match="clients-1"), SurfacedErrors():
            trained.combine(np.ones((1, 8)))
    finally:
        session.close()


def test_clients_move_once_with_their_states_and_a_loss_afterwards_is_survived(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first rounds took, they move to another layout; momentum and private models move along."""
    forced = [[7, 0, 3], [5, 1], [2, 6, 4]]
    monkeypatch.setattr(actors.rebalancing, "balanced", lambda costs, actors: forced)
    monkeypatch.setattr(actors.rebalancing, "GAIN", np.inf)
    layouts: list[list[list[int]]] = []
    run_round = RaySession.run_round

    def watching(self: RaySession, round: int) -> RoundReport:
        report = run_round(self, round)
        layouts.append(self.layout)
        return report

    monkeypatch.setattr(RaySession, "run_round", watching)
    settings = (*killers.MODULE, "method=ditto", "rounds=6", "checkpoint.every=4", "local.momentum=0.9")
    armed: list[Path] = []
    moved = run_experiment(
        config_of(*settings, "fleet.backend=ray", "fleet.actors=3", "fleet.cpus=0.5"),
        tmp_path / "moved",
        callbacks=[once_after(5, lambda: armed.append(killers.arm("training", 2)))],
        quiet=True,
    )
    assert armed and not armed[0].exists(), "nobody was killed"
    assert layouts[0] == layouts[1] != forced and layouts[2:5] == [forced] * 3
    assert sum("clients to other actors" in event for event in events(moved)) == 1
    assert len(lost(moved)) == 1 and "from round 5" in lost(moved)[0]
    assert_equal_runs(moved, undisturbed(tmp_path, *settings))


@pytest.mark.full
def test_client_actor_killed_while_it_evaluates(ray_cluster: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, "method=local")
    killed = run_and_kill(tmp_path, "evaluation", 1, *settings, "fleet.actors=1")
    assert_equal_runs(killed, undisturbed(tmp_path, *settings))
    assert len(lost(killed)) == 1
    models = open_run(killed).models
    assert models["private-model"].shape[0] == 8  # what clients keep came through, too


@pytest.mark.full
def test_server_actor_killed_while_its_clients_wait(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.ray_actors, "ServerActor", killers.MurderousServer)
    settings = (*SETTINGS, "method=fedavg")
    killed = run_and_kill(tmp_path, "server-before-combine", 0, *settings, "fleet.actors=1")
    assert_equal_runs(killed, undisturbed(tmp_path, *settings))
    assert len(lost(killed)) == 1 and "/server-" in lost(killed)[0]


@pytest.mark.full
def test_run_survives_only_so_many_losses_and_can_still_be_resumed(ray_cluster: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, "method=fedavg")
    with pytest.raises(ActorsLost):
        run_and_kill(tmp_path, "training", 0, *settings, "fleet.actors=1", "fleet.restarts=0")
    assert open_run(tmp_path / "killed").status.state == "failed"
    resume(tmp_path / "killed", quiet=True)
    assert_equal_runs(tmp_path / "killed", undisturbed(tmp_path, *settings))


def typed(folder: Path, *settings: str) -> list[str]:
    """The tiny experiment as somebody types it, with `folder/killed` for its run."""
    kept = [setting for setting in TINY if not setting.startswith(("fleet.", "rounds="))]
    return [*kept, *settings, f"storage={folder}", "name=killed"]


def launch(*arguments: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """`python -m platform.launch` with a Ray cluster of its own."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    # Ray's agent mourns a cluster that was killed for a minute before it ends; here it shall be quick.
    own = {"RAY_TMPDIR": str(folder), "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "platform.launch", *arguments],
            cwd=ROOT, env={**env, **own}, stdout=output, stderr=output,
        )  # fmt: skip


def rounds_in(run: Path) -> int:
    file = run / "metrics.csv"
    return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


@pytest.fixture(scope="session")
def mourners() -> Iterator[tuple[ExitStack, list[Any]]]:
    """Folders and processes of killed clusters: some need a minute to end, which other tests need not wait for."""
    with ExitStack() as folders:
        members: list[Any] = []
        yield folders, members
        assert not still_alive(members, seconds=60)


def test_driver_killed_with_its_cluster_at_a_random_round_is_resumed(
    tmp_path: Path, mourners: tuple[ExitStack, list[Any]]
) -> None:
    rounds, last = 40, random.SystemRandom().randint(3, 34)
    settings = ("method=ifca", f"rounds={rounds}", "checkpoint.every=3")
    run, log = tmp_path / "killed", tmp_path / "log"
    folders, members = mourners
    folder = folders.enter_context(short_folder())
    driver = launch(*typed(tmp_path, *settings, "fleet.actors=2"), folder=folder, log=log)
    try:
        while rounds_in(run) < last:
            assert driver.poll() is None, log.read_text()
            time.sleep(0.005)
        driver.send_signal(signal.SIGSTOP)  # or it might end while its family is looked for
        members += family(driver.pid)
    finally:
        driver.kill()
        driver.wait()
    assert len(members) > 5, "a driver has a cluster with it"
    for member in members:  # all at once, as when a machine goes down
        with suppress(psutil.NoSuchProcess):
            member.kill()
    status = open_run(run).status
    assert status.state == "interrupted" and last <= status.rounds_done < rounds, (
        f"to be killed after round {last}"
    )
    again = launch("resume", str(run), folder=folder, log=log)
    try:
        while again.poll() is None:
            members += [member for member in family(again.pid) if member not in members]
            time.sleep(0.5)
    finally:
        again.kill()
        assert again.wait() == 0, f"killed after round {last}:\n{log.read_text()}"
    assert_equal_runs(run, undisturbed(tmp_path, *settings))


@pytest.mark.full
def test_node_is_killed_and_the_run_continues_with_what_is_left(tmp_path: Path) -> None:
    settings = ("method=ifca", "rounds=60", "checkpoint.every=5")
    run, log = tmp_path / "killed", tmp_path / "log"
    with head_node(cpus=1) as head, another_node(head, cpus=2) as node:
        while len(family(node.pid)) < 4:  # a raylet and its agents
            assert node.poll() is None
            time.sleep(0.2)
        with log.open("wb") as output:
            driver = subprocess.Popen(
                [sys.executable, "-m", "platform.launch", *typed(tmp_path, *settings)],
                cwd=ROOT, env={**head.environment, "RAY_ADDRESS": head.gcs}, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            while rounds_in(run) < 12:
                assert driver.poll() is None, log.read_text()
                time.sleep(0.005)
            for member in family(node.pid):
                member.kill()
            assert driver.wait(240) == 0, log.read_text()
        finally:
            driver.kill()
            driver.wait()
    assert "8 clients on 3 Ray actors" in log.read_text()
    assert "8 clients on 1 Ray actor (8 each)" in log.read_text()
    assert_equal_runs(run, undisturbed(tmp_path, *settings))


PLACES = ("training", "evaluation", "server-before-train", "client-before-commit")
KILLS = [
    *((place, method) for place in PLACES for method in ("fedavg", "fedprox", "ifca", "local")),
    *(
        ("client-before-combine", method) for method in ("fedavg", "fedprox", "ifca")
    ),  # local averages nothing
    ("losses", "ifca"),  # nobody else asks for them
]


@pytest.mark.full
@pytest.mark.parametrize(("place", "method"), KILLS)
def test_every_method_through_every_kill(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, place: str
) -> None:
    monkeypatch.setattr(actors.ray_actors, "ServerActor", killers.MurderousServer)
    settings = (*SETTINGS, f"method={method}", "participation.fraction=0.75")
    killed = run_and_kill(tmp_path, place, 0, *settings, "fleet.actors=2")
    assert_equal_runs(killed, undisturbed(tmp_path, *settings))
    assert len(lost(killed)) == 1
    assert ray.is_initialized()


@pytest.mark.full
@pytest.mark.parametrize("method", compositions())
def test_every_method_survives_the_loss_of_a_client_actor(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(actors.ray_actors, "ServerActor", killers.MurderousServer)
    settings = (*SETTINGS, f"method={method}", "participation.fraction=0.75")
    killed = run_and_kill(tmp_path, "client-before-commit", 0, *settings, "fleet.actors=2")
    assert_equal_runs(killed, undisturbed(tmp_path, *settings))
    assert len(lost(killed)) == 1
