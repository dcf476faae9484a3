"""Models are values: nobody writes to them, and no two of them, of clients or of the server, share storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipelago.experiments import runner
from archipelago.experiments.callbacks import Callback
from archipelago.experiments.config import load_config
from tests.support.experiments import checkpoint_of, run, session_of
from tests.support.methods import compositions

Piece = tuple[int, int, str]  # first byte, last byte, owner


def arrays_in(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Every array of a nested value."""
    if isinstance(value, torch.Tensor):
        yield value.detach().numpy()
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)


def pieces_of(owner: str, value: Any) -> list[Piece]:
    """The stretches of memory that an owner's arrays lie in."""
    found = [array for array in arrays_in(value) if array.size]
    return [(*np.lib.array_utils.byte_bounds(array), owner) for array in found]


def shared(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Pairs of different owners whose memory overlaps."""
    found, last = [], (0, 0, "")
    for piece in sorted(pieces):
        if piece[0] < last[1] and piece[2] != last[2]:
            found.append((last[2], piece[2]))
        last = max(last, piece, key=lambda one: one[1])
    return found


def models_of(session: Any) -> list[Piece]:
    """Every model of the server, a matrix of K models as K owners."""
    found = []
    for name, value in session.server.models().items():
        for k, row in enumerate(np.atleast_2d(value)):
            found += pieces_of(f"{name} {k}", row)
    return found


def test_search_sees_what_is_shared() -> None:
    one, other = np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert shared([*pieces_of("a", [one]), *pieces_of("b", {"x": other})]) == []
    assert shared([*pieces_of("a", [one]), *pieces_of("b", {"x": torch.from_numpy(one[2:])})]) == [("a", "b")]
    rows = np.broadcast_to(one, (2, 4))
    assert len(shared([*pieces_of("k 0", rows[0]), *pieces_of("k 1", rows[1])])) == 1


@pytest.mark.parametrize("setting", [*(f"method={name}" for name in compositions()), "ensemble=[ditto,ifca]"])
def test_clients_and_models_of_the_server_share_nothing(setting: str) -> None:
    session = session_of(setting, "clients=4", "rounds=2", "local.steps=1", "local.momentum=0.9")
    run(session, 2)
    states = checkpoint_of(session).clients
    pieces = [piece for client, state in states.items() for piece in pieces_of(f"client {client}", state)]
    assert models_of(session) and shared([*pieces, *models_of(session)]) == []
    assert not [name for name, value in session.server.models().items() if value.flags.writeable]
    server = pieces_of("server", session.server.state())  # what a checkpoint holds of it, models or not
    assert shared([*pieces, *server]) == []


@pytest.mark.parametrize("method", ["local", "ditto", "fedsoft"])
def test_clients_that_were_trained_as_one_batch_share_nothing(method: str) -> None:
    session = session_of(f"method={method}", "local.engine=stacked", "local.momentum=0.9")
    run(session, 1)
    states = checkpoint_of(session).clients
    pieces = [piece for client, state in states.items() for piece in pieces_of(f"client {client}", state)]
    assert len({owner for _, _, owner in pieces}) == 8 and shared(pieces) == []


@pytest.mark.ray
def test_samples_on_a_cluster_are_held_by_its_object_store_alone(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lets go of what it has read as soon as the actors can see it."""
    held: list[Any] = []
    build = runner.build_federation

    def watched(*asked: Any) -> Any:
        federation = build(*asked)
        held.append(weakref.ref(federation.x))
        return federation

    class Look(Callback):
        alive: list[bool] = []  # noqa: RUF012  (one look, in one test)

        def on_round(self, run: Any, report: Any) -> None:
            self.alive.append(held[0]() is not None)

    monkeypatch.setattr(runner, "build_federation", watched)
    config = load_config(
        None,
        ["method=fedavg", "clients=2", "rounds=1", "local.steps=1", "model=mlp", "model.hidden=[2]",
         "data=digits", "fleet.actors=1", f"storage={tmp_path}"],
        env={},
    )  # fmt: skip
    runner.run_experiment(config, callbacks=[Look()], quiet=True)
    assert Look.alive == [False]
