"""Ray actors in any number and packing give the bits of the run in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import actors.session
from actors.session import RaySession
from foundation.errors import ClientFailure, UserError
from strategies import METHODS
from tests.support import killers
from tests.support.experiments import outcome, plan_of, run, session_of

pytestmark = pytest.mark.ray

ROUNDS = 3

# One method of each kind of state that clients or the server keep between rounds.
KINDS = {
    "none": ("method=fedavg", "local.keep_optimizer=false"),
    "private model": ("method=local", "local.keep_optimizer=false"),
    "momentum": ("method=fedavg", "local.momentum=0.9"),
    "clusters": ("method=ifca", "local.momentum=0.9", "participation.fraction=0.75"),
}


@functools.cache
def in_process(*settings: str) -> str:
    """What the same experiment comes to in this process, in one block."""
    session = session_of(*settings)
    return outcome(session, run(session, ROUNDS))


@contextmanager
def on_ray(*settings: str, **options: Any) -> Iterator[RaySession]:
    """A session on the shared cluster."""
    session = RaySession(plan_of(*settings, "fleet.backend=ray"), **options)
    try:
        yield session
    finally:
        session.close()


def uneven(monkeypatch: pytest.MonkeyPatch, blocks: list[list[int]]) -> None:
    """Pack the clients in these blocks, however unbalanced."""
    monkeypatch.setattr(actors.session, "layout", lambda *_: blocks)


def test_clusters_and_momentum_on_two_uneven_actors(
    ray_cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven(monkeypatch, [[3], [7, 0, 1, 2, 4, 5, 6]])
    with on_ray(*KINDS["clusters"], "fleet.actors=2") as session:
        assert outcome(session, run(session, ROUNDS)) == in_process(*KINDS["clusters"])
        where = ray.get([actor.about.remote() for actor in [*session.clients, session.server]])
        assert [each.get("clients") for each in where] == [[3], [0, 1, 2, 4, 5, 6, 7], None]
        assert len({each["pid"] for each in where}) == 3


def test_private_models_on_five_actors(ray_cluster: Path) -> None:
    with on_ray(*KINDS["private model"], "fleet.actors=5") as session:
        assert sorted(len(block) for block in session.layout) == [1, 1, 2, 2, 2]
        assert outcome(session, run(session, ROUNDS)) == in_process(*KINDS["private model"])


def test_momentum_with_one_actor_for_each_client(ray_cluster: Path) -> None:
    settings = (*KINDS["momentum"], "clients=4", "data.rotations=1")
    with on_ray(*settings, "fleet.clients_per_actor=1") as session:
        assert session.layout == [[0], [1], [2], [3]]
        assert outcome(session, run(session, ROUNDS)) == in_process(*settings)


def test_what_goes_wrong_in_a_client_is_told_as_it_happened(ray_cluster: Path) -> None:
    settings = ("method=fedavg", *killers.MODULE, "local.steps=3", "fleet.actors=1")
    with on_ray(*settings) as session:
        session.run_round(1)

        killers.arm("training", after=4, action="raise")  # the fifth step is client 1's second
        with pytest.raises(ClientFailure) as caught:
            session.run_round(2)
        failure = caught.value
        assert type(failure) is ClientFailure  # and not Ray's wrapper around it
        assert (failure.client, failure.round, failure.stage) == (1, 2, "local training ('main')")
        assert failure.cause == "ArithmeticError: told to fail by a test"
        assert "training_step" in str(failure.__cause__)  # the client's own traceback

        killers.arm("evaluation", action="raise")
        with pytest.raises(ClientFailure, match="Client 0 failed in round 3 during evaluation on test data"):
            session.run_round(3)

        killers.arm("training", after=7, action="nan")
        report = session.run_round(4)
        assert report.metrics["dropped"] == 1
        assert [event for event in report.events if "dropped client 2 from 'main' training" in event]
        assert all(np.isfinite(model).all() for model in session.models()["models"].values())

        stopping = replace(plan_of(*settings, "fleet.backend=ray").server, not_finite="stop")
        ray.get(session.server.start.remote(stopping, session.clients, session.layout, None))
        killers.arm("training", after=7, action="nan")
        with pytest.raises(ClientFailure, match=r"Client 2 failed in round 5 .* not finite"):
            session.run_round(5)


def test_a_mistake_that_only_an_actor_can_see_is_one_sentence(ray_cluster: Path) -> None:
    with (
        pytest.raises(UserError, match="to return one torch optimizer, got list") as caught,
        on_ray(
            "method=fedavg",
            "model=auto",
            "model.target=tests.support.modules.TwoOptimizers",
            "fleet.actors=1",
        ),
    ):
        raise AssertionError("the session should not have started")
    assert type(caught.value) is UserError


@pytest.mark.full
@pytest.mark.parametrize("actors", [1, 2, 5, "uneven", "one each"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_in_every_layout(
    ray_cluster: Path, monkeypatch: pytest.MonkeyPatch, kind: str, actors: int | str
) -> None:
    layout = "fleet.clients_per_actor=1" if actors == "one each" else f"fleet.actors={actors}"
    if actors == "uneven":
        uneven(monkeypatch, [[3], [7, 0, 1], [2, 4, 5, 6]])
        layout = "fleet.actors=3"
    with on_ray(*KINDS[kind], layout) as session:
        assert outcome(session, run(session, ROUNDS)) == in_process(*KINDS[kind])


@pytest.mark.full
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_on_ray(ray_cluster: Path, method: str) -> None:
    with on_ray(f"method={method}", "participation.fraction=0.75", "fleet.actors=3") as session:
        expected = in_process(f"method={method}", "participation.fraction=0.75")
        assert outcome(session, run(session, ROUNDS)) == expected
