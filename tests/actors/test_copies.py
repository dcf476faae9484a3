"""Copies of committed states: changes make the same of a copy as a commit makes of the original."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.block import ClientBlock
from actors.client_states import Changes, ClientStates
from actors.compute import Committed
from actors.copies import Copies, neighbours, owned
from actors.recovery import _Standings
from tests.support.experiments import digest, run, session_of
from tests.support.methods import compositions

STATEFUL = (
    ("method=ditto", "local.optimizer=adam"),
    ("method=fedsoft", "fedsoft.tau=2", "participation.fraction=0.5"),
    ("method=ifca", "update=[topk]", "participation.fraction=0.5"),
    ("method=ditto", "local.engine=stacked", "participation.fraction=0.5"),
)


def followed(monkeypatch: pytest.MonkeyPatch, rounds: int, *settings: str) -> int:
    """Run an experiment in which a copy of every block follows its changes; returns how many values arrived."""
    held, arrived, commit, round = Copies(), [0], ClientBlock.commit, [0]

    def following(self: ClientBlock) -> Committed:
        name, changes = str(sorted(self.clients)), self.changes()
        if name not in held.rounds():
            held.hold(name, 0, self.snapshot())
        arrived[0] += sum(map(len, changes.put.values()))
        round[0] += 1
        held.prepare(name, round[0], changes)
        notes = commit(self)
        held.settle(round[0])
        assert digest(held.of(name)) == digest(self.snapshot())
        return notes

    monkeypatch.setattr(ClientBlock, "commit", following)
    run(session_of(*settings, "fleet.actors=2"), rounds)
    return arrived[0]


@pytest.mark.parametrize("settings", STATEFUL, ids=lambda settings: " ".join(settings))
def test_changes_make_the_committed_state_of_a_copy(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert followed(monkeypatch, 3, *settings) > 0


@pytest.mark.full
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", compositions())
def test_changes_of_every_method(method: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed(monkeypatch, 2, f"method={method}", f"local.engine={engine}", "participation.fraction=0.75")


def test_changes_are_what_a_round_replaced_and_nothing_else() -> None:
    states, kept, old, new = ClientStates([0, 1]), object(), object(), object()
    states.put(0, {"kept": kept, "old": old, "gone": 1})
    states.commit()
    states.put(0, {"kept": kept, "old": new})
    assert states.changes() == Changes({0: {"old": new}}, {0: ["gone"]})
    states.abort()
    assert states.changes() == Changes()


def test_copy_takes_over_a_round_only_when_it_is_decided() -> None:
    copies = Copies()
    copies.hold("a", 3, {0: {"x": 3}})
    copies.prepare("a", 4, Changes({0: {"x": 4}}))
    assert copies.rounds() == {"a": (3, 4)} and copies.of("a") == {0: {"x": 3}}
    copies.settle(3)  # round 4 was aborted
    assert copies.rounds() == {"a": (3, None)} and copies.of("a") == {0: {"x": 3}}
    copies.prepare("a", 4, Changes({0: {"x": 5}}))
    copies.settle(4)
    assert copies.rounds() == {"a": (4, None)} and copies.of("a") == {0: {"x": 5}}
    copies.settle(4)  # told twice
    assert copies.of("a") == {0: {"x": 5}}
    copies.only(["b"])
    assert copies.rounds() == {}


def test_copy_has_memory_of_its_own() -> None:
    block = np.arange(6, dtype=np.float32)
    mine = owned({"a": [block[:3], (block[3:], 7)]})
    block[:] = 0
    assert mine["a"][0].tolist() == [0, 1, 2] and mine["a"][1][0].tolist() == [3, 4, 5]
    assert not mine["a"][0].flags.writeable and mine["a"][1][1] == 7


@pytest.mark.parametrize("nodes", ["aab", "abc", "aaaa", "aaabb", "abbb"])
def test_neighbours_are_others_and_elsewhere_if_anybody_is(nodes: str) -> None:
    found = neighbours(list(nodes))
    assert all(there != b for b, there in enumerate(found))
    if len(set(nodes)) > 1:
        assert all(nodes[there] != nodes[b] for b, there in enumerate(found))


def standings(said: dict[Any, Any], lost: list[Any]) -> _Standings:
    made = _Standings.__new__(_Standings)
    made.said, made.lost, made.names = said, lost, {key: str(key) for key in (0, 1, "server")}
    return made


def says(round: int, **copies: tuple[int, int | None]) -> dict[str, Any]:
    return {"round": round, "copies": {name.lstrip("_"): rounds for name, rounds in copies.items()}}


@pytest.mark.parametrize(
    ("said", "lost", "decided"),
    [
        ({0: says(4, _1=(4, None)), "server": says(4)}, [1], 4),  # in the middle of round 5
        ({0: says(4, _1=(4, 5)), "server": says(4)}, [1], 4),  # prepared, and never decided
        ({0: says(4, _1=(4, 5)), "server": says(5)}, [1], 5),  # decided, before anybody committed
        ({0: says(5, _1=(5, None)), "server": says(5)}, [1], 5),
        ({0: says(5, server=(5, None)), 1: says(4)}, ["server"], 5),  # it died while others committed
        ({0: says(4, server=(4, 5)), 1: says(5)}, ["server"], 5),
        ({0: says(4), "server": says(4)}, [1], None),  # nobody has a copy
        ({"server": says(4, _0=(4, None))}, [0, 1], None),  # of one of them
        ({0: says(4, _1=(3, None)), "server": says(4)}, [1], None),  # an old copy
        ({0: says(2, _1=(2, None)), "server": says(2)}, [1], None),  # not where the driver is
    ],
)
def test_round_that_everybody_can_be_at(said: dict[Any, Any], lost: list[Any], decided: int | None) -> None:
    assert standings(said, lost).decided(4) == decided


def state_outlives_a_round(*settings: str) -> None:
    """What the server had before a round, to which an aborted one goes back, is not written to by the round."""
    session = session_of(*settings, "fleet.actors=1")
    run(session, 1)
    before = session.server.committed_state()
    bits = digest(before)
    run(session, 1, first=2)
    assert digest(before) == bits != digest(session.server.committed_state())


@pytest.mark.parametrize("method", ["fedsoft", "cfl", "ifca+cam"])
def test_server_state_is_not_written_to_by_the_next_round(method: str) -> None:
    state_outlives_a_round(f"method={method}")


@pytest.mark.full
@pytest.mark.parametrize("method", compositions())
def test_server_state_of_every_method_is_not_written_to_by_the_next_round(method: str) -> None:
    state_outlives_a_round(f"method={method}")
