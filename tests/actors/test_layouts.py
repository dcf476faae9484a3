"""Every method gives the same bits in any layout, after any restore and after an aborted round.

All in this process: what Ray adds is tested on a real cluster in test_ray_equality.py and test_ray_recovery.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actors.trained
from actors.reports import RoundReport
from actors.server import Server
from actors.session import Checkpoint
from archipelago import open_run
from archipelago.experiments.runner import resume, run_experiment
from archipelago.runs.checkpoints import CheckpointWriter, latest
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of, digest, outcome, run, session_of
from tests.support.methods import compositions, matrix
from tests.support.runs import assert_equal_runs

# Everything that keeps state or depends on who takes part: momentum, stragglers, clients not seen yet.
HARD = ("partition=dirichlet", "partition.alpha=1.0", "participation.fraction=0.75",
        "participation.stragglers=0.3", "participation.dropouts=0.2", "local.steps=2")  # fmt: skip

LAYOUTS = {
    "two blocks": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "uneven": [[5], [0, 1, 2, 3, 4, 6, 7]],
    "scattered": [[7, 0, 3], [5, 1], [2, 6, 4]],
    "one each": [[client] for client in range(8)],
}

# One method of each kind of state that clients or the server keep between rounds.
KINDS = {
    "none": ("method=fedavg", "local.keep_optimizer=false"),
    "private model": ("method=local", "local.keep_optimizer=false"),
    "momentum": ("method=fedavg", "local.optimizer=sgd", "local.momentum=0.9"),
    "moments and steps": ("method=fedprox", "local.optimizer=adam"),
    "clusters": ("method=ifca",),
}


@pytest.fixture(params=[*matrix(), "ensemble=[local,ifca+cam]"])
def method(request: pytest.FixtureRequest) -> str:
    """`method=NAME` of everything there is, and an ensemble."""
    return str(request.param)


@functools.cache
def undisturbed(*settings: str) -> str:
    """What four rounds in one block, never interrupted, come to."""
    session = session_of(*settings, *HARD)
    return outcome(session, run(session, 4))


def test_digest_sees_the_last_bit_of_anything() -> None:
    value = np.array([1.0, 2.0], np.float32)
    nudged = np.array([1.0, np.nextafter(np.float32(2), np.float32(3))], np.float32)
    report = RoundReport(1, {"loss": 1.0}, {"client": np.arange(2)}, np.zeros(2, np.int64))
    trees = [
        [report, {"model": value}, {0: {"optimizer/main": [{"momentum": value}]}}],
        [report, {"model": nudged}, {0: {"optimizer/main": [{"momentum": value}]}}],
        [report, {"model": value}, {0: {"optimizer/main": [{"momentum": nudged}]}}],
        [report, {"model": value}, {1: {"optimizer/main": [{"momentum": value}]}}],
        [replace(report, metrics={"loss": 1.0 + 2**-52}), {"model": value}, {0: {}}],
        [replace(report, assignment=np.array([0, 1])), {"model": value}, {0: {}}],
    ]
    assert len({digest(tree) for tree in trees}) == len(trees)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layout_does_not_matter(kind: str, layout: str) -> None:
    session = session_of(*KINDS[kind], *HARD, blocks=LAYOUTS[layout])
    assert outcome(session, run(session, 4)) == undisturbed(*KINDS[kind])


@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_sums_in_pieces_of_columns_do_not_matter(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(*KINDS["clusters"], *HARD, blocks=LAYOUTS["scattered"])
    monkeypatch.setattr(actors.trained, "SUMS", 8 * 2 * session.fleet.spec.size / pieces)
    seen: list[int] = []
    reach = session.fleet._reach

    def reaching(name: str, arguments: dict[int, Any], arrays: Any = ()) -> Any:
        seen.extend(given[-1][1] - given[-1][0] for given in arguments.values() if name == "combine")
        return reach(name, arguments, arrays)

    monkeypatch.setattr(session.fleet, "_reach", reaching)
    assert outcome(session, run(session, 4)) == undisturbed(*KINDS["clusters"])
    # Where one cluster alone is in use, a piece may have twice the columns.
    assert max(seen) <= 2 * session.fleet.spec.size / pieces


def through_files(session: Any, round: int, folder: Path) -> Checkpoint:
    """The session's state, written as a checkpoint of this round and read back."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    writer = CheckpointWriter(folder, every=1, keep=1)
    writer.submit(round, session.snapshot())
    session.run_round(round + 1)  # lost: what was submitted must not change with it
    writer.close()
    found = latest(folder)
    assert found is not None and found[0] == round and found[2] == []
    parts = found[1]
    clients = {client: state for name in parts if name != "server" for client, state in parts[name].items()}
    return Checkpoint(parts["server"], clients)


def test_every_round_in_another_layout_from_a_checkpoint_on_disk(method: str, tmp_path: Path) -> None:
    reports: list[RoundReport] = []
    checkpoint = session = None
    for round, blocks in enumerate(LAYOUTS.values(), start=1):
        if session is not None:
            checkpoint = through_files(session, round - 1, tmp_path)
        session = session_of(method, *HARD, blocks=blocks, checkpoint=checkpoint)
        reports += run(session, 1, first=round)
    assert outcome(session, reports) == undisturbed(method)


class Interrupted(Exception):
    """Stands for whatever can end a round half-way."""


def test_aborted_rounds_leave_no_trace(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(method, *HARD, blocks=LAYOUTS["two blocks"])
    fleet, reports = session.fleet, run(session, 1)
    reach = fleet._reach

    def interrupted(stages: tuple[str, ...], name: str, arguments: dict[int, Any], arrays: Any = ()) -> Any:
        if name not in stages:
            return reach(name, arguments, arrays)
        if name != "commit":  # the first block does what it is asked, the others never hear of it
            reach(name, dict(list(arguments.items())[:1]), arrays)
        raise Interrupted

    for round, stages in enumerate([("train", "gradients"), ("evaluate",), ("commit",)], start=2):
        state = session.server.state()
        monkeypatch.setattr(fleet, "_reach", functools.partial(interrupted, stages))
        try:
            session.run_round(round)
        except Interrupted:
            # A new server takes over; the blocks still hold what the aborted attempt left.
            monkeypatch.undo()
            session.server = Server(session.server.setup, fleet, state)
            reports += run(session, 1, first=round)
        else:
            raise AssertionError(f"nobody was asked for {stages} in round {round}")
    assert outcome(session, reports) == undisturbed(method)


STOPPED = (*HARD, "rounds=3", "checkpoint.every=2")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a method that nobody stopped, made once."""

    @functools.cache
    def made(method: str) -> Path:
        path = tmp_path_factory.mktemp("whole") / "run"
        return run_experiment(config_of(method, *STOPPED), path, quiet=True)

    return made


def stop_and_resume(method: str, stop: int, folder: Path) -> Path:
    interrupt = StopAfter(
        stop, "on_checkpoint" if stop > 1 else "on_round"
    )  # the first round has no checkpoint
    with refused("users-code"):
        run_experiment(config_of(method, *STOPPED), folder / "run", callbacks=[interrupt], quiet=True)
    assert open_run(folder / "run").status.state == "failed"
    return resume(folder / "run", quiet=True)


# What a checkpoint on disk holds of every method is above; of what resume does with it, a few methods tell.
RESUMED = ("fedavg", "ifca+cam", "fesem+cam", "fedem", "femam", "cfl", "ditto", "scaffold")
STOPPED_METHODS = [
    pytest.param(f"method={name}", marks=() if name in RESUMED else pytest.mark.full)
    for name in compositions()
]


# With a checkpoint on its way to the disk.
@pytest.mark.parametrize("method", [*STOPPED_METHODS, "ensemble=[local,ifca+cam]"])
def test_run_that_was_stopped_and_resumed_leaves_the_same_files(
    method: str, tmp_path: Path, whole_run: Callable[[str], Path]
) -> None:
    assert_equal_runs(stop_and_resume(method, 2, tmp_path), whole_run(method))


@pytest.mark.parametrize("stop", [1, 3])  # before the first checkpoint, and after the last round
def test_run_stopped_early_or_late(stop: int, tmp_path: Path, whole_run: Callable[[str], Path]) -> None:
    assert_equal_runs(stop_and_resume("method=ifca", stop, tmp_path), whole_run("method=ifca"))


def test_clients_with_one_class_each_are_survived(method: str) -> None:
    # Two ground-truth groups of five clients, for the oracle.
    session = session_of(
        method, "partition=cluster_n_class", "partition.groups=2", "partition.classes=5", "partition.classes_within=1",
        "data.rotations=1", "clients=10",
    )  # fmt: skip
    report = run(session, 2)[-1]
    assert np.isfinite(report.metrics["micro_accuracy"])
