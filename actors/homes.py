"""Where actors of a session may live: bundles of placement groups, and which of them have a node at this moment."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Home:
    """One bundle of a placement group."""

    group: Any
    bundle: int

    def options(self, name: str) -> dict[str, Any]:
        """Where an actor goes, and the name it carries in the Ray dashboard."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"scheduling_strategy": place, "name": name, "namespace": "archipelago"}


def with_nodes(homes: Iterable[Home]) -> list[Home]:
    """Those whose bundle is on a node that is alive. Ray looks for another node for the bundles of one that is gone."""
    import ray
    from ray.util import placement_group_table

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    tables: dict[Any, dict[int, str]] = {}
    found = []
    for home in homes:
        key = home.group.id
        if key not in tables:
            table = placement_group_table(home.group)
            placed = table.get("state") not in ("REMOVED", "PENDING", None)
            tables[key] = table.get("bundles_to_node_id", {}) if placed else {}
        if tables[key].get(home.bundle) in alive:
            found.append(home)
    return found


def wait_for_nodes(homes: Sequence[Home], seconds: float) -> list[Home]:
    """Those that have a node again, after at most some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = with_nodes(homes)
        if len(found) == len(homes) or time.monotonic() >= deadline:
            return found
        time.sleep(0.2)
