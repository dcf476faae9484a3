"""Checkpoints: written off the critical path, atomically, and found again after any kill."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.runs.checkpoints import CheckpointWriter, checkpoints, latest, load
from tests.support.errors import refused


def parts(round: int) -> dict[str, Any]:
    values = np.full(4, round, np.float32)
    return {"server": {"round": round, "w": values}, "clients-0": lambda: {0: (round, values)}}


def rounds_on_disk(run: Path) -> list[int]:
    return [round for round, _ in checkpoints(run)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "checkpoints").mkdir()
    yield tmp_path
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_what_was_submitted_is_found_and_only_the_newest_are_kept(run: Path) -> None:
    assert latest(run) is None
    writer = CheckpointWriter(run, every=10, keep=2)
    assert [round for round in range(1, 41) if writer.due(round)] == [10, 20, 30, 40]
    for round in (10, 20, 30, 40):
        writer.submit(round, parts(round))
    writer.close()
    assert rounds_on_disk(run) == [30, 40]
    found = latest(run)
    assert found is not None
    round, trees, warnings = found
    assert (round, warnings) == (40, [])
    assert trees["clients-0"][0][0] == 40
    np.testing.assert_array_equal(trees["server"]["w"], np.full(4, 40, np.float32))
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["round-000030", "round-000040"]


def test_one_who_submits_does_not_wait_for_the_disk(run: Path) -> None:
    release = threading.Event()
    where: list[str] = []

    def slow() -> dict[str, int]:
        where.append(threading.current_thread().name)
        assert release.wait(20)
        return {"round": 1}

    writer = CheckpointWriter(run, every=1, keep=1)
    writer.submit(1, {"server": slow})  # would never return if it waited
    assert latest(run) is None
    release.set()
    writer.close()
    assert where[0].startswith("checkpoint")
    found = latest(run)
    assert found is not None
    assert found[:2] == (1, {"server": {"round": 1}})


def _broken() -> Any:
    raise ConnectionError("the actor is gone")


def test_error_surfaces_at_the_next_submit_and_leaves_no_folder(run: Path) -> None:
    writer = CheckpointWriter(run, every=1, keep=2)
    writer.submit(1, parts(1))
    writer.submit(2, {"server": {"round": 2}, "clients-0": _broken})
    with pytest.raises(ConnectionError, match="the actor is gone"):
        writer.submit(3, parts(3))
    writer.submit(4, parts(4))
    writer.close()
    assert rounds_on_disk(run) == [1, 4]
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_error_surfaces_at_close(run: Path) -> None:
    writer = CheckpointWriter(run, every=1, keep=2)
    writer.submit(1, {"server": {"state": object()}})
    with pytest.raises(TypeError, match=r"'state' is a builtins\.object"):
        writer.close()
    writer.abandon()
    assert latest(run) is None


def test_abandoning_waits_and_says_nothing(run: Path) -> None:
    writer = CheckpointWriter(run, every=1, keep=2)
    writer.submit(1, parts(1))
    writer.abandon()
    assert rounds_on_disk(run) == [1]
    writer = CheckpointWriter(run, every=1, keep=2)
    writer.submit(2, {"server": _broken})
    writer.abandon()
    assert rounds_on_disk(run) == [1]


def test_round_that_is_run_again_replaces_its_checkpoint(run: Path) -> None:
    writer = CheckpointWriter(run, every=1, keep=3)
    writer.submit(5, {"server": "old"})
    writer.submit(5, {"server": "new"})
    writer.close()
    assert load(run / "checkpoints" / "round-000005") == {"server": "new"}


def test_leftovers_of_a_killed_process_are_no_checkpoints_and_are_swept(run: Path) -> None:
    writer = CheckpointWriter(run, every=1, keep=3)
    writer.submit(3, parts(3))
    writer.close()
    for name in ("round-000004.tmp-77", "round-000002.old-77", ".round-000009.removed-77"):
        shutil.copytree(run / "checkpoints" / "round-000003", run / "checkpoints" / name)
    assert rounds_on_disk(run) == [3]
    CheckpointWriter(run, every=1, keep=3).close()
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["round-000003"]


def test_part_that_cannot_be_a_file_is_refused(run: Path) -> None:
    writer = CheckpointWriter(run, every=1, keep=1)
    with pytest.raises(ValueError, match=r"'\.\./server' cannot be a file name"):
        writer.submit(1, {"../server": 1})
    writer.close()


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("file", ["server.safetensors", "clients-0.safetensors", "manifest.json"])
def test_damaged_newest_checkpoint_falls_back_to_the_one_before(run: Path, damage: Any, file: str) -> None:
    writer = CheckpointWriter(run, every=10, keep=2)
    for round in (10, 20):
        writer.submit(round, parts(round))
    writer.close()
    damage(run / "checkpoints" / "round-000020" / file)
    found = latest(run)
    assert found is not None
    round, trees, warnings = found
    assert round == 10
    assert trees["server"]["round"] == 10
    assert len(warnings) == 1
    assert "checkpoint of round 20 was passed over" in warnings[0]
    damage(run / "checkpoints" / "round-000010" / file)
    with refused("no-checkpoint", says="name"):
        latest(run)


_WORKER = """
import sys
import numpy as np
from archipelago.runs.checkpoints import CheckpointWriter, latest

found = latest(sys.argv[1])
round = found[0] if found else 0
writer = CheckpointWriter(sys.argv[1], every=1, keep=2)
print("ready", flush=True)
while True:
    round += 1
    block = np.full(1_000_000, round, np.float32)
    writer.submit(round, {"server": {"round": round, "w": block}, "clients": {3: block, 4: [round]}})
    print(round, flush=True)
"""


def test_after_a_kill_at_any_moment_the_latest_is_whole(run: Path) -> None:
    draw = random.Random(11)
    newest = 0
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", _WORKER, str(run)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(draw.random() * 0.15)
        child.send_signal(signal.SIGKILL)
        submitted = [int(line) for line in child.stdout.read().split()]
        child.stdout.close()
        child.wait()
        found = latest(run)
        if found is None:
            assert newest == 0
            continue
        round, trees, warnings = found
        assert warnings == []
        # A submit returns once the one before is on disk: at most the last two are lost.
        assert round >= max([newest, *(number - 1 for number in submitted)])
        assert trees["server"]["round"] == round
        assert (trees["server"]["w"] == round).all()
        assert trees["clients"][4] == [round]
        newest = round
    assert newest >= 1


def test_checkpoint_is_due_by_rounds_or_by_minutes(tmp_path: Path) -> None:
    now = [0.0]
    writer = CheckpointWriter(tmp_path, every=10, keep=2, minutes=5.0, clock=lambda: now[0])
    assert not writer.due(1) and writer.due(10)
    now[0] = 299.0
    assert not writer.due(2)
    now[0] = 301.0
    assert writer.due(2)  # rounds of minutes: a crash must not cost ten of them
    writer.submit(2, {"server": {"model": np.zeros(2, np.float32)}})
    assert not writer.due(3)
    now[0] = 602.0
    assert writer.due(3)
    writer.close()
    never = CheckpointWriter(tmp_path, every=10, keep=2, minutes=0.0, clock=lambda: now[0])
    now[0] = 1e9
    assert not never.due(3)
    never.close()
