"""Shares of GPUs: declared to Ray without being there, so that placement can be seen on any machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import (
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from actors.devices import claim_device
from actors.session import RaySession
from archipelago.core.errors import UserError
from tests.support.errors import refused
from tests.support.experiments import outcome, plan_of, run, session_of

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
    return list(placement_group_table(session._group)["bundles"].values())


@pytest.mark.ray
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
        assert set(ray.get(homes)) == {session._group.id}
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
        busy = r"of 1 CPU and 0\.5 GPU each, but the cluster is busy and has had capacity for 2 after 2 s"
        with pytest.raises(UserError, match=busy):
            RaySession(plan_of(*ELSEWHERE, "fleet.gpus=0.5", "fleet.actors=4"), wait=2.0)
        # ... and who leaves it open gets what is free.
        session = RaySession(plan_of(*ELSEWHERE, "fleet.gpus=0.5"))
        try:
            assert reserved(session) == [{"CPU": 1.0, "GPU": 0.5}] * 2
            assert sorted(client for block in session.layout for client in block) == list(range(8))
        finally:
            session.close()


FLAGS = [
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
]


def flags() -> list[bool]:
    return [getattr(owner, name) for owner, name in FLAGS]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """torch.cuda on a machine without one: what was asked of it; all fast and inexact modes are on."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device=None: calls.append(("memory", fraction, device)),
    )
    before = flags()
    for owner, name in FLAGS:
        setattr(owner, name, True)
    yield calls
    for (owner, name), value in zip(FLAGS, before, strict=True):
        setattr(owner, name, value)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
def test_the_memory_of_a_device_is_capped_to_the_share(cuda: list[Any], share: float) -> None:
    assert claim_device(share) == "cuda:0"
    assert cuda == [("device", 0), ("memory", share, 0)]
    assert flags() == [False, False, False]


def test_a_whole_device_is_not_capped(cuda: list[Any]) -> None:
    assert claim_device(1.0) == "cuda:0"
    assert cuda == [("device", 0)]


@pytest.mark.parametrize(("share", "present"), [(0.0, True), (0.0, False), (0.5, False)])
def test_nothing_is_touched_on_a_cpu(
    cuda: list[Any], monkeypatch: pytest.MonkeyPatch, share: float, present: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert claim_device(share) == "cpu"
    assert cuda == []
    assert flags() == [True, True, True]
