"""Waiting for client actors that start: who is late is named, who does not get on is ended, a lost node is a loss.

Nothing says how long a start takes: samples may come from far, and libraries from a slow disk. An actor is named after
`fleet.patience`, and ended after `fleet.start_patience` unless its process computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors import watchdog
from actors.homes import with_nodes
from actors.ray_errors import ActorsLost
from actors.watchdog import COMPUTING, Member, Vital

if TYPE_CHECKING:
    from actors.session import RaySession

LOOK = 2.0  # seconds between two looks at nodes and time


class Starting:
    """Actors of a session, from number `first` on, whose starts these references are."""

    def __init__(self, session: RaySession, first: int, references: Sequence[Any]) -> None:
        self._session, self._first, self._references = session, first, list(references)
        fleet = session.plan.fleet
        self._patience, self._limit = fleet.patience, max(fleet.patience, fleet.start_patience)
        self._began = time.monotonic()
        self._seen: dict[int, Vital] = {}  # how the processes of late ones were when they were named
        self._passed = 0  # limits

    def wait(self) -> list[Any]:
        """What the starts return; `ActorsLost` if a node goes away, or an actor does not start."""
        import ray

        waiting = self._references
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK, fetch_local=False)
            if waiting:
                self._refuse_lost_nodes()
                left = {*waiting}
                self._judge([at for at, each in enumerate(self._references) if each in left])
        return list(ray.get(self._references))

    def _refuse_lost_nodes(self) -> None:
        """An actor whose node is gone would be waited for for ever."""
        homes = self._session.homes[self._first :]
        missing = {*homes} - {*with_nodes(homes)}
        if missing:
            raise ActorsLost(f"a node went away while {len(missing)} actors were starting on it")

    def _judge(self, late: Sequence[int]) -> None:
        seconds = time.monotonic() - self._began
        if seconds < self._patience:
            return
        members = {at: self._member(at) for at in late}
        unseen = [at for at in late if at not in self._seen]
        for at in unseen:
            self._seen[at] = watchdog.vital(members[at])
        if unseen:
            said = ", ".join(f"{members[at]} ({self._seen[at].status})" for at in unseen)
            self._session._tell(f"Not started after {seconds:.0f} s: {said}.")
        if seconds < (self._passed + 1) * self._limit:
            return
        self._passed += 1
        for at, member in members.items():
            now, before = watchdog.vital(member), self._seen[at]
            self._seen[at] = now
            if member.pid and now.computed_since(before, self._limit) and self._passed < COMPUTING:
                continue
            watchdog.end(member)
            raise ActorsLost(f"{member}: it has not started after {seconds:.0f} s, and was ended")

    def _member(self, at: int) -> Member:
        """An actor, and where it is as far as it has said so: its process may not even have begun."""
        import ray

        member = self._session.members[self._first + at]
        asked = self._session.asked.get(member.name)
        if asked is None or not ray.wait([asked], timeout=0, fetch_local=False)[0]:
            return member
        return replace(member, **ray.get(asked))
