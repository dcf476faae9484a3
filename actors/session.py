"""A session: a server and its clients, alive. Made by the driver, in this process or on a Ray cluster.

The driver creates the ServerActor and the ClientActors (an actor dies with its creator), so any of them
can be rebuilt from the last checkpoint, with fewer actors if the cluster has shrunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actors.placement import actor_count, client_costs, layout
from actors.reports import RoundReport
from actors.requests import BlockSetup, ClientSamples
from actors.server import Server, ServerSetup
from foundation.settings import FleetSettings


@dataclass(frozen=True)
class Plan:
    """An experiment, ready to be brought to life on any fleet."""

    server: ServerSetup
    block: BlockSetup
    fleet: FleetSettings
    clients: list[ClientSamples]
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    title: str = "archipelago"

    def costs(self) -> npt.NDArray[np.float64]:
        """Cost of each client's round."""
        return client_costs(self.block.local, self.server.sizes)


@dataclass(frozen=True)
class Checkpoint:
    """Where to go on from: the server's state and every client's."""

    server: dict[str, Any]
    clients: dict[int, dict[str, Any]]


class ActorsLost(RuntimeError):
    """An actor, or the node it lived on, is gone; the run can go on from its last checkpoint."""


class Session(Protocol):
    """What the runner needs of a live experiment."""

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""

    def snapshot(self) -> dict[str, Callable[[], Any]]:
        """The committed state as named parts, each fetched when it is called (off the critical path)."""

    def models(self) -> dict[str, Any]:
        """{"models": name -> array, "spec": layout}."""

    def describe(self) -> str:
        """One line about where the clients live."""

    def close(self) -> None:
        """Release everything this session started."""


class InProcessSession:
    """Everything in this process; `actors` blocks, so that any packing can be simulated."""

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint | None = None, blocks: list[list[int]] | None = None
    ) -> None:
        from actors.block import ClientBlock
        from actors.devices import claim_device
        from actors.fleet import InProcessFleet

        if blocks is None:
            count = plan.fleet.actors or 1
            if plan.fleet.clients_per_actor is not None:
                count = -(-len(plan.clients) // plan.fleet.clients_per_actor)
            blocks = layout(plan.costs(), min(count, len(plan.clients)), plan.fleet.clients_per_actor)
        device = claim_device(plan.fleet.gpus)
        made = [
            ClientBlock(plan.block, {c: plan.clients[c] for c in block}, plan.x, plan.y, device)
            for block in blocks
        ]
        self.fleet = InProcessFleet(made, plan.server.sizes, plan.server.not_finite)
        self.server = Server(plan.server, self.fleet, checkpoint.server if checkpoint else None)
        if checkpoint:
            self.fleet.restore(checkpoint.clients)

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        return self.server.run_round(round)

    def snapshot(self) -> dict[str, Callable[[], Any]]:
        """State values are never written to, so handing them out is enough."""
        server, blocks = self.server.state(), self.fleet.snapshot()
        return {
            "server": lambda: server,
            **{f"clients-{b:05d}": _constant(block) for b, block in enumerate(blocks)},
        }

    def models(self) -> dict[str, Any]:
        """The server's models."""
        return {"models": self.server.models(), "spec": self.fleet.spec.to_json()}

    def describe(self) -> str:
        """One line."""
        count = len(self.fleet.layout)
        return (
            f"{len(self.fleet.all_sizes)} clients in this process ({count} block{'' if count == 1 else 's'})"
        )

    def close(self) -> None:
        """Nothing was started."""


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class RaySession:
    """A ServerActor and ClientActors in one placement group."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint | None = None,
        *,
        shrink: bool = False,
        data: tuple[Any, Any] | None = None,
        wait: float = 60.0,
    ) -> None:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        count = actor_count(plan.fleet, len(plan.clients), nodes, shrink=shrink)
        self.layout = layout(plan.costs(), count, plan.fleet.clients_per_actor)
        self._group: Any = None
        self.clients: list[Any] = []
        self.server: Any = None
        try:
            self._start(plan, checkpoint, data or (ray.put(plan.x), ray.put(plan.y)), wait)
        except BaseException:
            self.close()
            raise

    def _start(self, plan: Plan, checkpoint: Checkpoint | None, data: tuple[Any, Any], wait: float) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from actors.ray_actors import ClientActor, ServerActor

        fleet = plan.fleet
        bundle = {"CPU": fleet.cpus, **({"GPU": fleet.gpus} if fleet.gpus else {})}
        self._group = placement_group([bundle] * len(self.layout), strategy="PACK", name=plan.title)
        with _losses():
            ready = self._group.wait(wait)
        if not ready:
            raise ActorsLost(
                f"The cluster is busy: {len(self.layout)} client actors of {bundle} found no place within "
                f"{wait:g} s."
            )
        for b, block in enumerate(self.layout):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=b)
            name = f"{plan.title}/clients-{b}"
            options = {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus, "scheduling_strategy": place}
            samples = {c: plan.clients[c] for c in block}
            actor = ClientActor.options(**options, **_label(name)).remote(plan.block, samples, *data)  # type: ignore[attr-defined]
            self.clients.append(actor)
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        with _losses():
            if checkpoint:
                ray.get(
                    [
                        actor.call.remote(
                            "restore", ({c: checkpoint.clients[c] for c in block if c in checkpoint.clients},)
                        )
                        for actor, block in zip(self.clients, self.layout, strict=True)
                    ]
                )
            # The server computes little and between the clients' calls: it needs no CPU of its own.
            self.server = ServerActor.options(  # type: ignore[attr-defined]
                num_cpus=0, scheduling_strategy=place, **_label(f"{plan.title}/server")
            ).remote(plan.server, self.clients, self.layout, checkpoint.server if checkpoint else None)
            ray.get(self.server.about.remote())

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        import ray

        with _losses():
            return ray.get(self.server.run_round.remote(round))

    def snapshot(self) -> dict[str, Callable[[], Any]]:
        """The server's state now, the clients' when they are asked for."""
        import ray

        with _losses():
            server, states = ray.get(self.server.snapshot.remote())
        return {
            "server": lambda: server,
            **{f"clients-{b:05d}": _fetch(state) for b, state in enumerate(states)},
        }

    def models(self) -> dict[str, Any]:
        """The server's models."""
        import ray

        with _losses():
            return ray.get(self.server.models.remote())

    def describe(self) -> str:
        """One line."""
        sizes = [len(block) for block in self.layout]
        spread = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        return (
            f"{sum(sizes)} clients on {len(sizes)} Ray actor{'' if len(sizes) == 1 else 's'} ({spread} each)"
        )

    def close(self) -> None:
        """End the actors and give the resources back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        for actor in [*self.clients, *([self.server] if self.server is not None else [])]:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self.clients, self.server, self._group = [], None, None


def _fetch(reference: Any) -> Callable[[], Any]:
    def fetch() -> Any:
        import ray

        with _losses():
            return ray.get(reference)

    return fetch


def _label(name: str) -> dict[str, Any]:
    """The name an actor carries in the Ray dashboard, which must be unique in a cluster."""
    import uuid

    return {"name": f"{name}-{uuid.uuid4().hex[:6]}", "namespace": "archipelago"}


class _losses:
    """Ray's many ways to say that a process or a node is gone, as one error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from ray import exceptions

        gone = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.OwnerDiedError,
        )
        if isinstance(error, gone) or isinstance(getattr(error, "cause", None), gone):
            raise ActorsLost(str(error).strip().splitlines()[0]) from error
