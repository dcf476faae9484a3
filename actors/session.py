"""A session on a Ray cluster: a server and its clients, alive, made by the driver (an actor dies with its creator).

What is lost is rebuilt from what the others hold (`actors/recovery.py`), or from the last checkpoint. What sessions are
made of is in `actors/plan.py`, the session of one process in `actors/in_process.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors import growth, recovery, reservation
from actors.client_states import State
from actors.compute import BlockDevice, Compute, compute_of, without_gpu
from actors.homes import Home
from actors.in_process import InProcessSession
from actors.placement import gpus_of, layout, wanted_actors
from actors.plan import Checkpoint, Mended, Place, Plan, Session, Snapshot
from actors.ray_errors import ActorsLost, SurfacedErrors
from actors.rebalancing import Rebalancing
from actors.reports import RoundReport
from actors.server_setup import ServerSetup
from actors.shards import ActorShard, states_of
from actors.starting import Starting
from actors.team import Team
from actors.watchdog import SERVER, Member, Watchdog, say_in_log
from archipelago.core.errors import UserError
from archipelago.runs.checkpoints import StoredParts

__all__ = [
    "ActorsLost", "Checkpoint", "InProcessSession", "Mended", "Place", "Plan", "RaySession", "Session", "Snapshot",
]  # fmt: skip


class RaySession:
    """A ServerActor and ClientActors in one placement group.

    `shrink` (after a loss, or to resume) takes what the cluster has now, fewer actors if need be, instead of
    refusing. `wait` is for how many seconds a cluster is given to have capacity (default: `fleet.wait`). `place` is a
    group that is there already: it is used as it is, and outlives the session. `say` is told what a user should know
    while others work: somebody is late, nodes are waited for.
    """

    _held = 0  # number of the last snapshot
    _whole = True  # every client is where `layout` says
    _rebalancing: Rebalancing | None = None  # None: clients stay where they are

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint | None = None,
        *,
        shrink: bool = False,
        data: tuple[Any, Any] | None = None,
        wait: float | None = None,
        place: Place | None = None,
        say: Callable[[str], None] = say_in_log,
    ) -> None:
        import ray

        self.say, self._thread = say, threading.get_ident()
        self.groups: list[Any] = []  # that this session made
        self.homes: list[Home] = []  # of the client actors
        self.layout: list[list[int]] = []
        self.clients: list[Any] = []
        self.server: Any = None
        self.devices: list[BlockDevice] = []
        self.members: dict[Any, Member] = {}
        self.asked: dict[str, Any] = {}  # where actors are that start: {name: reference}
        self.epoch = 0
        self._engines: set[str] = set()  # that trained
        try:
            if place is not None:
                count, sized, self._idle = min(place.actors, len(plan.clients)), plan.sized([]), ""
                homes = [Home(place.group, place.first + b) for b in range(count)]
            else:
                reserved = reservation.reserve(plan, shrink, wait, self._tell)
                self.groups.append(reserved.group)
                count, sized, self._idle = reserved.actors, reserved.fleet, reserved.idle
                homes = [Home(reserved.group, b) for b in range(count)]
            self.gpus = gpus_of(sized)
            self.plan = dataclasses.replace(
                plan, gpus=self.gpus, block=dataclasses.replace(plan.block, gpus=self.gpus)
            )
            self.layout = layout(self.plan.costs(), count, plan.fleet.clients_per_actor)
            self.watchdog = Watchdog(plan.fleet.patience, self.members, self._tell, plan.fleet.start_patience)
            wanted = wanted_actors(plan.fleet, len(plan.clients)) or plan.actors or count
            self.growth = growth.Growth(self, homes, count if place is not None else wanted)
            if count > 1 and plan.fleet.clients_per_actor is None:
                self._rebalancing = Rebalancing(self.plan)
            self.data = data or (ray.put(plan.x), ray.put(plan.y))
            self._start(homes, checkpoint)
        except BaseException:
            self.close()
            raise

    def _tell(self, line: str) -> None:
        """Listeners are called by the driver's own thread alone: a checkpoint is written in another one."""
        (self.say if threading.get_ident() == self._thread else say_in_log)(line)

    @property
    def actors(self) -> int:
        """Blocks of clients."""
        return len(self.layout)

    # --- bringing actors to life --------------------------------------------------------------------------

    def _start(self, homes: Sequence[Home], checkpoint: Checkpoint | None) -> None:
        """Bring the actors to life, all at the same time: most of it is imports."""
        with SurfacedErrors():
            starting = [self.make_client(home, block) for home, block in zip(homes, self.layout, strict=True)]
            self.make_server(homes[0])
            self.when_started(starting)
            self.go_back(checkpoint, checkpoint.round if checkpoint else 0)

    def new_client(self, home: Home, block: Sequence[int], number: int) -> tuple[Member, Any]:
        """A client actor for these clients, and the reference to its start; it is not among `clients` yet."""
        from actors.ray_actors import ClientActor

        name = reservation.unique(f"{self.plan.title}/clients-{number}")
        actor = ClientActor.options(  # type: ignore[attr-defined]
            num_cpus=self.plan.fleet.cpus, num_gpus=self.gpus, **home.options(name)
        ).remote()
        self.asked[name] = actor.whereabouts.remote()  # before it is busy with its start
        return Member(actor, name), actor.start.remote(self.plan.block, self.samples_of(block), *self.data)

    def add_client(self, home: Home, member: Member) -> None:
        """One more of `clients`."""
        self.members[len(self.clients)] = member
        self.clients.append(member.actor)
        self.homes.append(home)

    def make_client(self, home: Home, block: Sequence[int]) -> Any:
        """Add a client actor for these clients; returns the reference to its start."""
        member, started = self.new_client(home, block, len(self.clients))
        self.add_client(home, member)
        return started

    def make_server(self, home: Home) -> None:
        """A new server, without a state; it computes little, between the clients' calls: it needs no CPU of its own."""
        from actors.ray_actors import ServerActor

        name = reservation.unique(f"{self.plan.title}/server")
        self.server = ServerActor.options(num_cpus=0, **home.options(name)).remote()  # type: ignore[attr-defined]
        self.members[SERVER] = Member(self.server, name)

    def samples_of(self, block: Sequence[int]) -> dict[int, Any]:
        """The samples of some clients."""
        return {client: self.plan.clients[client] for client in block}

    def when_started(self, starting: Sequence[Any]) -> None:
        """Wait for actors, the last ones of `clients`, with a watchdog (`actors/starting.py`)."""
        first = len(self.clients) - len(starting)
        self.devices[first:] = Starting(self, first, starting).wait()
        self.watchdog.members = self.members
        self._find([*range(first, len(self.clients))])

    def _find(self, keys: Sequence[Any]) -> None:
        """Where actors run, for the lines that name them."""
        import ray

        found = ray.get([self.members[key].actor.whereabouts.remote() for key in keys])
        for key, where in zip(keys, found, strict=True):
            self.members[key] = replace(self.members[key], **where)

    # --- one state for all of them ------------------------------------------------------------------------

    def go_back(self, checkpoint: Checkpoint | None, round: int) -> None:
        """Everybody takes over the state of a checkpoint, or (None) begins with round 1."""
        import ray

        with SurfacedErrors():
            if checkpoint is not None:
                self._restore(checkpoint.clients)
            else:
                empty = [actor.call.remote("restore", ({},)) for actor in self.clients]
                self.wait(dict(enumerate(empty)), "restore")
            state = ray.put(checkpoint.server) if checkpoint else None
            team = self.assemble(round)
            started = self.server.start.remote(
                self.plan.server, self.clients, self.layout, state, team, round
            )
            self.wait({SERVER: started}, "start", slow=True)
            self.copy_all(round)

    def assemble(self, round: int) -> Team:
        """Everybody who is here now is at this round, and a server that was there before is not heard any more."""
        self._find([SERVER])
        self.epoch += 1
        clients = tuple(self.members[b] for b in range(len(self.clients)))
        self.members = {**dict(enumerate(clients)), SERVER: self.members[SERVER]}
        fleet = self.plan.fleet
        team = Team(clients, self.members[SERVER], fleet.patience, self.epoch, fleet.copies)
        self.watchdog.members = self.members
        stand = {b: a.stand.remote(round, self.epoch) for b, a in enumerate(self.clients)}
        self.wait(stand, "stand")
        self.team = team
        return team

    def copy_all(self, round: int) -> None:
        """Everybody's committed state goes to the neighbour that holds its copy."""
        if not self.team.copies:
            return
        sent: dict[Any, Any] = {}
        for b, there in enumerate(self.team.neighbours):
            holder = self.members[SERVER if there < 0 else there].actor
            sent[b] = holder.hold.remote(self.members[b].name, round, self.clients[b].whole.remote())
        holder = self.clients[self.team.holds_server]
        sent[SERVER] = holder.hold.remote(self.members[SERVER].name, round, self.server.whole.remote())
        self.wait(sent, "copy", slow=True)
        names = self.team.names
        self.wait({key: member.actor.only.remote(names) for key, member in self.members.items()}, "copy")

    def wait(
        self, calls: Mapping[Any, Any], stage: str, *, slow: bool = False, steady: bool = True
    ) -> list[Any]:
        """What actors return, with a watchdog (`Watchdog.get`)."""
        with SurfacedErrors():
            return self.watchdog.get(calls, stage, slow=slow, steady=steady)

    @contextlib.contextmanager
    def rearranging(self) -> Iterator[None]:
        """Clients go to other actors: a loss in the middle of it leaves nobody who knows who has whom."""
        self._whole = False
        yield
        self._whole = True

    def _restore(self, clients: Mapping[int, State] | StoredParts) -> None:
        """Actors read their clients' states where they see the checkpoint; the others get them, block by block."""
        done = [False] * len(self.clients)
        if isinstance(clients, StoredParts):
            folder = str(clients.path.absolute())
            pairs = enumerate(zip(self.clients, self.layout, strict=True))
            done = self.wait(
                {
                    b: actor.load.remote(folder, clients.manifest, clients.shards_of(block))
                    for b, (actor, block) in pairs
                },
                "load",
                slow=True,
            )
        for b, has in enumerate(done):
            if not has:
                states = states_of(clients, self.layout[b])
                self.wait({b: self.clients[b].call.remote("restore", (states,))}, "restore", slow=True)

    # --- rounds -------------------------------------------------------------------------------------------

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        with SurfacedErrors():
            grown = self.growth.between_rounds(round - 1)
            running = self.server.run_round.remote(round)
            report: RoundReport = self.watchdog.follow(running, self.server.progress.remote)
            self._engines |= report.engines
            if self._rebalancing is not None:
                report = self._rebalanced(report, self._rebalancing)
            return replace(report, events=[grown, *report.events]) if grown else report

    def _rebalanced(self, report: RoundReport, rebalancing: Rebalancing) -> RoundReport:
        """In the first rounds: what each actor took, and then the one move that follows."""
        seconds = self.wait({b: actor.spent.remote() for b, actor in enumerate(self.clients)}, "spent")
        found = rebalancing.measured(report.round, self.layout, seconds)
        if rebalancing.over:
            self._rebalancing = None
        if found is None:
            return report
        layout, share = found
        with self.rearranging():
            moved = self.move(layout)
            self.wait({SERVER: self.server.move.remote(layout)}, "move")
            self.copy_all(report.round)
        text = (
            f"Moved {moved} of {len(self.plan.clients)} clients to other actors, as measured: a round is expected to "
            f"take {share:.0%} of the time."
        )
        return replace(report, events=[*report.events, text])

    def move(
        self, layout: list[list[int]], sources: Mapping[int, Callable[[list[int]], Any]] | None = None
    ) -> int:
        """Give clients, with their states, to the actors of another layout; returns how many moved.

        `sources`: for each block that there was, who gives the states of some of its clients (default: its actor).
        """
        give = sources or {b: actor.give.remote for b, actor in enumerate(self.clients)}
        home = {client: b for b, block in enumerate(layout) for client in block}
        arriving: list[list[Any]] = [[] for _ in layout]
        moved = 0
        for b, block in enumerate(self.layout):
            for there in sorted({home[client] for client in block} - ({b} if sources is None else set())):
                leaving = [client for client in block if home[client] == there]
                arriving[there].append(give[b](leaving))  # from actor to actor
                moved += len(leaving)
        calls = {
            b: actor.take.remote(self.samples_of(block), *states)
            for b, (actor, block, states) in enumerate(zip(self.clients, layout, arriving, strict=True))
        }
        self.wait(calls, "move", slow=True)
        self.layout = layout
        return moved

    def mend(self, done: int) -> Mended | None:
        """After a loss, with `done` rounds reported: rebuild what was lost from what the others hold."""
        self._rebalancing = None  # what was measured is of another fleet
        if not self._whole:
            raise ActorsLost("an actor was lost while clients moved")
        try:
            with SurfacedErrors():
                return recovery.mend(self, done)
        except UserError as error:
            raise ActorsLost(f"no capacity to continue: {error}") from error

    # --- what the driver asks for -------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The server's state now; the actors hold on to their clients' until they are written or asked for."""
        self._held += 1
        holding = {b: actor.shard.remote("hold", self._held) for b, actor in enumerate(self.clients)}
        server, *_ = self.wait({SERVER: self.server.state.remote(), **holding}, "snapshot")
        shards = [ActorShard(actor, self._held, self.wait, b) for b, actor in enumerate(self.clients)]
        return Snapshot(lambda: server, shards)

    def models(self) -> dict[str, Any]:
        """The server's models."""
        found: dict[str, Any] = self.wait({SERVER: self.server.models.remote()}, "models")[0]
        return found

    def spec(self) -> Any:
        """The layout of a model's values."""
        return self.wait({SERVER: self.server.spec.remote()}, "spec")[0]

    def describe(self) -> str:
        """One line."""
        sizes = [len(block) for block in self.layout]
        spread = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        actors = f"{len(sizes)} Ray actor{'' if len(sizes) == 1 else 's'}"
        return f"{sum(sizes)} clients on {actors} ({spread} each): {self.compute().sentence}"

    def compute(self) -> Compute:
        """What the clients compute on."""
        return compute_of(self.devices, self.gpus, self.plan.block.precision, self._idle, self._engines)

    def begin_again(self, setup: ServerSetup) -> None:
        """Another experiment on the same clients, from round 1: no client remembers anything."""
        self.plan = dataclasses.replace(self.plan, server=setup)
        self.go_back(None, 0)

    def shortfall(self) -> str:
        """Actors with a GPU that torch cannot use."""
        return without_gpu(self.devices, self.gpus)

    def close(self) -> None:
        """End the actors and give the resources back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        for actor in [*self.clients, *([self.server] if self.server is not None else [])]:
            with contextlib.suppress(Exception):  # gone already: the others and the group still have to go
                ray.kill(actor)
        for group in self.groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self.clients, self.server, self.groups = [], None, []
