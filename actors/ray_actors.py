"""The Ray side: ClientActor, ServerActor, and the fleet that reaches clients through the object store."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray

from actors.client_states import State
from actors.compute import BlockDevice
from actors.fleet import Fleet
from actors.reports import RoundReport
from actors.requests import BlockSetup, ClientSamples
from actors.server import Server, ServerSetup
from actors.shards import HeldStates, read_where_it_is
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


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
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

    def call(self, method: str, arguments: tuple[Any, ...], *arrays: npt.NDArray[Any]) -> Any:
        """Do what the fleet asks of a block."""
        started = time.perf_counter()
        try:
            return getattr(self.block, method)(*arguments, *arrays)
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
    ) -> None:
        super().__init__(layout, sizes, not_finite)
        self.actors = list(actors)

    def _reach(
        self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()
    ) -> dict[int, Any]:
        with self._round.timed(method):
            calls = self._call(method, arguments, arrays)
            # All at once: the first failure surfaces instead of waiting behind a healthy actor.
            return dict(zip(calls, ray.get(list(calls.values())), strict=True))

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
            return ray.get(reference)

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


@ray.remote(max_restarts=0, max_task_retries=0)
class ServerActor:
    """Holds the global and the K cluster models, clusters and aggregates; made empty, as a ClientActor is."""

    fleet: RayFleet
    server: Server

    def start(
        self,
        setup: ServerSetup,
        actors: Sequence[Any],
        layout: Sequence[Sequence[int]],
        state: dict[str, Any] | None,
    ) -> None:
        """Set the method up, or take over where `state` left off."""
        self.fleet = RayFleet(actors, layout, setup.sizes, setup.not_finite)
        self.server = Server(setup, self.fleet, state)

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
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
