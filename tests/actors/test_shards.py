"""Checkpoints whose shards the client actors write and read themselves, and what happens where they cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import actors.shards
from actors.reports import RoundReport
from archipelago import open_run
from archipelago.experiments.runner import resume, run_experiment
from archipelago.runs.checkpoints import StoredParts, checkpoints, load
from tests.support import killers
from tests.support.callbacks import OnRound, StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events

# Momentum and private models, that is everything a client can keep.
SETTINGS = ("method=ditto", "rounds=5", "checkpoint.every=2", "local.momentum=0.9")


def undisturbed(folder: Path, *settings: str) -> Path:
    return run_experiment(config_of(*settings), folder / "undisturbed", quiet=True)


def stopped(folder: Path, after: int, *settings: str) -> Path:
    """A run that was stopped when this round's checkpoint was on its way."""
    with pytest.raises(Exception, match="StopAfter"):
        run_experiment(
            config_of(*settings), folder, callbacks=[StopAfter(after, "on_checkpoint")], quiet=True
        )
    return folder


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [_flip, Path.unlink])
def test_damaged_shard_means_the_checkpoint_before_it(tmp_path: Path, damage: Any) -> None:
    run = stopped(tmp_path / "run", 4, *SETTINGS)
    assert [round for round, _ in checkpoints(run)] == [2, 4]
    damage(run / "checkpoints/round-000004/clients-00000.safetensors")
    resume(run, quiet=True)
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    assert sum("The checkpoint of round 4 was passed over" in event for event in events(run)) == 1


def test_only_damaged_shards_are_one_sentence(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", 4, *SETTINGS)
    for _, folder in checkpoints(run):
        _flip(folder / "clients-00000.safetensors")
    with refused("no-checkpoint"):
        resume(run, quiet=True)


ON_RAY = ("fleet.backend=ray", "fleet.actors=3", "fleet.cpus=0.5")


@pytest.mark.ray
def test_actors_write_and_read_their_shards_themselves(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client's state comes through the driver, not even when the packing changes at a resume."""

    def travels(*arguments: Any) -> Any:
        raise AssertionError("a client's state came through the driver")

    monkeypatch.setattr(actors.shards, "write_shard", travels)
    monkeypatch.setattr(actors.shards.ActorShard, "__call__", travels)
    monkeypatch.setattr(StoredParts, "states", travels)
    run = stopped(tmp_path / "run", 4, *SETTINGS, *ON_RAY)
    parts = load(run / "checkpoints/round-000004")
    assert sorted(parts) == ["clients-00000", "clients-00001", "clients-00002", "server"]
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("actors: 3", "actors: 2"))
    resume(run, quiet=True)
    assert len(load(run / "checkpoints/round-000005")) == 3  # two shards and the server
    monkeypatch.undo()
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    assert open_run(run).models["private-personal"].shape[0] == 8


@pytest.mark.ray
def test_actors_that_do_not_see_the_folder_send_their_states_to_the_driver(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/proc/self/cwd` is another folder in every process, as a local disk is on every node."""
    monkeypatch.chdir(tmp_path)
    path = Path("/proc/self/cwd/run")
    written: list[Path] = []
    write_shard = actors.shards.write_shard

    def writing(path: Path, states: Any) -> Any:
        written.append(path)
        return write_shard(path, states)

    monkeypatch.setattr(actors.shards, "write_shard", writing)
    stopped(path, 4, *SETTINGS, *ON_RAY)
    assert len(written) == 3 * 2 and all("round-00000" in str(each) for each in written)
    resume(path, quiet=True)
    assert_equal_runs(tmp_path / "run", undisturbed(tmp_path, *SETTINGS))


@pytest.mark.ray
def test_actor_killed_while_it_writes_a_shard_is_survived(ray_cluster: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, *killers.MODULE)
    armed: list[Path] = []

    def on_round(report: RoundReport) -> None:
        if report.round == 3 and not armed:  # the shards of round 4 are written next
            armed.append(killers.arm("saving", 1))

    run = run_experiment(
        config_of(*settings, *ON_RAY), tmp_path / "run", callbacks=[OnRound(on_round)], quiet=True
    )
    assert len(armed) == 1 and not armed[0].exists(), "nobody was killed"
    assert_equal_runs(run, undisturbed(tmp_path, *settings))
    lost = [event for event in events(run) if event.startswith("Lost an actor")]
    # From copies of its neighbour: the checkpoint of round 2 is not needed.
    assert len(lost) == 1 and int(lost[0].rstrip(".").rpartition("from round ")[2]) >= 4
    assert not [entry for entry in (run / "checkpoints").iterdir() if ".tmp-" in entry.name]


@pytest.mark.ray
def test_shard_that_is_damaged_for_an_actor_means_the_checkpoint_before_it(
    ray_cluster: Path, tmp_path: Path
) -> None:
    run = stopped(tmp_path / "run", 4, *SETTINGS, *ON_RAY)
    shutil.copytree(run, tmp_path / "hopeless")
    _flip(run / "checkpoints/round-000004/clients-00001.safetensors")
    resume(run, quiet=True)
    assert_equal_runs(run, undisturbed(tmp_path, *SETTINGS))
    assert sum("The checkpoint of round 4 was passed over" in event for event in events(run)) == 1
    for _, folder in checkpoints(tmp_path / "hopeless"):
        _flip(folder / "clients-00002.safetensors")
    with refused("no-checkpoint", run=tmp_path / "hopeless"):
        resume(tmp_path / "hopeless", quiet=True)
