"""The Ray side: ClientActor, ServerActor, and the fleet that reaches clients through the object store."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray

import archipelago.core.torchvision_operators  # noqa: F401  (a plug-in is imported where what it brings is unpickled)
from actors.client_states import State
from actors.compute import BlockDevice, Committed
from actors.copies import SERVER, Copies
from actors.fleet import Fleet
from actors.reports import RoundReport
from actors.requests import BlockSetup, ClientSamples
from actors.server import Server
from actors.server_setup import ServerSetup
from actors.shards import HeldStates, read_where_it_is
from actors.team import Team
from actors.watchdog import Watchdog
from archipelago.strategies.parameters import PartialSums, add_sums

if TYPE_CHECKING:
    from actors.block import ClientBlock


def _place() -> dict[str, Any]:
    """The node and the placement group that this process was started in."""
    group = ray.util.get_current_placement_group()
    return {
        "node": ray.get_runtime_context().get_node_id(),
        "group": None if group is None else group.id.hex(),
    }


class _Member:
    """What client actors and the server have in common: where they are, and the copies that they hold of others."""

    copies: Copies
    epoch = 0  # of the server that is heard
    round = 0  # the last one that is committed here

    def whereabouts(self) -> dict[str, Any]:
        """The process and its node; answered before anything is started."""
        context = ray.get_runtime_context()
        return {"pid": os.getpid(), "node": context.get_node_id(), "host": ray.util.get_node_ip_address()}

    def keep(self, member: str, round: int, epoch: int, changes: Any) -> None:
        """What a round changes in a neighbour's state; it waits until the round commits."""
        if epoch == self.epoch:
            self.copies.prepare(member, round, changes)

    def hold(self, member: str, round: int, whole: Any) -> None:
        """A neighbour's whole state."""
        self.copies.hold(member, round, whole)

    def copy(self, member: str, clients: list[int] | None = None) -> Any:
        """What is held of a neighbour: of some clients, or (None) the state of a server."""
        whole = self.copies.of(member)
        return whole["state"] if clients is None else {client: whole[client] for client in clients}

    def only(self, members: list[str]) -> None:
        """Let go of the copies of all others."""
        self.copies.only(members)

    def report_in(self, member: str) -> Any:
        """The last report of a server whose copy is here."""
        return self.copies.of(member)["report"]


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor(_Member):
    """Hosts a block of clients around one LightningModule, on a share of a device.

    Made empty and filled by `start`: what goes wrong in a constructor, Ray reports as a lost actor.
    """

    device: str
    block: ClientBlock
    made: tuple[BlockSetup, npt.NDArray[Any], npt.NDArray[Any]]
    held: HeldStates
    seconds: dict[str, float]  # in each stage, since they were asked for

    def start(
        self,
        setup: BlockSetup,
        clients: dict[int, ClientSamples],
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
    ) -> BlockDevice:
        """Load the clients; `x` and `y` are read where the object store holds them. Returns what it computes on."""
        from actors.devices import claim_device

        claim = claim_device(setup.gpus, setup.precision, setup.determinism)
        self.device = claim.device
        self.made = setup, x, y
        self.block = self._block(clients)
        self.held = HeldStates()
        self.copies = Copies()
        self.round = self.epoch = 0
        self.seconds = {}
        which = ",".join(map(str, ray.get_gpu_ids()))
        return self.block.computes_on(claim.name, f"{_place()['node']}/{which}" if which else "")

    def _block(self, clients: dict[int, ClientSamples]) -> ClientBlock:
        from actors.blocks import make_block  # Lightning is imported here and not in the server

        setup, x, y = self.made
        return make_block(setup, clients, x, y, self.device)

    def give(self, clients: list[int]) -> dict[int, State]:
        """The committed states of clients that go to another actor."""
        states = self.block.snapshot()
        return {client: states[client] for client in clients}

    def take(self, clients: dict[int, ClientSamples], *arriving: dict[int, State]) -> None:
        """Host these clients from now on: some of those that are here, and those whose states arrive."""
        states = {client: state for client, state in self.block.snapshot().items() if client in clients}
        for some in arriving:
            states |= some
        del self.block
        gc.collect()  # what it held on the device goes before the next one comes
        self.block = self._block(clients)
        self.block.restore(states)

    def receive(self, *arriving: dict[int, State]) -> None:
        """Take over the states of these clients, which another actor had."""
        self.block.restore({client: state for some in arriving for client, state in some.items()})

    def standing(self) -> dict[str, Any]:
        """The round that is committed here, and those of the copies that are held here."""
        return {"round": self.round, "copies": self.copies.rounds()}

    def settle(self, round: int, epoch: int) -> None:
        """After a loss: this round is decided. Who has not committed it does; what is of another one is forgotten."""
        self.epoch = epoch
        if self.round < round:
            self.block.commit()
        else:
            self.block.begin(round)
        self.copies.settle(round)
        self.round = round

    def stand(self, round: int, epoch: int) -> None:
        """Everybody is at this round."""
        self.round, self.epoch = round, epoch

    def whole(self) -> dict[int, State]:
        """The committed states of all clients here, for the neighbour that holds the copy."""
        return self.block.snapshot()

    def commit(self, round: int, epoch: int) -> Committed:
        """Make a round's changes permanent, here and in the copies; a server that was given up is not heard."""
        if (epoch, round) < (self.epoch, self.round + 1):
            return Committed()
        found = self.block.commit()
        self.copies.settle(round)
        self.round = round
        return replace(found, host=f"node {ray.util.get_node_ip_address()}")

    def call(self, method: str, arguments: tuple[Any, ...], *arrays: npt.NDArray[Any]) -> Any:
        """Do what the fleet asks of a block."""
        started = time.perf_counter()
        try:
            return getattr(self if method == "commit" else self.block, method)(*arguments, *arrays)
        finally:
            self.seconds[method] = self.seconds.get(method, 0.0) + time.perf_counter() - started

    def spent(self) -> dict[str, float]:
        """Seconds in each stage since it was asked last."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def shard(self, question: str, number: int, *arguments: Any) -> Any:
        """What the driver asks about the states that are held under a number (`actors/shards.py`)."""
        if question == "hold":
            return self.held.hold(number, self.block.snapshot())
        if question in ("save", "saved", "release"):
            return getattr(self.held, question)(number, *arguments)
        held = self.held.shard(number)
        return held() if question == "states" else getattr(held, question)(*arguments)

    def load(self, folder: str, manifest: str, shards: dict[str, list[int]]) -> bool:
        """Take over the states of a checkpoint; False if this process does not see it."""
        states = read_where_it_is(folder, manifest, shards)
        if states is not None:
            self.block.restore(states)
        return states is not None

    def add(self, *parts: PartialSums) -> PartialSums:
        """The sum of partial sums that were made here or in other actors, read from the object store."""
        return add_sums(parts)

    def about(self) -> dict[str, Any]:
        """Where this actor runs."""
        return {
            "pid": os.getpid(),
            "device": self.device,
            "gpu_ids": ray.get_gpu_ids(),
            "clients": sorted(self.block.clients),
            **_place(),
        }


class RayFleet(Fleet):
    """Blocks on Ray actors: one call per actor and stage, models through the object store."""

    def __init__(
        self,
        actors: Sequence[Any],
        layout: Sequence[Sequence[int]],
        sizes: npt.NDArray[np.int64],
        not_finite: str = "drop",
        team: Team | None = None,
        copies: Copies | None = None,
        lines: list[str] | None = None,
    ) -> None:
        super().__init__(layout, sizes, not_finite)
        self.actors = list(actors)
        self._team, self._copies = team, copies  # copies: where the server is the only neighbour
        # Without a team, as in a test of the fleet alone, nobody is late.
        self.watchdog = Watchdog(team.patience if team else 60.0, team.members if team else {})
        if lines is not None:
            self.watchdog.say = lines.append

    def _reach(
        self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()
    ) -> dict[int, Any]:
        with self._round.timed(method):
            calls = self._call(method, arguments, arrays)
            found = self.watchdog.get(calls, _stage(method, arguments))
            return dict(zip(calls, found, strict=True))

    def _call(
        self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()
    ) -> dict[int, Any]:
        """References to what the blocks will return."""
        return {b: self.actors[b].call.remote(method, args, *arrays) for b, args in arguments.items()}

    def _summed(self, method: str, calls: Iterable[dict[int, tuple[Any, ...]]]) -> Iterator[PartialSums]:
        """Actors add each other's sums, pairs and then pairs of pairs; this process receives the last one.

        The actors are at work on the next piece while this process makes models of one.
        """
        waiting: deque[Any] = deque()
        for arguments in calls:
            waiting.append(self._tree(self._call(method, arguments)))
            if len(waiting) > 1:
                yield self._wait_for(method, waiting.popleft())
        while waiting:
            yield self._wait_for(method, waiting.popleft())

    def _wait_for(self, method: str, reference: Any) -> Any:
        with self._round.timed(method):
            return self.watchdog.get({None: reference}, method, anybody=True)[0]

    def prepare(self, own: Callable[[], dict[str, Any]]) -> None:
        """Every block's changes go to its neighbour, and the server's state to its own; returns when all are there."""
        team = self._team
        if team is None or not team.copies:
            return
        round, server = self._round.number, team.server.name
        with self._round.timed("copies"):
            changed = self._call("changes", dict.fromkeys(range(len(self.layout)), ()))
            holder = self.actors[team.holds_server]
            kept = {"own": holder.keep.remote(server, round, team.epoch, own())}
            for b, there in enumerate(team.neighbours):
                name = team.clients[b].name
                if there == SERVER:
                    assert self._copies is not None
                    self._copies.prepare(name, round, *self.watchdog.get({b: changed[b]}, "changes"))
                else:
                    kept[name] = self.actors[there].keep.remote(name, round, team.epoch, changed[b])
            del changed
            self.watchdog.get(kept, "copies", anybody=True)

    def _commits(self) -> tuple[int, int]:
        if self._copies is not None:
            self._copies.settle(self._round.number)
        return self._round.number, self._team.epoch if self._team else 0

    def _tree(self, parts: dict[int, Any]) -> Any:
        """A reference to the sum of parts that the given blocks' actors hold."""
        level = list(parts.items())
        while len(level) > 1:
            above = [
                (b, self.actors[b].add.remote(left, right))
                for (b, left), (_, right) in zip(level[::2], level[1::2], strict=False)
            ]
            level = above + level[2 * len(above) :]  # an odd one waits for the next level
        return level[0][1]

    def _place(self, array: npt.NDArray[Any]) -> Any:
        return ray.put(np.ascontiguousarray(array))


def _stage(method: str, arguments: dict[int, tuple[Any, ...]]) -> str:
    """What a stage is called where its usual duration is remembered: two slots, or two client functions, differ."""
    request = next((given[0] for given in arguments.values() if given), None)
    which = [getattr(request, name, None) for name in ("slot", "stage", "split")]
    return " ".join([method, *(each for each in which if isinstance(each, str) and each)])


@ray.remote(  # type: ignore[call-overload]  # Ray's stubs do not know concurrency groups
    max_restarts=0, max_task_retries=0, concurrency_groups={"watch": 1}
)
class ServerActor(_Member):
    """Holds the global and the K cluster models, clusters and aggregates; made empty, as a ClientActor is.

    It answers `progress` while a round runs, so that the driver knows a busy server from a stopped one.
    """

    fleet_class: type[RayFleet] = RayFleet
    fleet: RayFleet
    server: Server

    def __init__(self) -> None:
        self.copies = Copies()
        self.lines: list[str] = []  # about actors that are late in the running round

    def start(
        self,
        setup: ServerSetup,
        actors: Sequence[Any],
        layout: Sequence[Sequence[int]],
        state: dict[str, Any] | None,
        team: Team | None = None,
        round: int = 0,
    ) -> None:
        """Set the method up, or take over where `state` left off, after round `round`."""
        self.fleet = self.fleet_class(
            actors, layout, setup.sizes, setup.not_finite, team, self.copies, self.lines
        )
        self.server = Server(setup, self.fleet, state)
        self.server.round = round

    def carry_on(
        self, actors: Sequence[Any], layout: Sequence[Sequence[int]], team: Team, round: int
    ) -> None:
        """After a loss: from the round that was decided last, with the actors that there are now."""
        state, report = self.server.committed_state(), self.server.report
        self.start(self.server.setup, actors, layout, state, team, round)
        self.server.report = report

    def settle(self, round: int) -> None:
        """The copies that are held here, after a loss."""
        self.copies.settle(round)

    def standing(self) -> dict[str, Any]:
        """The round that was decided last, and those of the copies that are held here."""
        round = self.server.round if hasattr(self, "server") else -1  # -1: it was lost before it had a state
        return {"round": round, "copies": self.copies.rounds()}

    def whole(self) -> dict[str, Any]:
        """What the neighbour that holds the copy must have."""
        return {"state": self.server.committed_state(), "report": self.server.report}

    def report(self) -> RoundReport | None:
        """Of the round that was decided last."""
        return self.server.report

    @ray.method(concurrency_group="watch")
    def progress(self, since: int) -> list[str]:
        """Lines of the running round, from a number on."""
        return self.lines[since:]

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        self.lines.clear()
        return self.server.run_round(round)

    def move(self, layout: Sequence[Sequence[int]]) -> None:
        """Clients live elsewhere from now on."""
        self.fleet.move(layout)

    def state(self) -> dict[str, Any]:
        """The server's part of a checkpoint, of the last committed round."""
        return self.server.state()

    def models(self) -> dict[str, Any]:
        """The server's models and the layout of their values."""
        return {"models": self.server.models(), "spec": self.spec()}

    def spec(self) -> Any:
        """The layout of a model's values."""
        return self.fleet.spec.to_json()

    def about(self) -> dict[str, Any]:
        """Where this actor runs."""
        return {"pid": os.getpid(), **_place()}
