"""Samples and partitions, loaded once on each node of a cluster and read by every trial there.

The driver of a sweep keeps one `NodeData` actor on each node. It builds a federation when the first trial asks for
it and puts samples and labels into the node's object store, from which trials read them without copying.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from federated_data import Federation, build_federation
from foundation.settings import DataSettings, ExperimentSettings, PartitionSettings

KEPT = 16  # federations that a node remembers; a trial that reads an older one keeps it alive by itself
NAMESPACE = "archipelago"


class NodeFederations:
    """What the actor does, without Ray."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Any] = OrderedDict()
        self.built: list[str] = []  # what was loaded, in order

    def get(self, key: str, data: DataSettings, partition: PartitionSettings, clients: int, seed: int) -> Any:
        """[reference to the rest of the federation, to its samples, to its labels]."""
        import ray

        if key not in self._held:
            federation = build_federation(data, partition, clients, seed)
            self.built.append(key)
            _ = federation.fingerprint  # computed here once, and sent along
            state = federation.__getstate__()
            # What is memory-mapped goes in as its address, and is shared by all processes as a file is.
            x, y = state.pop("x"), state.pop("y")
            self._held[key] = [ray.put(state), ray.put(x), ray.put(y)]
        self._held.move_to_end(key)
        while len(self._held) > KEPT:
            self._held.popitem(last=False)
        return self._held[key]

    def about(self) -> list[str]:
        """Keys of the federations that were built here."""
        return self.built


class SharedData:
    """The `NodeData` actors of a sweep; they end with the process that made them."""

    def __init__(self, label: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.label = label
        kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(NodeFederations)
        self.actors = [
            kind.options(
                name=_name(label, node["NodeID"]),
                namespace=NAMESPACE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote()
            for node in ray.nodes()
            if node["Alive"]
        ]

    def close(self) -> None:
        """End them."""
        import ray

        for actor in self.actors:
            ray.kill(actor)


def _name(label: str, node: str) -> str:
    return f"data/{label}/{node[:12]}"


def shared_federation(
    config: ExperimentSettings, label: str | None
) -> tuple[Federation, tuple[Any, Any] | None]:
    """(the federation of a config, references to its samples and labels for actors).

    From this node's `NodeData` where there is one, and built here where there is none.
    """
    key = repr((config.data, config.partition, config.clients, config.seed))
    held = _ask(key, config, label) if label is not None else None
    if held is None:
        return _built_here(key, _Settings(config)), None
    import ray

    reference, x, y = held
    state = ray.get(reference)
    federation = Federation.__new__(Federation)
    federation.__setstate__({**state, "x": ray.get(x), "y": ray.get(y)})
    return federation, (x, y)


def _ask(key: str, config: ExperimentSettings, label: str) -> Any:
    import ray

    node = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(_name(label, node), namespace=NAMESPACE)
        return ray.get(actor.get.remote(key, config.data, config.partition, config.clients, config.seed))
    except (ValueError, ray.exceptions.RayActorError):  # a node that came later, or lost its actor
        return None
    except (
        ray.exceptions.RayTaskError
    ) as error:  # what is wrong with the data or the partition, as it was raised there
        raise error.cause from error


class _Settings:
    """A config that `lru_cache` takes for equal to every other: the key beside it says what matters."""

    def __init__(self, config: ExperimentSettings) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=4)
def _built_here(key: str, settings: _Settings) -> Federation:
    config = settings.config
    return build_federation(config.data, config.partition, config.clients, config.seed)
