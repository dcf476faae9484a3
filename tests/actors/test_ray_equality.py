"""Ray actors in any number and packing give the bits of the run in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import actors.placement
import actors.session
import actors.trained
from actors.growth import Growth
from actors.ray_actors import RayFleet
from actors.session import Plan, RaySession
from archipelago.core.errors import ClientFailure, UserError
from lightning_modules.engines.compiled.build import CannotBuild, library
from tests.support import killers
from tests.support.errors import refused
from tests.support.experiments import outcome, plan_of, run, session_of
from tests.support.methods import compositions

pytestmark = pytest.mark.ray

ROUNDS = 3

# One method of each kind of state that clients or the server keep between rounds.
KINDS = {
    "none": ("method=fedavg", "local.keep_optimizer=false"),
    "private model": ("method=local", "local.keep_optimizer=false"),
    "momentum": ("method=fedavg", "local.momentum=0.9"),
    "clusters": ("method=ifca", "local.momentum=0.9", "participation.fraction=0.75"),
}
LAYOUTS = {
    "one actor": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "two actors": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "two uneven": [[3], [7, 0, 1, 2, 4, 5, 6]],
    "three uneven": [[6, 1, 4, 0], [7], [2, 3, 5]],
    "five actors": [[0, 5], [1, 6], [2, 7], [3], [4]],
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


# Sessions with actors of their own. They come first: the tests below keep five actors alive to the end.


@pytest.mark.full
def test_one_actor_for_each_client(ray_cluster: Path) -> None:
    settings = (*KINDS["momentum"], "clients=4", "data.rotations=1")
    with on_ray(*settings, "fleet.clients_per_actor=1") as session:
        assert session.layout == [[0], [1], [2], [3]]
        assert outcome(session, run(session, ROUNDS)) == in_process(*settings)


@pytest.mark.full
def test_mistake_that_only_an_actor_can_see_is_one_sentence(ray_cluster: Path) -> None:
    settings = ("method=fedavg", "model=auto", "model.target=tests.support.modules.TwoOptimizers")
    with refused("wrong-result", says=("TwoOptimizers", "list"), name="configure_optimizers") as caught:
        RaySession(plan_of(*settings, "fleet.backend=ray", "fleet.actors=1"))
    assert type(caught.value) is UserError  # and the cluster is empty again: `ray_cluster` sees to that


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2, 5, "uneven", "one each"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_on_actors_of_its_own(
    ray_cluster: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int | str
) -> None:
    fleet = "fleet.clients_per_actor=1" if number == "one each" else f"fleet.actors={number}"
    if number == "uneven":
        monkeypatch.setattr(actors.session, "layout", lambda *_: LAYOUTS["three uneven"])
        fleet = "fleet.actors=3"
    with on_ray(*KINDS[kind], fleet) as session:
        assert outcome(session, run(session, ROUNDS)) == in_process(*KINDS[kind])


# One set of actors, used over and over again.


class Borrowed(RaySession):
    """A session on actors that are alive: they are started again, with other clients and another method."""

    def __init__(self, plan: Plan, lender: RaySession, blocks: Sequence[Sequence[int]]) -> None:
        self.__dict__ = dict(lender.__dict__)
        self.plan, self.layout = plan, [list(block) for block in blocks]
        self.clients, self.homes = lender.clients[: len(blocks)], lender.homes[: len(blocks)]
        self.growth = Growth(self, self.homes, wanted=len(blocks))
        data = ray.put(plan.x), ray.put(plan.y)
        pairs = zip(self.clients, self.layout, strict=True)
        ray.get(
            [a.start.remote(plan.block, {c: plan.clients[c] for c in block}, *data) for a, block in pairs]
        )
        self.go_back(None, 0)


@pytest.fixture(scope="module")
def five_actors(ray_session: Path) -> Iterator[RaySession]:
    with on_ray("method=local", "fleet.actors=5") as session:
        yield session


def test_five_actors_and_a_server_are_six_processes(five_actors: RaySession) -> None:
    where = ray.get([actor.about.remote() for actor in [*five_actors.clients, five_actors.server]])
    assert len({each["pid"] for each in where}) == 6
    assert [each.get("clients") for each in where] == [*five_actors.layout, None]
    assert sorted(len(block) for block in five_actors.layout) == [1, 1, 2, 2, 2]
    assert five_actors.describe().startswith("8 clients on 5 Ray actors (1 to 2 each): CPU; engine loop")
    assert outcome(five_actors, run(five_actors, ROUNDS)) == in_process("method=local")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_in_every_layout(five_actors: RaySession, kind: str, layout: str) -> None:
    session = Borrowed(plan_of(*KINDS[kind]), five_actors, LAYOUTS[layout])
    assert outcome(session, run(session, ROUNDS)) == in_process(*KINDS[kind])


def test_compiled_engine_in_uneven_blocks(five_actors: RaySession) -> None:
    """Its results depend on the job alone, whatever arena an earlier and larger batch left behind."""
    settings = ("method=ifca+cam", "local.engine=compiled", "model=cnn_digits", "local.momentum=0.9")
    session = Borrowed(plan_of(*settings), five_actors, LAYOUTS["three uneven"])
    reports = run(session, ROUNDS)
    assert outcome(session, reports) == in_process(*settings)
    try:
        library()
        trained = {"compiled"}
    except CannotBuild:
        trained = {"loop"}
    assert [report.engines for report in reports] == [trained] * ROUNDS


def test_one_actor_for_each_of_five_clients(five_actors: RaySession) -> None:
    settings = (*KINDS["momentum"], "clients=5", "data.rotations=1")
    plan = plan_of(*settings, "fleet.clients_per_actor=1")
    blocks = actors.placement.layout(plan.costs(), 5, plan.fleet.clients_per_actor)
    assert blocks == [[0], [1], [2], [3], [4]]
    session = Borrowed(plan, five_actors, blocks)
    assert outcome(session, run(session, ROUNDS)) == in_process(*settings)


@pytest.mark.parametrize("method", compositions())
def test_every_method(five_actors: RaySession, method: str) -> None:
    settings = (f"method={method}", "participation.fraction=0.75")
    session = Borrowed(plan_of(*settings), five_actors, LAYOUTS["three uneven"])
    assert outcome(session, run(session, ROUNDS)) == in_process(*settings)


def test_what_leaves_clients_is_attacked_clipped_and_compressed_alike(five_actors: RaySession) -> None:
    """Attackers on three actors agree on what they send; each keeps what its updates left out."""
    attack = ("participation.attackers=0.4", "attack=alie", "participation.fraction=0.75")
    update = ("update=[clip,topk]", "update.clip=0.5", "update.keep=0.2", "update.feedback=true")
    settings = ("method=ifca", *attack, *update)
    session = Borrowed(plan_of(*settings), five_actors, LAYOUTS["three uneven"])
    reports = run(session, ROUNDS)
    assert outcome(session, reports) == in_process(*settings)
    assert all(report.metrics["cost_bytes_up"] > 0 for report in reports)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_actors_add_each_others_sums(
    five_actors: RaySession, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three pieces of columns; what the server receives is one sum a piece, and has the bits of one block."""
    plan = plan_of("method=fedavg")
    Borrowed(plan, five_actors, LAYOUTS[layout])
    alone = session_of("method=fedavg").fleet
    fleet = RayFleet(five_actors.clients[: len(LAYOUTS[layout])], LAYOUTS[layout], plan.server.sizes)
    start = alone.initial(1)[0]
    monkeypatch.setattr(actors.trained, "SUMS", 8 * 3 * -(-fleet.spec.size // 3))
    received: list[Any] = []
    wait_for = RayFleet._wait_for

    def waiting(self: RayFleet, method: str, reference: Any) -> Any:
        received.append(wait_for(self, method, reference))
        return received[-1]

    monkeypatch.setattr(RayFleet, "_wait_for", waiting)
    weights = np.random.default_rng(0).random((3, 8)) * (np.arange(8) % 3 == np.arange(3)[:, None])
    averages = []
    for each in (alone, fleet):
        each.begin(1)
        averages.append(each.train(start).combine(weights).values)
    assert averages[0].tobytes() == averages[1].tobytes()
    assert [rows.tolist() for rows, _ in received] == [[0, 1, 2]] * 3
    assert sum(sums.shape[1] for _, sums in received) == fleet.spec.size


def test_every_centre_on_every_distribution(five_actors: RaySession) -> None:
    settings = ("method=ifca", "partition.holdout=0.5")
    session = Borrowed(plan_of(*settings), five_actors, LAYOUTS["three uneven"])
    reports = run(session, ROUNDS)
    assert np.array(reports[-1].metrics["centre_accuracy"]).shape == (2, 2)
    assert outcome(session, reports) == in_process(*settings)


def test_what_goes_wrong_in_a_client_is_reported_as_it_happened(five_actors: RaySession) -> None:
    plan = plan_of("method=fedavg", *killers.MODULE, "local.steps=3")
    session = Borrowed(plan, five_actors, LAYOUTS["one actor"])
    session.run_round(1)

    killers.arm("training", after=4, action="raise")  # the fifth step is client 1's second
    with pytest.raises(ClientFailure) as caught:
        session.run_round(2)
    failure = caught.value
    assert type(failure) is ClientFailure  # and not Ray's wrapper around it
    assert (failure.client, failure.round, failure.stage) == (1, 2, "local training ('main')")
    assert failure.cause.startswith("ArithmeticError: told to fail by a test (killers.py, line ")
    assert "training_step" in str(failure.__cause__)  # the client's own traceback

    killers.arm("evaluation", action="raise")
    with pytest.raises(ClientFailure, match="Client 0 failed in round 3 during evaluation on test data"):
        session.run_round(3)

    killers.arm(
        "training", after=4, action="exit"
    )  # a failure of the module's, and neither a loss nor an end
    with pytest.raises(ClientFailure, match=r"Client 1 failed in round 4 .*sys\.exit\(0\)"):
        session.run_round(4)

    killers.arm("training", after=7, action="nan")
    report = session.run_round(5)
    assert report.metrics["dropped"] == 1
    assert [event for event in report.events if "dropped client 2 from local training" in event]
    assert all(np.isfinite(model).all() for model in session.models()["models"].values())

    stopping = replace(plan, server=replace(plan.server, not_finite="stop"))
    session = Borrowed(stopping, five_actors, LAYOUTS["one actor"])
    killers.arm("training", after=7, action="nan")
    with pytest.raises(ClientFailure, match=r"Client 2 failed in round 5 .* not finite"):
        session.run_round(5)
