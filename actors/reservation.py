"""A placement group for the actors of a session: how many there can be, and the wait until they fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.cluster import autoscales, live_nodes
from actors.placement import actor_count, bundle_of, capacity, idle_gpus
from actors.ray_errors import SurfacedErrors
from actors.watchdog import say_in_log
from archipelago.core.errors import UserError
from archipelago.core.settings import FleetSettings

if TYPE_CHECKING:
    from actors.session import Plan

PATIENCE = 10.0  # seconds after which a fleet of free size takes what is there
PLACING = 15.0  # seconds that a busy machine may take to place what fits
BUSY, GROWING = (
    60.0,
    900.0,
)  # seconds that a cluster is given, as it is or with an autoscaler (`fleet.wait=auto`)


@dataclass(frozen=True)
class Reserved:
    """A placement group for a number of actors of resolved settings, and why GPUs stay idle beside it."""

    group: Any
    actors: int
    fleet: FleetSettings
    idle: str = ""


def reserve(
    plan: Plan, shrink: bool, wait: float | None = None, say: Callable[[str], None] = say_in_log
) -> Reserved:
    """A placement group and how many actors it is for, or the sentence that says why there is none.

    Where an autoscaler starts nodes, or the user said how long to wait (`fleet.wait`), a group is asked for that the
    cluster has no capacity for yet: that is what an autoscaler sees.
    """
    from ray.util.placement_group import placement_group

    from actors.devices import torch_has_cuda

    grows = autoscales() or bool(plan.fleet.wait)
    if wait is None:
        wait = plan.fleet.wait if plan.fleet.wait is not None else (GROWING if grows else BUSY)
    deadline = time.monotonic() + wait
    fleet, count, nodes = count_when_possible(plan, shrink, deadline, grows)
    if capacity(nodes, fleet) < count:
        say(
            f"Asked the cluster for {_actors(count, fleet)}; waiting for nodes, {wait:g} s at most (fleet.wait)."
        )
    bundle = bundle_of(fleet)
    # Who did not say how many gets what is free, and need not wait for what others use.
    flexible = shrink or (fleet.actors is None and fleet.clients_per_actor is None)
    while True:
        left = max(deadline - time.monotonic(), 1.0)
        # A group that is removed while Ray is placing it may keep its share for good: one that fits gets more time.
        fits = capacity(_free_nodes(), fleet) >= count
        patience = max(PATIENCE, PLACING) if fits else PATIENCE
        group = placement_group([bundle] * count, strategy="PACK", name=unique(plan.title))
        try:
            with SurfacedErrors():
                if group.wait(min(left, patience) if flexible else left):
                    idle = idle_gpus(
                        plan.fleet, fleet, len(plan.clients), count, nodes, cuda=torch_has_cuda()
                    )
                    return Reserved(group, count, fleet, idle)
        except BaseException:
            _give_back(group)
            raise
        _give_back(group)
        free = capacity(_free_nodes(), fleet)
        if time.monotonic() >= deadline:
            raise _no_capacity(plan, fleet, count, free, wait)
        if flexible:
            # One fewer at least: what is free may be scattered over devices and hold less than it seems.
            count = max(1, min(count - 1, free))


def _no_capacity(plan: Plan, fleet: FleetSettings, count: int, free: int, wait: float) -> UserError:
    """The sentence that says why there is no placement group."""
    has = f"is busy and has had capacity for {free} after {wait:g} s: wait until others are done"
    if capacity(live_nodes(), fleet) < count:
        has = f"has had no nodes for more than {free} after {wait:g} s: wait longer (fleet.wait)"
    return UserError(
        f"Expected capacity for {_actors(count, fleet)}, but the cluster {has}, "
        f"or ask for less (fleet.actors, fleet.cpus, {'fleet.gpus' if plan.fleet.gpus else 'fleet.gpus=0'}).",
        code="capacity",
        wanted=count,
        capacity=free,
    )


def _give_back(group: Any) -> None:
    """Remove a placement group and wait until it is gone: one that is just being placed may keep its share."""
    from ray.util.placement_group import placement_group_table, remove_placement_group

    remove_placement_group(group)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if placement_group_table(group).get("state") in ("REMOVED", None):
            return
        time.sleep(0.05)


def _actors(count: int, fleet: FleetSettings) -> str:
    """
    >>> _actors(2, FleetSettings(gpus=0.5))
    '2 client actors of 1 CPU and 0.5 GPU each'
    """
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundle_of(fleet).items())
    return f"{count} client actor{'' if count == 1 else 's'} of {each} each"


def count_when_possible(
    plan: Plan, shrink: bool, deadline: float, grows: bool = False
) -> tuple[FleetSettings, int, list[dict[str, float]]]:
    """Resolved settings, how many actors to start, and the nodes of the cluster.

    After a loss a cluster may be empty for a while, until nodes come back. One that `grows` is asked for what it does
    not have yet.
    """
    from actors.devices import torch_has_cuda

    while True:
        nodes = live_nodes()
        try:
            fleet = plan.sized(nodes, cuda=torch_has_cuda())
            return fleet, actor_count(fleet, len(plan.clients), nodes, shrink=shrink), nodes
        except UserError as error:
            if grows and not shrink:
                return fleet, int(error.values["wanted"]), nodes
            if not shrink or time.monotonic() >= deadline:
                raise
        time.sleep(1.0)


def unique(name: str) -> str:
    """Names of actors and placement groups must differ in a cluster, and equal experiments may run in one."""
    import uuid

    return f"{name}-{uuid.uuid4().hex[:6]}"


def _free_nodes() -> list[dict[str, float]]:
    """What nobody uses at this moment, node by node."""
    from ray._private.state import available_resources_per_node  # Ray's public number is the sum of all nodes

    return list(available_resources_per_node().values())
