"""A fleet that has fewer actors than it began with grows back when nodes return."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from actors.homes import Home, with_nodes
from actors.placement import bundle_of, layout
from actors.watchdog import SERVER, Member

if TYPE_CHECKING:
    from actors.session import RaySession

PAUSE = 5.0  # seconds between two looks at the cluster


class Growth:
    """Looks between rounds whether an actor can be added; it starts while rounds go on, and joins when it is ready.

    Ray itself looks for nodes for the bundles of a placement group that lost theirs. A session that began with fewer
    actors than were `wanted` asks for the others with groups of one bundle each, which also tells an autoscaler.
    """

    def __init__(self, session: RaySession, homes: Sequence[Home], wanted: int) -> None:
        self._session, self._homes = session, list(homes)
        self._wanted = min(wanted, len(session.plan.clients))
        self._asked = len(self._homes) >= self._wanted
        self._looked = time.monotonic()
        self._joining: list[tuple[Home, Member, Any]] = []  # who starts, and the reference to that
        self._layout: list[list[int]] = []  # when they have joined

    def lost(self, count: int) -> None:
        """So many actors are gone for now."""
        for _, member, _ in self._joining:
            _end(member.actor)
        self._joining = []
        if count:
            self._looked = time.monotonic()

    def between_rounds(self, done: int) -> str:
        """Add what can be added; returns a sentence if actors have joined."""
        session = self._session
        if len(session.clients) >= self._wanted:
            return ""
        if self._joining:
            return self._join(done)
        if time.monotonic() - self._looked >= PAUSE:
            self._looked = time.monotonic()
            self._begin()
        return ""

    def _begin(self) -> None:
        """Start actors where bundles have nodes."""
        session = self._session
        if not self._asked:
            self._asked = True
            self._ask_for_more()
        free = with_nodes([home for home in self._homes if home not in session.homes])
        count = len(session.clients)
        self._layout = layout(session.plan.costs(), count + len(free), session.plan.fleet.clients_per_actor)
        for number, home in enumerate(free, start=count):
            self._joining.append((home, *session.new_client(home, self._layout[number], number)))

    def _ask_for_more(self) -> None:
        from ray.util.placement_group import placement_group

        from actors.reservation import unique

        session = self._session
        bundle = bundle_of(session.plan.sized([]))
        for _ in range(self._wanted - len(self._homes)):
            group = placement_group([bundle], name=unique(f"{session.plan.title}/more"))
            session.groups.append(group)
            self._homes.append(Home(group, 0))

    def _join(self, done: int) -> str:
        """Once their processes are up: everybody's clients anew, and one team."""
        import ray

        references = [reference for _, _, reference in self._joining]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        if len(ready) < len(references):
            if not {home for home, _, _ in self._joining} <= {*with_nodes(self._homes)}:
                self.lost(1)  # the node went away again
            return ""
        joining, self._joining = self._joining, []
        session = self._session
        with session.rearranging():
            for home, member, _ in joining:
                session.add_client(home, member)
                session.layout.append([])
            session.when_started(references)
            session.move(self._layout)
            team = session.assemble(done)
            call = session.server.carry_on.remote(session.clients, session.layout, team, done)
            session.wait({SERVER: call}, "carry on", slow=True)
            session.copy_all(done)
        return f"Nodes are back: {session.describe()}."


def _end(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor)
