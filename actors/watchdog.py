"""A watchdog on every call of an actor: who is late is named, and ended if it does not move on.

An actor is late when a stage takes longer than the limit: `fleet.patience`, or several times the median of what this
stage took before. One line then names the actor, its process and its node. After a second limit it is ended, and what
it held is a loss like any other (`actors/recovery.py`), unless its process used the processor in between: one that
computes is given more time, and for ever where nobody knows yet what the stage takes. Stages that move states or
samples (start, load, restore, copy) depend on disks and networks: nobody is ended in them before
`fleet.start_patience`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.ray_errors import ActorsLost

FACTOR = 5.0  # times the median of a stage
SLOW = 600.0  # seconds: `fleet.start_patience`, where nobody says otherwise
UNKNOWN = 3  # limits after which one that computes is named too, in a stage that nobody has measured
COMPUTING = 10  # limits for one whose process computes
IDLE = 0.01  # share of a processor below which a process does not compute
KNOWN = 50  # durations of a stage that the median is of
PROBE = 30.0  # seconds within which a node answers about a process

SERVER = "server"  # what calls of the server are keyed by; those of client actors by their number

_log = logging.getLogger("archipelago")


@dataclass(frozen=True)
class Member:
    """An actor as a line names it, and where to look for its process."""

    actor: Any
    name: str
    pid: int = 0  # 0: not known yet
    node: str = ""
    host: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return self.name
        return f"{self.name} (pid {self.pid} on node {self.host or 'unknown'}, {self.node[:8]})"


@dataclass(frozen=True)
class Vital:
    """What a node says about a process."""

    status: str  # as psutil names it; "gone", or "unknown" where the node did not answer
    seconds: float = 0.0  # of processor time so far

    def computed_since(self, before: Vital | None, seconds: float) -> bool:
        """Whether the process computes: now, or for some time in these seconds.

        >>> Vital("sleeping", 9.0).computed_since(Vital("sleeping", 3.0), 10.0)
        True
        >>> Vital("running").computed_since(None, 1.0), Vital("stopped", 9.0).computed_since(Vital("running"), 10.0)
        (True, False)
        """
        if self.status in ("stopped", "gone"):
            return False
        used = 0.0 if before is None else self.seconds - before.seconds
        # A node that is too busy to answer may have a busy process; one that is gone is Ray's to notice.
        return self.status in ("running", "unknown") or used > IDLE * seconds


def say_in_log(line: str) -> None:
    """Where a line goes that nobody listens to."""
    _log.warning(line)


@dataclass
class _Wait:
    """One stage that is waited for."""

    stage: str
    limit: float
    slow: float  # seconds before which nobody is ended
    took: Sequence[float] | None  # what it took before; empty or None: nobody knows
    passed: int = 0  # limits
    seen: dict[Any, Vital] = field(default_factory=dict)
    named: set[Any] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """Since the calls."""
        return self.passed * self.limit

    def line(self, member: Member, now: Vital) -> str:
        """Who is late, and how."""
        known = f", where {statistics.median(self.took):.2g} s is usual" if self.took else ""
        return f"{member} is late: '{self.stage}' has taken {self.seconds:.3g} s{known}; its process is {now.status}."


class Watchdog:
    """Waits for actors. `patience`: the least limit in seconds, `slow`: of slow stages; `say` is told who is late."""

    def __init__(
        self,
        patience: float,
        members: Mapping[Any, Member],
        say: Callable[[str], None] = say_in_log,
        slow: float = SLOW,
    ) -> None:
        self.patience, self.slow, self.members, self.say = patience, slow, dict(members), say
        self._took: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KNOWN))

    def limit(self, stage: str) -> float:
        """Seconds after which somebody is late."""
        took = self._took.get(stage)
        return max(self.patience, FACTOR * statistics.median(took)) if took else self.patience

    def get(
        self,
        calls: Mapping[Any, Any],
        stage: str,
        *,
        anybody: bool = False,
        slow: bool = False,
        steady: bool = True,
    ) -> list[Any]:
        """What the calls return, {member: reference}, in their order; `ActorsLost` if one does not come back.

        `anybody`: not only those who were called may be late, for they wait for each other's results. `slow`: who is
        late is named, and not ended before `self.slow` seconds; then whoever does not answer, for some wait for what
        others send. `steady=False`: what it took before says nothing about now.
        """
        import ray

        references, limit, began = list(calls.values()), self.limit(stage), time.monotonic()
        wait = _Wait(stage, limit, self.slow if slow else 0.0, self._took.get(stage))
        while True:
            try:
                # All at once: the first failure surfaces instead of waiting behind a healthy actor.
                found = ray.get(references, timeout=limit)
                if steady:
                    self._took[stage].append(time.monotonic() - began)
                return found
            except ray.exceptions.GetTimeoutError:
                wait.passed += 1
            late = _unanswered(calls)
            if anybody or (slow and wait.seconds >= wait.slow):
                late = self._silent() or (late if slow else [])
            for key in late:
                if key in self.members:
                    self._late(key, self.members[key], wait)

    def _late(self, key: Any, member: Member, wait: _Wait) -> None:
        """Say it once, where it is no wonder; end the actor when its time is over."""
        now, before = vital(member), wait.seen.get(key)
        wait.seen[key] = now
        computes = now.computed_since(before, wait.limit)
        if key not in wait.named:
            # A stage that nobody has measured may take long: only one that does nothing is late.
            idle = not computes and (before is not None or now.status == "stopped")
            if wait.took or idle or wait.passed >= UNKNOWN:
                wait.named.add(key)
                self.say(wait.line(member, now))
            return
        patient = COMPUTING * max(wait.slow, wait.limit)
        if wait.seconds < wait.slow or (
            computes and (wait.seconds < patient or not (wait.took or wait.slow))
        ):
            return
        end(member)
        why = f"computed for {wait.seconds:.3g} s" if computes else f"was {now.status} and did not move on"
        raise ActorsLost(f"{member}: in '{wait.stage}' its process {why}, and was ended")

    def _silent(self) -> list[Any]:
        """Members that do not answer a call which nothing stands before."""
        import ray

        clients = {key: member for key, member in self.members.items() if key != SERVER}
        ask = ray.remote(num_cpus=0, max_retries=0)(unanswering)
        actors = [member.actor for member in clients.values()]
        try:
            silent = ray.get(ask.remote(actors, min(self.patience, PROBE)), timeout=PROBE + self.patience)
        except ray.exceptions.RayError:
            return []
        return [list(clients)[at] for at in silent]

    def follow(self, reference: Any, ask: Callable[[int], Any]) -> Any:
        """What a call of the server returns. `ask` calls it beside: it answers with lines, from a number on.

        Whether clients are late is the server's affair; a server that does not answer any more is late itself.
        """
        import ray

        member, pause = self.members[SERVER], min(self.patience / 4, 5.0)
        heard, lines = time.monotonic(), 0
        seen: Vital | None = None  # when it was named
        while True:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                return ray.get(reference, timeout=pause)
            try:
                told = ray.get(ask(lines), timeout=pause)
                heard, seen, lines = time.monotonic(), None, lines + len(told)
                for line in told:
                    self.say(line)
            except ray.exceptions.GetTimeoutError:
                silent = time.monotonic() - heard
                if silent <= (self.patience if seen is None else 2 * self.patience):
                    continue
                now = vital(member)
                if seen is None:
                    seen = now
                    self.say(
                        f"{member} is late: it has not answered for {silent:.3g} s; its process is {now.status}."
                    )
                elif silent > COMPUTING * self.patience or not now.computed_since(seen, self.patience):
                    end(member)
                    raise ActorsLost(
                        f"{member}: it did not answer for {silent:.3g} s, and was ended"
                    ) from None


def _unanswered(calls: Mapping[Any, Any]) -> list[Any]:
    import ray

    references = list(calls.values())
    _, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
    open_calls = set(waiting)
    return [key for key, reference in calls.items() if reference in open_calls]


def vital(member: Member) -> Vital:
    """How the process of a member is, as a task on its node sees it."""
    return on_node(look_at, member, Vital("unknown"))


def end(member: Member) -> None:
    """End an actor whatever it does: Ray asks its process, which a stopped one does not hear."""
    import ray

    on_node(kill, member, None)
    with contextlib.suppress(Exception):  # gone already
        ray.kill(member.actor)


def on_node(function: Callable[[int], Any], member: Member, otherwise: Any) -> Any:
    """What a function of a process id returns on the node of a member; `otherwise` if that does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not member.pid:
        return otherwise
    there = NodeAffinitySchedulingStrategy(member.node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        return ray.get(task.remote(member.pid), timeout=PROBE)
    except ray.exceptions.RayError:  # the node is gone, or does not answer
        return otherwise


def look_at(pid: int) -> Vital:
    """A process of this node."""
    import psutil

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return Vital(process.status(), times.user + times.system)
    except psutil.Error:
        return Vital("gone")


def kill(pid: int) -> None:
    """End a process of this node at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def unanswering(actors: Sequence[Any], seconds: float) -> list[int]:
    """Which of some actors do not answer within seconds, asked by a process that has no other calls open there."""
    import ray

    answers = [actor.whereabouts.remote() for actor in actors]
    ray.wait(answers, num_returns=len(answers), timeout=seconds, fetch_local=False)
    _, silent = ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)
    waiting = set(silent)
    return [at for at, answer in enumerate(answers) if answer in waiting]
