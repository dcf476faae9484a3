"""Samples and partitions, loaded once on each node of a cluster and read by every trial there.

The driver of a sweep keeps one `NodeData` actor on each node. It reads a data set when the first trial asks for it
and puts samples and labels into the node's object store, from which trials of every seed and partition read them
without copying. Only shifted samples (rotations, ...) are stored for each partition: they are other samples.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from actors.watchdog import say_in_log
from archipelago.core.settings import DataSettings, ExperimentSettings, PartitionSettings
from archipelago.data import (
    DATASETS,
    PARTITIONS,
    Dataset,
    Federation,
    federation_of,
    load_dataset,
    partition_seed,
)

SHARE = 0.3  # of a node's object store that data sets may fill, and what is made of them as much again
ALONE = 10**9  # bytes of each where there is no object store
NAMESPACE = "archipelago"
_SHIFTS = ("rotations", "label_swaps", "colours", "noises", "noise_shift", "crossed", "drift", "drift_share")


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass
class _Held:
    """Something that is kept: what trials are given, its size, and the data set it was made of."""

    given: Any
    size: int
    dataset: Dataset | None = None
    source: str = ""


class NodeFederations:
    """Data sets and federations, each made once and kept while memory allows (`budget` bytes for each of the two).

    `put` stores a value and `get` reads it back without a copy: Ray's object store, or this process's memory.
    """

    def __init__(
        self, budget: int, put: Callable[[Any], Any] = _same, get: Callable[[Any], Any] = _same
    ) -> None:
        self._budget, self._put, self._get = budget, put, get
        self._datasets: OrderedDict[str, _Held] = OrderedDict()
        self._federations: OrderedDict[str, _Held] = OrderedDict()
        self.loaded: list[str] = []  # data sets that were read, in order
        self.built: list[str] = []  # federations that were made of them

    def get(self, data: DataSettings, partition: PartitionSettings, clients: int, seed: int) -> Any:
        """[the rest of the federation, its samples, its labels], as `put` answered for each."""
        PARTITIONS.find(partition.name)  # a wrong name is reported before a large data set is read
        seed = partition_seed(partition, seed)
        key = repr((data, dataclasses.replace(partition, seed=None), clients, seed, _content(data)))
        if key not in self._federations:
            self._federations[key] = self._made(key, data, partition, clients, seed)
        self._federations.move_to_end(key)
        for gone in _over(self._federations, self._budget):
            del self._federations[gone]
        return self._federations[key].given

    def _made(
        self, key: str, data: DataSettings, partition: PartitionSettings, clients: int, seed: int
    ) -> _Held:
        source, held = self._loaded(data, seed)
        assert held.dataset is not None
        federation = federation_of(held.dataset, data, partition, clients, seed)
        self.built.append(key)
        _ = federation.fingerprint  # computed here once, and sent along
        state = federation.__getstate__()
        x, y = state.pop("x"), state.pop("y")
        size = sum(array.nbytes for array in state["division"].values())
        if x is held.dataset.stored:
            return _Held([self._put(state), *held.given], size, source=source)
        return _Held([self._put(state), self._put(x), self._put(y)], size + _size(x, y), source=source)

    def _loaded(self, data: DataSettings, seed: int) -> tuple[str, _Held]:
        """The data set, whatever is done to it afterwards; its samples are those that are shared."""
        plain = dataclasses.replace(data, **{name: getattr(DataSettings(), name) for name in _SHIFTS})
        key = repr((plain, seed if DATASETS.find(data.name).seeded else None, _content(data)))
        if key not in self._datasets:
            dataset = load_dataset(plain, seed)
            self.loaded.append(key)
            x, y = dataset.joined()
            # As they are in the object store: shifts of groups go into a copy.
            x.flags.writeable = y.flags.writeable = False
            # What is memory-mapped goes in as its address, and is shared by all processes as a file is.
            given = [self._put(x), self._put(y)]
            shared, cut = self._get(given[0]), len(dataset.x_train)
            dataset = dataclasses.replace(dataset, x_train=shared[:cut], x_test=shared[cut:], stored=shared)
            self._datasets[key] = _Held(given, _size(x, y), dataset)
        self._datasets.move_to_end(key)
        for gone in _over(self._datasets, self._budget):
            del self._datasets[gone]
            # What was made of it would keep its samples alive.
            for name in [name for name, held in self._federations.items() if held.source == gone]:
                del self._federations[name]
        return key, self._datasets[key]

    def forget(self) -> None:
        """Keep nothing."""
        self._datasets.clear()
        self._federations.clear()

    def about(self) -> tuple[list[str], list[str]]:
        """(data sets that were read here, federations that were made here), in order."""
        return self.loaded, self.built


def _content(data: DataSettings) -> str | None:
    """What tells arrays from others that had their name before."""
    content = DATASETS.find(data.name).content
    return None if content is None else content()


def _size(*arrays: Any) -> int:
    """Bytes in memory; what is memory-mapped takes none."""
    return sum(array.nbytes for array in arrays if getattr(array, "address", None) is None)


def _over(held: OrderedDict[str, _Held], budget: int) -> list[str]:
    """The least recently used that memory does not allow; the newest always stays."""
    total, gone = sum(each.size for each in held.values()), []
    for key, each in list(held.items())[:-1]:
        if total <= budget:
            break
        total -= each.size
        gone.append(key)
    return gone


class NodeData(NodeFederations):
    """The actor of a node."""

    def __init__(self, budget: int) -> None:
        import ray

        super().__init__(budget, ray.put, ray.get)


class SharedData:
    """The `NodeData` actors of a sweep; they end with the process that made them."""

    def __init__(self, label: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.label = label
        kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(NodeData)
        self.actors: list[Any] = [
            kind.options(
                name=_name(label, node["NodeID"]),
                namespace=NAMESPACE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(int(SHARE * node["Resources"].get("object_store_memory", ALONE / SHARE)))
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
    config: ExperimentSettings, label: str | None = None
) -> tuple[Federation, tuple[Any, Any] | None]:
    """(the federation of a config, references to its samples and labels for actors).

    From this node's `NodeData` where there is one; where there is none this process keeps what it loads.
    """
    asked = (config.data, config.partition, config.clients, config.seed)
    held = _ask(asked, label, config.fleet.start_patience) if label is not None else None
    if held is None:
        state, x, y = _here.get(*asked)
        return _federation(state, x, y), None
    import ray

    state, x, y = held
    return _federation(ray.get(state), ray.get(x), ray.get(y)), (x, y)


def _federation(state: dict[str, Any], x: Any, y: Any) -> Federation:
    federation = Federation.__new__(Federation)
    federation.__setstate__({**state, "x": x, "y": y})
    return federation


def forget() -> None:
    """Let go of what this process keeps."""
    _here.forget()


def _ask(asked: tuple[Any, ...], label: str, seconds: float) -> Any:
    """What this node's `NodeData` has; None if there is none, or none that answers in time: this process loads it."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(_name(label, node), namespace=NAMESPACE)
        return ray.get(actor.get.remote(*asked), timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        say_in_log(f"{_name(label, node)} has not answered for {seconds:g} s: the samples are loaded here.")
        return None
    except (ValueError, ray.exceptions.RayActorError):  # a node that came later, or lost its actor
        return None
    except (
        ray.exceptions.RayTaskError
    ) as error:  # what is wrong with the data or the partition, as it was raised there
        raise error.cause from error


_here = NodeFederations(ALONE)
