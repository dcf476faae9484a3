"""A placement group for the actors of a session: how many there can be, and the wait until they fit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from actors.placement import actor_count, capacity
from actors.ray_errors import SurfacedErrors
from archipelago.core.errors import UserError

if TYPE_CHECKING:
    from actors.session import Plan

PATIENCE = 10.0  # seconds after which a fleet of free size takes what is there


def reserve(plan: Plan, shrink: bool, wait: float) -> tuple[Any, int]:
    """A placement group and how many actors it is for, or the sentence that says why there is none."""
    from ray.util.placement_group import placement_group, remove_placement_group

    fleet, deadline = plan.fleet, time.monotonic() + wait
    bundle = {"CPU": fleet.cpus, **({"GPU": fleet.gpus} if fleet.gpus else {})}
    # Who did not say how many gets what is free, and need not wait for what others use.
    flexible = shrink or (fleet.actors is None and fleet.clients_per_actor is None)
    count = count_when_possible(plan, shrink, deadline)
    while True:
        left = max(deadline - time.monotonic(), 1.0)
        group = placement_group([bundle] * count, strategy="PACK", name=unique(plan.title))
        try:
            with SurfacedErrors():
                if group.wait(min(left, PATIENCE) if flexible else left):
                    return group, count
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)
        free = capacity(_free_nodes(), fleet)
        if time.monotonic() >= deadline:
            each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            raise UserError(
                f"Expected capacity for {count} client actor{'' if count == 1 else 's'} of {each} each, but the "
                f"cluster is busy and has had capacity for {free} after {wait:g} s: wait until others are done, "
                "or ask for less (fleet.actors, fleet.cpus, fleet.gpus).",
                code="capacity",
                wanted=count,
                capacity=free,
            )
        if flexible:
            # One fewer at least: what is free may be scattered over devices and hold less than it seems.
            count = max(1, min(count - 1, free))


def count_when_possible(plan: Plan, shrink: bool, deadline: float) -> int:
    """How many actors to start; after a loss a cluster may be empty for a while, until nodes come back."""
    import ray

    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        try:
            return actor_count(plan.fleet, len(plan.clients), nodes, shrink=shrink)
        except UserError:
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
