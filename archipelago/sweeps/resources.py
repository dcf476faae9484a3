"""What a trial reserves on a Ray cluster, which nodes there are, and whether they share the sweep's storage."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.placement import actor_count, capacity, fits
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.runs.storage import is_address, join, read_text, remove_file, write_text

SMALL = 50_000  # training samples in a round, over all clients: below it, actors cost more than they save
_PROBE = "archipelago"


@dataclass(frozen=True)
class Reservation:
    """What one trial reserves: `bundles` as Tune takes them, and the client actors among them (0: none)."""

    bundles: list[dict[str, float]]
    actors: int


def reservation_for(
    config: ExperimentSettings, choice: str, trials: int, nodes: Sequence[Mapping[str, float]]
) -> Reservation:
    """Where a trial's clients live, and what it reserves.

    `auto`: in the trial's own process if nobody asked for actors and either there are trials enough to fill the
    cluster or a round is small; else in actors, as many as its share of the cluster holds.
    """
    fleet = config.fleet
    each = {"CPU": fleet.cpus, **({"GPU": fleet.gpus} if fleet.gpus else {})}
    slots = max(capacity(nodes, fleet), 1)
    asked = fleet.actors is not None or fleet.clients_per_actor is not None
    steps = config.local.steps if config.local.epochs is None else 50 * config.local.epochs
    small = steps * config.local.batch * config.clients * config.participation.fraction <= SMALL
    if choice == "in_process" or (choice == "auto" and not asked and (trials >= slots or small)):
        if not any(fits(node, fleet.cpus, fleet.gpus) for node in nodes):
            actor_count(
                dataclasses.replace(fleet, actors=1, clients_per_actor=None), 1, nodes
            )  # says why not
        return Reservation([each], 0)
    count = actor_count(fleet, config.clients, nodes)
    if not asked:
        count = max(1, min(config.clients, slots // max(1, min(trials, slots))))
    return Reservation([{}, *[each] * count], count)


def live_nodes() -> list[dict[str, float]]:
    """The resources of every node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_shared_storage(address: str) -> None:
    """Several nodes must see one storage; what one writes, every other must be able to read."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    probe = join(
        address if is_address(address) else str(Path(address).resolve()), f".probe-{uuid.uuid4().hex[:8]}"
    )
    write_text(probe, _PROBE)
    ask = ray.remote(num_cpus=0, max_retries=0)(sees)
    try:
        answers = {
            node["NodeName"]: ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(probe)
            for node in nodes
        }
        blind = [name for name, answer in answers.items() if not ray.get(answer)]
    finally:
        remove_file(probe)
    if blind:
        raise UserError(
            f"Expected storage that all {len(nodes)} nodes of the cluster share, got '{address}', which "
            f"{', '.join(blind)} cannot read and write: give a network folder or an address, as in storage=s3://bucket."
        )


def sees(probe: str) -> bool:
    """Whether this node reads what another one wrote there (an address may name a disk of one node: file://...)."""
    try:
        there = read_text(probe) == _PROBE
    except (OSError, UserError):
        return False
    return there and (is_address(probe) or os.access(Path(probe).parent, os.W_OK))
