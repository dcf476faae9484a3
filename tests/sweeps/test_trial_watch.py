"""The process of a trial that is stopped: named, ended, and its trial begun again from its last checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.watchdog import Member, Vital
from archipelago.sweeps import trial_watch
from archipelago.sweeps.runner import run_sweep
from archipelago.sweeps.trial_watch import Looks
from tests.support.sweeps import assert_equal_sweeps, rows_of, sweep_of


def looked_at(
    monkeypatch: pytest.MonkeyPatch, seen: Sequence[Vital]
) -> tuple[list[str], list[int], list[str]]:
    """(what was said, who was ended, what was forgotten) after one look for each of these."""
    said: list[str] = []
    ended: list[int] = []
    forgotten: list[str] = []
    member = Member(None, "The process of t0", 7, "abcdef0123", "here")
    left = iter(seen)
    monkeypatch.setattr(trial_watch, "announced", lambda label: {} if forgotten else {"key": member})
    monkeypatch.setattr(trial_watch, "vital", lambda member: next(left))
    monkeypatch.setattr(trial_watch, "on_node", lambda function, member, otherwise: ended.append(member.pid))
    monkeypatch.setattr(trial_watch, "_forget", forgotten.append)
    looks = Looks("label", 60.0, said.append)
    for _ in seen:
        looks.look()
    return said, ended, forgotten


@pytest.mark.parametrize("status", ["stopped", "disk-sleep"])
def test_process_of_a_trial_that_stands_still_is_named_and_ended_after_a_second_limit(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    now = Vital(status, 3.0)
    said, ended, _ = looked_at(monkeypatch, [now, now])
    assert len(said) == 1 and "The process of t0 (pid 7 on node here, abcdef01) is late" in said[0]
    assert status in said[0] and not ended
    said, ended, forgotten = looked_at(monkeypatch, [now, now, now, now])
    assert len(said) == 2 and ended == [7] and forgotten == ["key"]


@pytest.mark.parametrize(
    "seen",
    [
        [Vital("sleeping", 3.0)] * 9,  # it waits for its actors, however long
        [Vital("unknown")] * 9,  # its node does not answer: Ray's to notice
        [Vital("disk-sleep", float(at)) for at in range(9)],  # it writes much
        [Vital("stopped", 3.0), Vital("sleeping", 3.0)] * 4,  # it was let go each time
    ],
)
def test_process_of_a_trial_that_may_move_on_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, seen: list[Vital]
) -> None:
    assert looked_at(monkeypatch, seen) == ([], [], [])


def test_process_of_a_trial_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, [Vital("gone"), Vital("stopped")]) == ([], [], ["key"])


@pytest.mark.ray
@pytest.mark.full
def test_trial_whose_process_is_stopped_is_begun_again_to_the_same_bits(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        "sweep.seeds=[0,1]",
        "sweep.concurrent=1",
        "rounds=30",
        "local.steps=20",
        "checkpoint.every=4",
    )
    stopped: list[int] = []
    look = Looks.look

    def stopping(self: Looks) -> None:
        here = trial_watch.announced(self._label)
        checkpoint = tmp_path / "stopped/runs/ifca-seed0/checkpoints/round-000004"
        if here and not stopped and checkpoint.exists():
            (member,) = here.values()
            os.kill(member.pid, signal.SIGSTOP)
            stopped.append(member.pid)
        look(self)

    monkeypatch.setattr(Looks, "look", stopping)
    patience = ("fleet.patience=1", "fleet.restarts=3")
    run_sweep(sweep_of(tmp_path, *settings, *patience), str(tmp_path / "stopped"))
    assert len(stopped) == 1 and {row.status for row in rows_of(tmp_path / "stopped").values()} == {
        "finished"
    }
    said = capsys.readouterr().out
    assert f"(pid {stopped[0]} on node" in said and "was ended" in said
    assert "resumes from its last checkpoint" in said
    whole = sweep_of(tmp_path, *settings, "fleet.backend=in_process")
    assert_equal_sweeps(tmp_path / "stopped", run_sweep(whole, str(tmp_path / "whole"), quiet=True))
