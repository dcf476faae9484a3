"""Shards of a checkpoint: a client's state is read and checked alone, and no kill leaves half a checkpoint."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.core.errors import UserError
from archipelago.runs.checkpoints import (
    CheckpointWriter,
    ShardFacts,
    checkpoints,
    latest,
    load,
    read_states,
    write_shard,
)
from archipelago.runs.trees import (
    DamagedFile,
    Rows,
    read_entries,
    read_keys,
    read_tree,
    write_arrays,
    write_entries,
    write_rows,
    write_tree,
)
from tests.support.errors import refused


def states(*clients: int, scale: float = 1.0) -> dict[int, Any]:
    return {
        client: {"model/own": np.full(3, client * scale, np.float32), "optimizer/main": [{"step": client}]}
        for client in clients
    }


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, default=lambda a: a.tolist()) == json.dumps(other, default=lambda a: a.tolist())


def test_entry_is_read_and_checked_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "clients-00000.safetensors"
    checksum = write_entries(path, states(1, 2, 7))
    assert read_keys(path) == ([1, 2, 7], checksum)
    assert same(read_tree(path), states(1, 2, 7)) and same(read_entries(path), states(1, 2, 7))
    assert same(read_entries(path, [7, 99]), states(7))
    data = bytearray(path.read_bytes())
    data[data.index(np.full(3, 2, np.float32).tobytes())] ^= 1  # a bit of client 2's model
    path.write_bytes(bytes(data))
    assert same(read_entries(path, [1, 7]), states(1, 7))
    assert read_keys(path)[1] == checksum  # the header is as it was
    for keys in ([2], None):
        with pytest.raises(DamagedFile, match="does not match its checksum"):
            read_entries(path, keys)


def test_entry_never_comes_back_as_something_else(tmp_path: Path) -> None:
    path, tree = tmp_path / "t.safetensors", states(3, 4)
    write_entries(path, tree)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            read_entries(path)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x04
        path.write_bytes(bytes(damaged))
        try:
            found = read_entries(path, [4])
        except UserError:
            continue
        assert (
            same(found, states(4)) or not found
        )  # not found: its key was damaged, which `read_states` refuses


def test_rows_that_come_one_by_one_make_the_file_of_the_whole_table(tmp_path: Path) -> None:
    table = np.random.default_rng(0).random((5, 7)).astype(np.float32)
    write_arrays(tmp_path / "whole", {"private-own": table}, {"format": "x"})
    rows = Rows((5, 7), table.dtype, lambda: ((row, table[row]) for row in (3, 0, 4, 1, 2)))
    write_rows(tmp_path / "rows", "private-own", rows, {"format": "x"})
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()


class Elsewhere:
    """A shard that another process writes, when it is told to finish; `begun` has the order of events."""

    def __init__(self, clients: list[int], begun: list[str]) -> None:
        self.clients, self.begun = clients, begun

    def begin(self, path: Path) -> None:
        self.begun.append(f"begin {path.name}")

    def finish(self, path: Path) -> ShardFacts:
        self.begun.append(f"finish {path.name}")
        code = (
            "import sys, pathlib, numpy as np; from archipelago.runs.checkpoints import write_shard; "
            "states = {c: {'w': np.full(4, c, np.float32)} for c in map(int, sys.argv[2:])}; "
            "write_shard(pathlib.Path(sys.argv[1]), states)"
        )
        subprocess.run([sys.executable, "-c", code, str(path), *map(str, self.clients)], check=True)
        return ShardFacts(self.clients, path.stat().st_size, read_keys(path)[1])

    def __call__(self) -> dict[int, Any]:
        raise AssertionError("the states must not travel")


def test_shards_are_begun_all_at_once_and_found_by_client(tmp_path: Path) -> None:
    events: list[str] = []
    writer = CheckpointWriter(tmp_path, every=1, keep=1)
    shards = {"clients-00000": Elsewhere([0, 5], events), "clients-00001": Elsewhere([2], events)}
    writer.submit(1, {"server": {"round": 1}, **shards})
    writer.close()
    files = [f"clients-0000{b}.safetensors" for b in (0, 1)]
    assert events == [f"{what} {file}" for what in ("begin", "finish") for file in files]
    found = latest(tmp_path, deep=False)
    assert found is not None and found[2] == []
    parts = found[1]
    assert parts["server"] == {"round": 1}
    assert parts.shards_of([2, 5, 9]) == {"clients-00000": [5], "clients-00001": [2]}
    assert [state["w"][0] for _, state in sorted(parts.states([2, 5]).items())] == [2, 5]


def _written(run: Path, *rounds: int) -> None:
    writer = CheckpointWriter(run, every=1, keep=len(rounds))
    for round in rounds:
        writer.submit(round, {"server": {"round": round}, "clients-00000": states(0, 1, scale=round)})
    writer.close()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def _other(path: Path) -> None:
    """A whole shard, but of another round."""
    write_shard(path, states(0, 1, scale=100.0))


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9]), _other]
)
def test_missing_cut_or_foreign_shard_is_seen_without_reading_it(tmp_path: Path, damage: Any) -> None:
    _written(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints/round-000002/clients-00000.safetensors")
    found = latest(tmp_path, deep=False)
    assert found is not None and found[0] == 1 and "round 2 was passed over" in found[2][0]


def test_flipped_bit_is_seen_by_who_reads_it(tmp_path: Path) -> None:
    _written(tmp_path, 1, 2)
    _flip(tmp_path / "checkpoints/round-000002/clients-00000.safetensors")
    parts = load(tmp_path / "checkpoints/round-000002", deep=False)
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        parts.states([0, 1])
    found = latest(tmp_path, deep=False, damaged={2: "an actor said so"})
    assert found is not None and found[0] == 1 and "an actor said so" in found[2][0]
    with refused("no-checkpoint"):
        latest(tmp_path, deep=False, damaged={1: "so is this one", 2: "an actor said so"})


def test_shard_that_lacks_a_client_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "clients-00000.safetensors", states(0, 1))
    with pytest.raises(DamagedFile, match="it lacks client 4"):
        read_states(tmp_path, {"clients-00000": [1, 4]})


def test_checkpoint_of_an_earlier_version_is_restored(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/round-000003"
    folder.mkdir(parents=True)
    write_tree(folder / "server.safetensors", {"round": 3})
    write_tree(folder / "clients-00000.safetensors", states(0, 2))
    write_tree(folder / "clients-00001.safetensors", states(1))
    names = ["clients-00000", "clients-00001", "server"]
    (folder / "manifest.json").write_text(json.dumps({"round": 3, "parts": names}) + "\n")
    for deep in (False, True):
        found = latest(tmp_path, deep=deep)
        assert found is not None and (found[0], found[2]) == (3, [])
        assert same(found[1].states([1, 2]), states(2, 1))
    _flip(folder / "clients-00001.safetensors")
    with pytest.raises(DamagedFile):
        load(folder, deep=False).states([1])


_WRITER = """
import sys, pathlib
import numpy as np
from archipelago.runs.checkpoints import write_shard

for line in sys.stdin:
    path, value = line.split()
    print("begins", flush=True)
    facts = write_shard(pathlib.Path(path), {3: {"w": np.full(2_000_000, int(value), np.float32)}})
    print(facts.bytes, facts.checksum, flush=True)
"""


class Killed:
    """A shard that another process writes, which may be killed while it does."""

    def __init__(self, writer: subprocess.Popen[str], round: int, kill_after: float | None) -> None:
        self.writer, self.round, self.kill_after = writer, round, kill_after

    def begin(self, path: Path) -> None:
        assert self.writer.stdin is not None
        self.writer.stdin.write(f"{path} {self.round}\n")
        self.writer.stdin.flush()
        assert self.writer.stdout is not None and self.writer.stdout.readline() == "begins\n"
        if self.kill_after is not None:
            time.sleep(self.kill_after)
            self.writer.send_signal(signal.SIGKILL)

    def finish(self, path: Path) -> ShardFacts:
        assert self.writer.stdout is not None
        answer = self.writer.stdout.readline().split()
        if not answer:
            raise ConnectionError("the actor is gone")
        return ShardFacts([3], int(answer[0]), answer[1])

    def __call__(self) -> dict[int, Any]:
        raise AssertionError("the states must not travel")


def test_process_killed_while_it_writes_a_shard_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    draw, newest, killed = random.Random(3), 0, 0
    for round in range(1, 9):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        writer = CheckpointWriter(tmp_path, every=1, keep=2)
        kill = None if round in (1, 5) else draw.random() * 0.03  # about as long as it takes
        try:
            writer.submit(round, {"server": {"round": round}, "clients-00000": Killed(process, round, kill)})
            writer.close()
            newest = round
        except (ConnectionError, BrokenPipeError):
            writer.abandon()
            killed += 1
        finally:
            process.kill()
            process.communicate()
        found = latest(tmp_path)
        assert found is not None and found[0] == newest and found[2] == []
        assert (found[1].states([3])[3]["w"] == newest).all()
        assert sorted((tmp_path / "checkpoints").iterdir()) == [path for _, path in checkpoints(tmp_path)]
    assert killed and newest >= 5
