"""The driver's side of a session on Ray, where it can be seen without a cluster."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import ray
from ray import exceptions

from actors import reservation, session
from actors import starting as start
from actors.compute import BlockDevice, without_gpu
from actors.homes import Home
from actors.ray_errors import ActorsLost, SurfacedErrors
from actors.watchdog import COMPUTING, Member, Vital, Watchdog
from archipelago.core.errors import ClientFailure, UserError
from tests.support.errors import refused
from tests.support.experiments import plan_of

NODE = {"Alive": True, "Resources": {"CPU": 2.0}}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """What Ray says about the cluster, one answer after the other; the last one stays. No time passes."""
    answers: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(ray, "nodes", lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    clock = iter(range(10_000))
    monkeypatch.setattr(reservation.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(reservation.time, "monotonic", lambda: next(clock))
    return answers


def test_after_a_loss_a_node_that_comes_back_is_waited_for(nodes: list[list[dict[str, Any]]]) -> None:
    nodes += [[], [{**NODE, "Alive": False}], [NODE]]
    fleet, actors, seen = reservation.count_when_possible(plan_of("fleet.actors=5"), shrink=True, deadline=60)
    assert (fleet.gpus, actors, seen) == (0.0, 2, [NODE["Resources"]])


def test_cluster_that_stays_empty_is_reported_in_a_sentence(nodes: list[list[dict[str, Any]]]) -> None:
    nodes += [[]]
    with refused("capacity", wanted=5):
        reservation.count_when_possible(plan_of("fleet.actors=5"), shrink=True, deadline=60)


def test_at_the_start_a_cluster_that_grows_is_asked_for_what_it_lacks(
    nodes: list[list[dict[str, Any]]],
) -> None:
    nodes += [[NODE]]
    plan = plan_of("fleet.backend=ray", "fleet.actors=5", "fleet.gpus=1", "fleet.address=elsewhere:1")
    fleet, actors, _ = reservation.count_when_possible(plan, False, deadline=60, grows=True)
    assert (fleet.gpus, actors) == (1.0, 5)


def test_at_the_start_what_does_not_fit_is_reported_at_once(nodes: list[list[dict[str, Any]]]) -> None:
    nodes += [[], [NODE]]
    with refused("capacity", wanted=5):
        reservation.count_when_possible(plan_of("fleet.actors=5"), shrink=False, deadline=60)
    assert len(nodes) == 1  # asked once


def starting(monkeypatch: pytest.MonkeyPatch, nodes: list[int]) -> session.RaySession:
    """A session of two starting actors; `nodes`: how many have a node, each time that somebody looks."""
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs[:-1], refs[-1:]) if nodes else (refs, []))
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(start, "with_nodes", lambda homes: homes[: nodes.pop(0)])
    made = session.RaySession.__new__(session.RaySession)
    made.plan, made.clients, made.homes, made.devices = (
        plan_of(),
        [None, None],
        [Home(None, 0), Home(None, 1)],
        [],
    )
    made.members = {0: Member(None, "run/clients-0"), 1: Member(None, "run/clients-1")}
    made.asked, made.watchdog = {}, Watchdog(1.0, {})
    monkeypatch.setattr(made, "_find", lambda keys: None)
    return made


def test_node_that_dies_before_its_actors_live_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ActorsLost, match="a node went away"):
        starting(monkeypatch, [2, 1]).when_started(["a", "b"])


def test_actors_that_start_slowly_are_named_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = starting(monkeypatch, [2, 2, 2])
    clock, lines = iter([0.0, 30.0, 70.0, 500.0]), []
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    made._thread, made.say = threading.get_ident(), lines.append
    made.when_started(["a", "b"])
    assert made.devices == ["a", "b"]
    assert lines == ["Not started after 70 s: run/clients-1 (unknown)."]


@pytest.mark.parametrize(("status", "limits"), [("stopped", 1), ("running", COMPUTING)])
def test_actor_that_does_not_start_is_ended(
    monkeypatch: pytest.MonkeyPatch, status: str, limits: int
) -> None:
    made = starting(monkeypatch, [2] * 100)
    clock, ended = itertools.count(0, 100), []
    monkeypatch.setattr(start.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(start.watchdog, "vital", lambda member: Vital(status))
    monkeypatch.setattr(start.watchdog, "end", lambda member: ended.append(member))
    made._thread, made.say = threading.get_ident(), lambda line: None
    made.asked["run/clients-1"] = {"pid": 7, "node": "abcdef0123", "host": "10.0.0.5"}
    monkeypatch.setattr(
        ray,
        "wait",
        lambda refs, **options: (refs, []) if refs != ["b"] and len(refs) == 1 else ([], refs[-1:]),
    )
    with pytest.raises(ActorsLost, match=rf"clients-1 \(pid 7 on node .*not started after {600 * limits} s"):
        made.when_started(["a", "b"])
    assert [member.pid for member in ended] == [7]


def test_gpu_that_torch_cannot_use_is_said() -> None:
    on_gpu, on_cpu = BlockDevice("cuda:0", "A GPU"), BlockDevice()
    assert without_gpu([on_gpu, on_cpu, on_cpu], 0.5) == (
        "2 of 3 blocks of clients compute on the CPU although fleet.gpus=0.5: torch sees no GPU there."
    )
    assert without_gpu([BlockDevice(cuda=False)], 1.0) == (
        "The block of clients computes on the CPU although fleet.gpus=1: torch is a CPU build there."
    )
    assert without_gpu([on_cpu], 0.0) == without_gpu([on_gpu], 0.5) == ""


def surface(error: BaseException) -> BaseException:
    with pytest.raises(BaseException) as caught, SurfacedErrors():
        raise error
    return caught.value


def in_an_actor(cause: BaseException) -> BaseException:
    """An error as `ray.get` raises it when it happened in an actor, or in an actor that this one asked."""
    return exceptions.RayTaskError(
        "run_round", "Traceback ...", cause, pid=1, ip="127.0.0.1"
    ).as_instanceof_cause()


DIED = exceptions.RayActorError(
    error_msg="The actor died.\n\tclass_name: ClientActor\n\tpid: 7\n\tname: a/clients-3"
)


@pytest.mark.parametrize(
    "gone",
    [
        DIED,
        in_an_actor(DIED),
        exceptions.WorkerCrashedError(),
        in_an_actor(exceptions.OwnerDiedError("00" * 28, "127.0.0.1:1", "")),
        exceptions.NodeDiedError("the node is gone"),
        exceptions.LocalRayletDiedError(),
        exceptions.TaskPlacementGroupRemoved(),
        exceptions.RaySystemError("Broken pipe: the raylet is gone"),
        exceptions.RpcError("failed to connect"),
    ],
)
def test_whatever_is_lost_is_one_error(gone: BaseException) -> None:
    found = surface(gone)
    assert type(found) is ActorsLost and found.__cause__ is gone


def test_who_was_lost_is_named() -> None:
    assert str(surface(DIED)) == "a/clients-3 (pid 7)"


@pytest.mark.parametrize("error", [ClientFailure(3, 2, "training", "why"), UserError("a sentence")])
def test_what_went_wrong_inside_is_raised_as_it_was(error: Exception) -> None:
    found = surface(in_an_actor(error))
    assert type(found) is type(error) and str(found) == str(error)
    assert isinstance(found.__cause__, exceptions.RayTaskError)


def test_actor_that_could_not_be_made_is_not_lost() -> None:
    # Making it again would fail again, and again.
    failed = exceptions.RayActorError(error_msg="no such module", actor_init_failed=True)
    assert surface(failed) is failed


def test_module_that_an_actor_lacks_is_no_loss() -> None:
    missing = exceptions.RaySystemError("No module named 'mine'")
    assert surface(missing) is missing


def test_loss_that_the_server_found_is_raised_as_it_was() -> None:
    found = surface(in_an_actor(ActorsLost("a/clients-1 (pid 7)")))
    assert type(found) is ActorsLost and str(found) == "a/clients-1 (pid 7)"


def test_error_of_the_program_stays_what_it_is() -> None:
    bug = in_an_actor(KeyError("x"))
    assert surface(bug) is bug
