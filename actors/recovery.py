"""After a loss: who is left, which round was decided, and what was lost is rebuilt from the copies of the others.

Processes first. A lost actor is started again in its bundle of the placement group; where that has no node any more,
its clients go to the actors that are left. Then states (`actors/copies.py`): a round that somebody has committed was
decided, and everybody takes it over; one that nobody has committed is run again. Healthy actors keep their processes
and their states. If a member and the copy of it are both gone, everybody goes back to the last checkpoint.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from actors.homes import Home, wait_for_nodes
from actors.placement import layout
from actors.plan import Mended
from actors.ray_errors import ActorsLost, SurfacedErrors
from actors.watchdog import SERVER

if TYPE_CHECKING:
    from actors.session import RaySession

ATTEMPTS = 3  # at starting what was lost
PATIENCE = 10.0  # seconds that a lost node is given to be replaced before the others take its clients


class _Standings:
    """What the members that are left say: committed rounds, and those of the copies that they hold."""

    def __init__(self, session: RaySession) -> None:
        asked = {key: member.actor.standing.remote() for key, member in session.members.items()}
        self.said: dict[Any, dict[str, Any]] = {}
        self.why = ""
        for key, reference in asked.items():
            try:
                # A healthy one may be at work for a round that is lost: it is waited for as long as it computes.
                self.said[key] = session.wait({key: reference}, "standing", steady=False)[0]
            except ActorsLost as error:
                self.why = str(error)
        self.names = {key: member.name for key, member in session.members.items()}
        self.lost = [key for key in session.members if key not in self.said]

    def holder(self, key: Any, round: int) -> Any:
        """Who holds a copy of a lost member as of this round, perhaps as one that waits for it; None: nobody."""
        for other, said in self.said.items():
            if round in said["copies"].get(self.names[key], ()):
                return other
        return None

    def decided(self, done: int) -> int | None:
        """The round that everybody can be at: `done`, or the next one if somebody committed it. None: there is none."""
        rounds = [said["round"] for said in self.said.values()]
        for key in self.lost:
            rounds += [said["copies"][self.names[key]][0] for said in self.said.values()
                       if self.names[key] in said["copies"]]  # fmt: skip
        round = max(rounds, default=-1)
        whole = done <= round <= done + 1 and min(rounds) >= round - 1
        return round if whole and all(self.holder(key, round) is not None for key in self.lost) else None


def mend(session: RaySession, done: int) -> Mended | None:
    """Rebuild what is lost; None if states are missing: processes are there, and wait for a checkpoint."""
    standings = _Standings(session)
    left = [b for b in range(len(session.clients)) if b not in standings.lost]
    if not left and SERVER in standings.lost:
        raise ActorsLost(f"nobody is left ({standings.why})")
    round = standings.decided(done) if session.plan.fleet.copies else None
    if round is not None:
        session.epoch += 1
        settled = {b: session.clients[b].settle.remote(round, session.epoch) for b in left}
        session.wait(settled, "settle")
        if SERVER not in standings.lost:
            session.wait({SERVER: session.server.settle.remote(round)}, "settle")
    report = _report(session, standings, round) if round == done + 1 else None
    _rebuild(session, standings, left, round)
    return None if round is None else Mended(round, report)


def _report(session: RaySession, standings: _Standings, round: int) -> Any:
    """The report of a round that was decided, and that the driver never got."""
    if SERVER not in standings.lost:
        return session.wait({SERVER: session.server.report.remote()}, "report")[0]
    holder = standings.holder(SERVER, round)
    call = session.clients[holder].report_in.remote(standings.names[SERVER])
    return session.wait({holder: call}, "report")[0]


def _rebuild(session: RaySession, standings: _Standings, left: list[int], round: int | None) -> None:
    """Processes for what is lost, the states of this round for all of them (None: of no round), and one team."""
    names, blocks = standings.names, session.layout
    copies: dict[Any, Any] = {}  # who holds what of the lost ones; actors, whatever their numbers will be
    if round is not None:
        copies = {key: session.members[standings.holder(key, round)].actor for key in standings.lost}
    lost = [b for b in standings.lost if b != SERVER]
    for key in standings.lost:
        _let_go(session.members[key].actor)
    old_clients = list(session.clients)
    usable, better = _start_again(session, left, lost, blocks, standings.why)
    if len(usable) != len(lost):
        _hand_over(session, better, old_clients, left, lost, names, copies)
    elif round is not None:
        arriving = {
            len(left) + at: session.clients[len(left) + at].receive.remote(
                copies[b].copy.remote(names[b], blocks[b])
            )
            for at, b in enumerate(lost)
        }
        session.wait(arriving, "receive", slow=True)
    if SERVER in standings.lost:
        session.make_server(session.homes[0])
    if round is not None:
        _carry_on(session, standings, round, copies)


def _start_again(
    session: RaySession, left: list[int], lost: list[int], blocks: list[list[int]], why: str
) -> tuple[list[Home], list[list[int]]]:
    """Start processes for lost blocks, behind those that are left; returns their homes, and a layout for fewer of them.

    Ray may believe in a node for a while after it is gone: then it is tried again without it.
    """
    clients, homes, devices = session.clients, session.homes, session.devices
    members, fleet = session.members, session.plan.fleet
    for _ in range(ATTEMPTS):
        usable = wait_for_nodes([homes[b] for b in lost], PATIENCE) if lost else []
        if not left and not usable:
            break
        session.clients, session.homes = [clients[b] for b in left], [homes[b] for b in left]
        session.devices = [devices[b] for b in left]
        session.members = {SERVER: members[SERVER], **{at: members[b] for at, b in enumerate(left)}}
        session.layout = [blocks[b] for b in [*left, *lost]]
        fewer = len(usable) < len(lost)
        better = layout(session.plan.costs(), len(left) + len(usable), fleet.clients_per_actor)
        fresh = better[len(left) :] if fewer else [blocks[b] for b in lost]
        try:
            with SurfacedErrors():
                started = [
                    session.make_client(home, block) for home, block in zip(usable, fresh, strict=True)
                ]
                session.when_started(started)
        except ActorsLost as error:
            why = str(error)
            for actor in session.clients[len(left) :]:
                _let_go(actor)
            continue
        session.growth.lost(len(lost) - len(usable))
        return usable, better
    raise ActorsLost(f"no node is left for the clients ({why})")


def _hand_over(
    session: RaySession,
    better: list[list[int]],
    old_clients: list[Any],
    left: list[int],
    lost: list[int],
    names: dict[Any, str],
    copies: dict[Any, Any],
) -> None:
    """Fewer actors than before: everybody's clients anew, with states from those who have them."""
    sources: dict[int, Any] = {}
    for at, b in enumerate([*left, *lost]):
        if not copies and b in lost:  # of no round: a checkpoint brings the states
            sources[at] = lambda clients: {}
        elif b in lost:
            sources[at] = lambda clients, b=b: copies[b].copy.remote(names[b], clients)
        else:
            sources[at] = old_clients[b].give.remote
    session.move(better, sources)


def _carry_on(session: RaySession, standings: _Standings, round: int, copies: dict[Any, Any]) -> None:
    """One team of those who were there and those who are new, and copies of everybody."""
    team = session.assemble(round)
    if SERVER in standings.lost:
        state = copies[SERVER].copy.remote(standings.names[SERVER])
        call = session.server.start.remote(
            session.plan.server, session.clients, session.layout, state, team, round
        )
    else:
        call = session.server.carry_on.remote(session.clients, session.layout, team, round)
    session.wait({SERVER: call}, "carry on", slow=True)
    session.copy_all(round)


def _let_go(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # it is gone
        ray.kill(actor)
