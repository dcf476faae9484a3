"""Who is late, who is named, who is ended: the decisions of the watchdog, without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors import watchdog
from actors.ray_errors import ActorsLost
from actors.watchdog import COMPUTING, FACTOR, Member, Vital, Watchdog


class Waits:
    """A call of actor 1 that is answered after some limits; its process is as `vitals` say, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answered: int, vitals: list[Vital]) -> None:
        self.limits: list[float] = []
        self.ended: list[str] = []
        self.lines: list[str] = []
        self._answered, self._vitals = answered, vitals
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(watchdog, "_unanswered", lambda calls: [1])
        monkeypatch.setattr(watchdog, "vital", lambda member: vitals.pop(0) if len(vitals) > 1 else vitals[0])
        monkeypatch.setattr(watchdog, "end", lambda member: self.ended.append(member.name))
        members = {
            0: Member(None, "run/clients-0"),
            1: Member(None, "run/clients-1", 7, "abcdef0123", "10.0.0.5"),
        }
        self.dog = Watchdog(60.0, members, self.lines.append)

    def _get(self, references: Any, timeout: float) -> Any:
        if len(self.limits) >= self._answered:
            return references
        self.limits.append(timeout)
        raise ray.exceptions.GetTimeoutError

    def get(self, *usual: float, **options: Any) -> Any:
        self.dog._took["train"].extend(usual)
        return self.dog.get({0: "a", 1: "b"}, "train", **options)


def computing() -> list[Vital]:
    return [Vital("sleeping", 30.0 * at) for at in range(100)]


def test_limit_is_the_patience_or_some_medians_of_the_stage() -> None:
    dog = Watchdog(60.0, {})
    assert dog.limit("train") == 60.0
    dog._took["train"].extend([1.0, 100.0, 40.0])
    assert dog.limit("train") == FACTOR * 40.0 and dog.limit("evaluate") == 60.0


def test_who_comes_back_in_time_is_not_mentioned_and_its_seconds_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch, 0, [Vital("running")])
    assert waits.get() == ["a", "b"] and not waits.lines and len(waits.dog._took["train"]) == 1
    waits.get(steady=False)
    assert len(waits.dog._took["train"]) == 1


def test_one_that_is_stopped_is_named_with_process_and_node_and_ended_after_a_second_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch, 99, [Vital("stopped", 5.0)])
    with pytest.raises(ActorsLost, match=r"run/clients-1 \(pid 7 on node 10\.0\.0\.5, abcdef01\)"):
        waits.get(2.0)
    assert waits.limits == [60.0, 60.0] and waits.ended == ["run/clients-1"]
    assert waits.lines == [
        "run/clients-1 (pid 7 on node 10.0.0.5, abcdef01) is late: 'train' has taken 60 s, where 2 s is usual; its "
        "process is stopped."
    ]


def test_one_that_sleeps_in_a_stage_that_nobody_measured_is_given_a_limit_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch, 99, [Vital("disk-sleep", 5.0)])
    with pytest.raises(ActorsLost, match="was disk-sleep and did not move on"):
        waits.get()
    assert len(waits.limits) == 3 and len(waits.lines) == 1


def test_one_that_computes_in_a_stage_that_nobody_measured_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch, 50, computing())
    assert waits.get() == ["a", "b"] and not waits.ended
    assert len(waits.lines) <= 1  # nothing is known of it at the first look


def test_one_that_computes_far_longer_than_usual_is_ended_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch, 99, computing())
    with pytest.raises(ActorsLost, match="computed for"):
        waits.get(1.0)
    assert len(waits.limits) == COMPUTING and len(waits.lines) == 1
    assert Waits(monkeypatch, COMPUTING - 1, computing()).get(1.0) == ["a", "b"]


def test_one_that_computes_in_a_stage_that_nobody_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch, 20, [Vital("running", 60.0 * at) for at in range(100)])
    assert waits.get() == ["a", "b"] and not waits.ended
    assert len(waits.lines) == 1 and "'train' has taken 180 s; its process is running" in waits.lines[0]


@pytest.mark.parametrize("silent", [[], [0]])
def test_one_in_a_slow_stage_is_named_at_once_and_ended_later(
    monkeypatch: pytest.MonkeyPatch, silent: list[int]
) -> None:
    waits = Waits(monkeypatch, 9, [Vital("stopped")])
    monkeypatch.setattr(waits.dog, "_silent", lambda: silent)
    assert waits.get(1.0, slow=True) == ["a", "b"] and not waits.ended and len(waits.lines) == 1
    waits = Waits(monkeypatch, 99, [Vital("stopped")])
    monkeypatch.setattr(waits.dog, "_silent", lambda: silent)
    with pytest.raises(ActorsLost, match="was stopped and did not move on"):
        waits.get(1.0, slow=True)
    # 600 s; another one that does not answer, and that the called one waits for, is named first
    assert len(waits.limits) == (11 if silent else 10)
    assert waits.ended == ["run/clients-0" if silent else "run/clients-1"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    yield now


@pytest.mark.parametrize(("answers", "status"), [(True, ""), (False, "stopped"), (False, "running")])
def test_server_that_answers_is_busy_and_one_that_does_not_is_late(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], answers: bool, status: str
) -> None:
    lines: list[str] = []
    ended: list[str] = []

    def get(reference: Any, timeout: float) -> Any:
        clock[0] += timeout
        if reference == "progress" and answers:
            return ["somebody is late"] if clock[0] > 100 and not lines else []
        if reference == "round" and clock[0] > 1000:
            return "report"
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(watchdog, "vital", lambda member: Vital(status))
    monkeypatch.setattr(watchdog, "end", lambda member: ended.append(member.name))
    dog = Watchdog(60.0, {watchdog.SERVER: Member(None, "run/server", 9)}, lines.append)
    if answers:
        assert dog.follow("round", lambda since: "progress") == "report"
        assert lines == ["somebody is late"] and not ended
        return
    with pytest.raises(ActorsLost, match="did not answer"):
        dog.follow("round", lambda since: "progress")
    limits = 2 if status == "stopped" else COMPUTING
    assert ended == ["run/server"] and len(lines) == 1 and status in lines[0]
    assert 60 * limits < clock[0] < 60 * limits + 20
