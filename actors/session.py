"""A session: a server and its clients, alive. Made by the driver, in this process or on a Ray cluster.

The driver creates the ServerActor and the ClientActors (an actor dies with its creator), so any of them
can be rebuilt from the last checkpoint, with fewer actors if the cluster has shrunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actors import reservation
from actors.client_states import State
from actors.compute import BlockDevice, Compute, compute_of, without_gpu
from actors.placement import Node, gpus_of, idle_gpus, layout, resolved
from actors.ray_errors import ActorsLost, SurfacedErrors
from actors.rebalancing import Rebalancing, expected_costs
from actors.reports import RoundReport
from actors.requests import BlockSetup, ClientSamples
from actors.server import Server, ServerSetup
from actors.shards import ActorShard, ClientShard, LocalShard, states_of
from archipelago.core.settings import FleetSettings
from archipelago.runs.checkpoints import StoredParts

__all__ = ["ActorsLost", "Checkpoint", "InProcessSession", "Place", "Plan", "RaySession", "Session"]


@dataclass(frozen=True)
class Plan:
    """An experiment, ready to be brought to life on any fleet.

    `fleet` is what the user asked for; `gpus` what each actor gets, where that is known already: a trial's share, or
    what the run began with.
    """

    server: ServerSetup
    block: BlockSetup
    fleet: FleetSettings
    clients: list[ClientSamples]
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    title: str = "archipelago"
    passes: float = 0.0  # of a participant's training samples through models, in a round, besides training
    gpus: float | None = None

    def sized(self, nodes: Sequence[Node], *, cuda: bool = True) -> FleetSettings:
        """The fleet's settings on these nodes, with a number in place of `gpus=auto`."""
        if self.gpus is not None:
            return dataclasses.replace(self.fleet, gpus=self.gpus)
        return resolved(self.fleet, len(self.clients), nodes, cuda=cuda)

    def costs(self) -> npt.NDArray[np.float64]:
        """What each client is expected to cost before each barrier, a row for each."""
        return expected_costs(self)


@dataclass(frozen=True)
class Checkpoint:
    """Where to resume from: the server's state, and every client's, at hand or on disk."""

    server: dict[str, Any]
    clients: Mapping[int, State] | StoredParts


@dataclass(frozen=True)
class Place:
    """Bundles of a placement group that somebody else made: `actors` of them, from number `first` on."""

    group: Any
    first: int
    actors: int


class Snapshot(dict[str, Any]):
    """A committed state as named parts: `server`, a function that returns it, and `clients-00000` and so on."""

    def __init__(self, server: Callable[[], Any], shards: Sequence[ClientShard]) -> None:
        super().__init__({"server": server, **{f"clients-{b:05d}": shard for b, shard in enumerate(shards)}})
        self.shards = shards


class Session(Protocol):
    """What the runner needs of a live experiment."""

    gpus: float  # of each block of clients

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""

    def snapshot(self) -> Snapshot:
        """The committed state as named parts: `server`, fetched when it is called, and shards of clients."""

    def models(self) -> dict[str, Any]:
        """{"models": name -> array, "spec": layout}."""

    def spec(self) -> Any:
        """The layout of a model's values, without the models."""

    def describe(self) -> str:
        """One line about where the clients live and what they compute on."""

    def compute(self) -> Compute:
        """What the clients compute on."""

    def shortfall(self) -> str:
        """What was asked for and could not be had; empty if all of it was."""

    def close(self) -> None:
        """Release everything this session started."""


class InProcessSession:
    """Everything in this process; `actors` blocks, so that any packing can be simulated."""

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint | None = None, blocks: list[list[int]] | None = None
    ) -> None:
        from actors.blocks import make_block
        from actors.devices import claim_device, machine_gpus, torch_has_cuda
        from actors.fleet import InProcessFleet

        if blocks is None:
            count = plan.fleet.actors or 1
            if plan.fleet.clients_per_actor is not None:
                count = -(-len(plan.clients) // plan.fleet.clients_per_actor)
            blocks = layout(plan.costs(), min(count, len(plan.clients)), plan.fleet.clients_per_actor)
        # One process computes on one device, whatever number of blocks it simulates.
        alone = dataclasses.replace(
            plan, fleet=dataclasses.replace(plan.fleet, actors=1, clients_per_actor=None)
        )
        here, cuda = {"CPU": plan.fleet.cpus, "GPU": float(machine_gpus())}, torch_has_cuda()
        sized = alone.sized([here], cuda=cuda)
        self.gpus = gpus_of(sized)
        setup = dataclasses.replace(plan.block, gpus=self.gpus)
        self._claim = claim_device(self.gpus, setup.precision, setup.determinism)
        try:
            made = [
                make_block(setup, {c: plan.clients[c] for c in block}, plan.x, plan.y, self._claim.device)
                for block in blocks
            ]
            self._blocks = [
                block.computes_on(self._claim.name, "here" if self.gpus else "") for block in made
            ]
            idle = ""
            if plan.gpus is None:  # or the rest of this machine is not this run's to use
                idle = idle_gpus(plan.fleet, sized, len(plan.clients), 1, [here], cuda=cuda, alone=True)
            self._compute = compute_of(self._blocks, self.gpus, setup.precision, idle)
            self.fleet = InProcessFleet(made, plan.server.sizes, plan.server.not_finite)
            self.server = Server(plan.server, self.fleet, checkpoint.server if checkpoint else None)
            if checkpoint:
                self.fleet.restore(states_of(checkpoint.clients, range(len(plan.clients))))
        except BaseException:
            self.close()
            raise

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        return self.server.run_round(round)

    def snapshot(self) -> Snapshot:
        """State values are never written to, so handing them out is enough."""
        server, blocks = self.server.state(), self.fleet.snapshot()
        return Snapshot(lambda: server, [LocalShard(block) for block in blocks])

    def models(self) -> dict[str, Any]:
        """The server's models."""
        return {"models": self.server.models(), "spec": self.spec()}

    def spec(self) -> Any:
        """The layout of a model's values."""
        return self.fleet.spec.to_json()

    def describe(self) -> str:
        """One line."""
        count = len(self.fleet.layout)
        blocks = f"{count} block{'' if count == 1 else 's'}"
        return f"{len(self.fleet.all_sizes)} clients in this process ({blocks}): {self._compute.sentence}"

    def compute(self) -> Compute:
        """What the clients compute on."""
        return self._compute

    def shortfall(self) -> str:
        """A GPU that torch cannot use."""
        return without_gpu(self._blocks, self.gpus)

    def close(self) -> None:
        """Give the device back: torch's flags are those of the process again."""
        self._claim.release()


class RaySession:
    """A ServerActor and ClientActors in one placement group.

    `shrink` (after a loss, or to resume) takes what the cluster has now, fewer actors if need be, instead of
    refusing. `wait` is for how many seconds a busy cluster is given to free capacity. `place` is a group that is
    there already: it is used as it is, and outlives the session.
    """

    _held = 0  # number of the last snapshot
    _rebalancing: Rebalancing | None = None  # None: clients stay where they are

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint | None = None,
        *,
        shrink: bool = False,
        data: tuple[Any, Any] | None = None,
        wait: float = 60.0,
        place: Place | None = None,
    ) -> None:
        import ray

        self._group: Any = None
        self._first = 0  # bundle of the first actor
        self._borrowed = place is not None
        self.layout: list[list[int]] = []
        self.clients: list[Any] = []
        self.server: Any = None
        self.devices: list[BlockDevice] = []
        self._precision = plan.block.precision
        try:
            if place is not None:
                self._group, self._first = place.group, place.first
                reserved = reservation.Reserved(
                    place.group, min(place.actors, len(plan.clients)), plan.sized([])
                )
            else:
                reserved = reservation.reserve(plan, shrink, wait)
                self._group = reserved.group
            count, self.gpus, self._idle = reserved.actors, gpus_of(reserved.fleet), reserved.idle
            plan = dataclasses.replace(
                plan, gpus=self.gpus, block=dataclasses.replace(plan.block, gpus=self.gpus)
            )
            self.layout = layout(plan.costs(), count, plan.fleet.clients_per_actor)
            self._samples = plan.clients
            if count > 1 and plan.fleet.clients_per_actor is None:
                self._rebalancing = Rebalancing(plan)
            self._start(plan, checkpoint, data or (ray.put(plan.x), ray.put(plan.y)))
        except BaseException:
            self.close()
            raise

    def _start(self, plan: Plan, checkpoint: Checkpoint | None, data: tuple[Any, Any]) -> None:
        """Bring the actors to life, all at the same time: most of it is imports."""
        import ray

        from actors.ray_actors import ClientActor, ServerActor

        fleet, started = plan.fleet, []
        for b, block in enumerate(self.layout):
            actor = ClientActor.options(  # type: ignore[attr-defined]
                num_cpus=fleet.cpus, num_gpus=plan.gpus, **self._place(b, f"{plan.title}/clients-{b}")
            ).remote()
            self.clients.append(actor)
            samples = {c: plan.clients[c] for c in block}
            started.append(actor.start.remote(plan.block, samples, *data))
        # The server computes little and between the clients' calls: it needs no CPU of its own.
        self.server = ServerActor.options(  # type: ignore[attr-defined]
            num_cpus=0, **self._place(0, f"{plan.title}/server")
        ).remote()
        with SurfacedErrors():
            self.devices = self._when_started(started)
            if checkpoint:
                self._restore(checkpoint.clients)
            state = checkpoint.server if checkpoint else None
            ray.get(self.server.start.remote(plan.server, self.clients, self.layout, state))

    def _restore(self, clients: Mapping[int, State] | StoredParts) -> None:
        """Actors read their clients' states where they see the checkpoint; the others get them, block by block."""
        import ray

        pairs = list(zip(self.clients, self.layout, strict=True))
        done = [False] * len(pairs)
        if isinstance(clients, StoredParts):
            folder = str(clients.path.absolute())
            done = ray.get(
                [a.load.remote(folder, clients.manifest, clients.shards_of(block)) for a, block in pairs]
            )
        for actor, block in (pair for pair, has in zip(pairs, done, strict=True) if not has):
            ray.get(actor.call.remote("restore", (states_of(clients, block),)))

    def _when_started(self, started: list[Any]) -> list[Any]:
        """Wait for the actors. One whose node is gone waits for ever for its bundle of the group: that is a loss."""
        import ray
        from ray.util import placement_group_table

        waiting = started
        while waiting:
            _, waiting = ray.wait(
                waiting, num_returns=len(waiting), timeout=reservation.PATIENCE, fetch_local=False
            )
            state = placement_group_table(self._group)["state"] if waiting else "CREATED"
            if state != "CREATED":
                raise ActorsLost(
                    f"a node went away while actors were starting; their places are {state.lower()}"
                )
        return ray.get(started)

    def _place(self, bundle: int, name: str) -> dict[str, Any]:
        """Where an actor goes, and the name it carries in the Ray dashboard."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._first + bundle
        )
        return {"scheduling_strategy": place, "name": reservation.unique(name), "namespace": "archipelago"}

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        import ray

        with SurfacedErrors():
            report: RoundReport = ray.get(self.server.run_round.remote(round))
            return report if self._rebalancing is None else self._rebalanced(report, self._rebalancing)

    def _rebalanced(self, report: RoundReport, rebalancing: Rebalancing) -> RoundReport:
        """In the first rounds: what each actor took, and then the one move that follows."""
        import ray

        seconds = ray.get([actor.spent.remote() for actor in self.clients])
        found = rebalancing.measured(report.round, self.layout, seconds)
        if rebalancing.over:
            self._rebalancing = None
        if found is None:
            return report
        layout, share = found
        moved = self._move(layout)
        text = (
            f"Moved {moved} of {len(self._samples)} clients to other actors, as measured: a round is expected to take "
            f"{share:.0%} of the time."
        )
        return replace(report, events=[*report.events, text])

    def _move(self, layout: list[list[int]]) -> int:
        """Give clients, with their states, to the actors of another layout; returns how many moved."""
        import ray

        home = {client: b for b, block in enumerate(layout) for client in block}
        arriving: list[list[Any]] = [[] for _ in layout]
        moved = 0
        for actor, b, block in zip(self.clients, range(len(layout)), self.layout, strict=True):
            for there in sorted({home[client] for client in block} - {b}):
                leaving = [client for client in block if home[client] == there]
                arriving[there].append(actor.give.remote(leaving))  # from actor to actor
                moved += len(leaving)
        samples = [{client: self._samples[client] for client in block} for block in layout]
        ray.get(
            [
                actor.take.remote(own, *states)
                for actor, own, states in zip(self.clients, samples, arriving, strict=True)
            ]
        )
        ray.get(self.server.move.remote(layout))
        self.layout = layout
        return moved

    def snapshot(self) -> Snapshot:
        """The server's state now; the actors hold on to their clients' until they are written or asked for."""
        import ray

        self._held += 1
        holding = [actor.shard.remote("hold", self._held) for actor in self.clients]
        with SurfacedErrors():
            server, *_ = ray.get([self.server.state.remote(), *holding])
        return Snapshot(lambda: server, [ActorShard(actor, self._held) for actor in self.clients])

    def models(self) -> dict[str, Any]:
        """The server's models."""
        import ray

        with SurfacedErrors():
            return ray.get(self.server.models.remote())

    def spec(self) -> Any:
        """The layout of a model's values."""
        import ray

        with SurfacedErrors():
            return ray.get(self.server.spec.remote())

    def describe(self) -> str:
        """One line."""
        sizes = [len(block) for block in self.layout]
        spread = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        actors = f"{len(sizes)} Ray actor{'' if len(sizes) == 1 else 's'}"
        return f"{sum(sizes)} clients on {actors} ({spread} each): {self.compute().sentence}"

    def compute(self) -> Compute:
        """What the clients compute on."""
        return compute_of(self.devices, self.gpus, self._precision, self._idle)

    def begin_again(self, setup: ServerSetup) -> None:
        """Another experiment on the same clients, from round 1: no client remembers anything."""
        import ray

        with SurfacedErrors():
            ray.get([actor.call.remote("restore", ({},)) for actor in self.clients])
            ray.get(self.server.start.remote(setup, self.clients, self.layout, None))

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
        if self._group is not None and not self._borrowed:
            remove_placement_group(self._group)
        self.clients, self.server, self._group = [], None, None
