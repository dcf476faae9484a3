"""Shares of GPUs: declared to Ray without being there, so that placement can be seen on any machine."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import (
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from actors.session import RaySession
from archipelago.experiments.choose_clusters import choose_clusters
from tests.support.clusters import another_node, family, head_node
from tests.support.errors import refused
from tests.support.experiments import config_of, outcome, plan_of, run, session_of

# The machine of a test has no GPU, so the command line would refuse fleet.gpus; a cluster elsewhere may have some.
ELSEWHERE = ("fleet.backend=ray", "fleet.address=head.example:6379")


@contextmanager
def taken(**resources: float) -> Iterator[None]:
    """Somebody else on the cluster."""
    group = placement_group([resources])
    try:
        assert group.wait(30)
        yield
    finally:
        remove_placement_group(group)


@pytest.fixture
def places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that reserve their places and start nobody there."""
    monkeypatch.setattr(RaySession, "_start", lambda *_: None)


def reserved(session: RaySession) -> list[dict[str, float]]:
    return list(placement_group_table(session.groups[0])["bundles"].values())


@pytest.mark.ray
@pytest.mark.full
def test_two_shares_of_two_fifths_on_each_device(ray_cluster: Path) -> None:
    settings = ("method=ifca", "data.rotations=1")
    session = RaySession(plan_of(*settings, *ELSEWHERE, "fleet.gpus=0.4"))
    try:
        where = ray.get([actor.about.remote() for actor in session.clients])
        # Five shares would fit into two devices together, but none may span both.
        assert Counter(str(device) for each in where for device in each["gpu_ids"]) == {"0": 2, "1": 2}
        assert {each["device"] for each in where} == {"cpu"}  # declared, not there
        everybody = [*session.clients, session.server]
        homes = [actor.__ray_call__.remote(lambda _: get_current_placement_group().id) for actor in everybody]
        assert set(ray.get(homes)) == {session.groups[0].id}
        assert ray.get(session.server.about.remote())["pid"] not in {each["pid"] for each in where}
        local = session_of(*settings)
        assert outcome(session, run(session, 2)) == outcome(local, run(local, 2))
    finally:
        session.close()


@pytest.mark.ray
@pytest.mark.parametrize(("share", "actors"), [(0.25, 8), (0.5, 4), (0.6, 2), (1.0, 2)])
def test_how_many_fit(ray_cluster: Path, places_only: None, share: float, actors: int) -> None:
    session = RaySession(plan_of(*ELSEWHERE, f"fleet.gpus={share}"))
    try:
        assert len(session.layout) == actors
        assert reserved(session) == [{"CPU": 1.0, "GPU": share}] * actors
    finally:
        session.close()


@pytest.mark.ray
def test_more_than_fit_is_one_sentence_at_once(ray_cluster: Path) -> None:
    with refused("capacity", wanted=5, capacity=4):
        RaySession(plan_of(*ELSEWHERE, "fleet.gpus=0.5", "fleet.actors=5"))


@pytest.mark.ray
def test_what_others_use_is_waited_for_or_done_without(
    ray_cluster: Path, places_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.reservation.PATIENCE", 1.0)
    with taken(GPU=1.0):
        # Who asks for four gets four or a sentence ...
        with refused("capacity", says=("1 CPU and 0.5 GPU", "busy", "2 s"), wanted=4, capacity=2):
            RaySession(plan_of(*ELSEWHERE, "fleet.gpus=0.5", "fleet.actors=4"), wait=2.0)
        # ... and who leaves it open gets what is free.
        session = RaySession(plan_of(*ELSEWHERE, "fleet.gpus=0.5"))
        try:
            assert reserved(session) == [{"CPU": 1.0, "GPU": 0.5}] * 2
            assert sorted(client for block in session.layout for client in block) == list(range(8))
        finally:
            session.close()


# fleet.gpus=auto ------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that could use GPUs, were there any."""
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: True)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("settings", "bundle", "actors", "idle"),
    [
        ((), {"CPU": 1.0, "GPU": 1.0}, 2, ""),
        (("fleet.actors=4",), {"CPU": 1.0, "GPU": 0.5}, 4, ""),
        (("fleet.clients_per_actor=1",), {"CPU": 1.0, "GPU": 0.25}, 8, ""),
        (("fleet.actors=1",), {"CPU": 1.0, "GPU": 1.0}, 1, "fleet.actors=1 was set"),
        (
            ("clients=1", "clusters=1", "data.rotations=1"),
            {"CPU": 1.0, "GPU": 1.0},
            1,
            "there are fewer clients (1) than GPUs",
        ),
        (("fleet.cpus=8",), {"CPU": 8.0, "GPU": 1.0}, 1, "hold no more actors of 8 CPU (fleet.cpus)"),
        (("fleet.gpus=0",), {"CPU": 1.0}, 8, "fleet.gpus=0 was set"),
    ],
)
def test_auto_is_one_actor_for_each_gpu(
    ray_cluster: Path,
    places_only: None,
    cuda_build: None,
    settings: tuple[str, ...],
    bundle: dict[str, float],
    actors: int,
    idle: str,
) -> None:
    session = RaySession(plan_of(*ELSEWHERE, *settings))
    try:
        assert reserved(session) == [bundle] * actors
        assert session.gpus == bundle.get("GPU", 0.0)
        said = " ".join(session.compute().notes)
        assert idle in said and bool(idle) == bool(said)
    finally:
        session.close()


@pytest.mark.ray
def test_auto_leaves_gpus_alone_that_torch_is_not_built_for(
    ray_cluster: Path, places_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: False)
    session = RaySession(plan_of(*ELSEWHERE))
    try:
        assert reserved(session) == [{"CPU": 1.0}] * 8
        assert "2 of 2 GPUs stay idle: torch is a CPU build here" in session.describe()
    finally:
        session.close()


@pytest.mark.ray
def test_auto_on_gpus_that_are_busy_waits_and_says_so(
    ray_cluster: Path, places_only: None, cuda_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.reservation.PATIENCE", 0.5)
    with taken(GPU=2.0), refused("capacity", says=("1 CPU and 1 GPU", "busy", "fleet.gpus=0")):
        RaySession(plan_of(*ELSEWHERE), wait=1.0)
    with taken(GPU=1.0):
        session = RaySession(plan_of(*ELSEWHERE))
        try:
            assert reserved(session) == [{"CPU": 1.0, "GPU": 1.0}]
            assert "1 of 2 GPUs stays idle: others use them" in session.describe()
        finally:
            session.close()


@pytest.mark.ray
def test_actors_of_auto_say_what_they_compute_on_and_give_the_same_bits(
    ray_cluster: Path, cuda_build: None
) -> None:
    settings = ("method=ifca", "data.rotations=1")
    session = RaySession(plan_of(*settings, *ELSEWHERE))
    try:
        where = ray.get([actor.about.remote() for actor in session.clients])
        assert sorted(str(device) for each in where for device in each["gpu_ids"]) == ["0", "1"]
        assert session.describe() == (
            "8 clients on 2 Ray actors (4 each): CPU; engine loop, precision 32, determinism exact"
        )
        # Declared to Ray, and not there.
        assert session.shortfall().startswith(
            "2 of 2 blocks of clients compute on the CPU although fleet.gpus=1"
        )
        local = session_of(*settings)
        expected = outcome(local, run(local, 2))
        assert outcome(session, run(session, 2)) == expected
        session.begin_again(plan_of(*settings).server)
        assert outcome(session, run(session, 2)) == expected  # nobody remembers the first time
    finally:
        session.close()


@pytest.mark.ray
@pytest.mark.full
def test_number_of_clusters_is_chosen_on_the_devices_of_the_run(
    ray_cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same K and losses as in process, by actors with a GPU each that serve every K."""
    monkeypatch.setattr("archipelago.experiments.choose_clusters.DRAWS", 2)
    monkeypatch.setattr("archipelago.experiments.choose_clusters.ROUNDS", 2)
    settings = ("method=fesem", "data.rotations=2", "fleet.backend=ray")
    here = choose_clusters(config_of(*settings, "fleet.gpus=0"), [2, 3])
    started: list[RaySession] = []
    start = RaySession._start

    def seen(session: RaySession, *arguments: Any) -> None:
        started.append(session)
        start(session, *arguments)

    monkeypatch.setattr(RaySession, "_start", seen)
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: True)
    monkeypatch.setattr("archipelago.experiments.choose_clusters.torch_has_cuda", lambda: True)
    there = choose_clusters(config_of(*settings), [2, 3])
    assert there == here
    assert [session.gpus for session in started] == [1.0, 1.0]  # one for each draw, which serves every K


MIXED = """
import json, ray, actors.devices
actors.devices.torch_has_cuda = lambda: True
from actors.cluster import connected
from actors.session import RaySession
from tests.support.experiments import plan_of
plan = plan_of("fleet.backend=ray", "clients=8")
with connected(plan.fleet):
    session = RaySession(plan)
    where = ray.get([actor.about.remote() for actor in session.clients])
    nodes = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
    print(json.dumps([len(nodes), [nodes[each["node"]] for each in where], session.describe()]))
    session.close()
"""


@pytest.mark.ray
@pytest.mark.full
def test_auto_finds_the_gpus_of_a_cluster_whose_head_has_none() -> None:
    with head_node(cpus=4) as head, another_node(head, cpus=4, gpus=2) as node:
        deadline = time.monotonic() + 60
        while len(family(node.pid)) < 4 and time.monotonic() < deadline:  # a raylet and its agents
            time.sleep(0.2)
        done = head.call(sys.executable, "-c", MIXED, RAY_ADDRESS=head.gcs)
    assert done.returncode == 0, done.stderr
    nodes, gpus, said = json.loads(done.stdout.splitlines()[-1])
    assert (nodes, gpus) == (2, [2, 2])  # both actors are where the GPUs are
    assert said.startswith("8 clients on 2 Ray actors (4 each)")
