"""What a trial reserves on a Ray cluster, which nodes there are, and whether they share the sweep's storage."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.devices import torch_has_cuda
from actors.placement import actor_count, bundle_of, capacity, gpus_of, resolved, resolved_for_trials
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings, FleetSettings
from archipelago.runs.storage import is_address, join, read_text, remove_file, write_text

SMALL = 50_000  # training samples in a round, over all clients: below it, actors cost more than they save
_PROBE = "archipelago"
_SECONDS = 120.0  # that a node is given to look


@dataclass(frozen=True)
class Reservation:
    """What one trial reserves: `bundles` as Tune takes them, the client actors among them (0: none), GPUs of each."""

    bundles: list[dict[str, float]]
    actors: int
    gpus: float = 0.0


def reservation_for(
    config: ExperimentSettings, choice: str, trials: int, nodes: Sequence[Mapping[str, float]]
) -> Reservation:
    """Where a trial's clients live, and what it reserves.

    `auto`: in the trial's own process if nobody asked for actors and either there are trials enough to fill the
    cluster or a round is small; else in actors, as many as its share of the cluster holds. Where the cluster has
    GPUs, `fleet.gpus=auto` gives each process with clients a whole one; trials of small rounds share them.
    """
    cuda = torch_has_cuda()
    fleet = resolved(config.fleet, config.clients, nodes, cuda=cuda)
    slots = max(capacity(nodes, fleet), 1)
    asked = fleet.actors is not None or fleet.clients_per_actor is not None
    steps = config.local.steps if config.local.epochs is None else 50 * config.local.epochs
    small = steps * config.local.batch * config.clients * config.participation.fraction <= SMALL
    if choice == "in_process" or (choice == "auto" and not asked and (trials >= slots or small)):
        alone = resolved_for_trials(config.fleet, trials, small, nodes, cuda=cuda)
        actor_count(dataclasses.replace(alone, actors=1, clients_per_actor=None), 1, nodes)  # or says why not
        return Reservation([bundle_of(alone)], 0, gpus_of(alone))
    count = actor_count(fleet, config.clients, nodes)
    if not asked:
        count = max(1, min(config.clients, slots // max(1, min(trials, slots))))
    return Reservation([{}, *[bundle_of(fleet)] * count], count, gpus_of(fleet))


def at_a_time(reserved: Reservation, fleet: FleetSettings, nodes: Sequence[Mapping[str, float]]) -> int:
    """How many trials with this reservation a cluster holds at the same time."""
    sized = dataclasses.replace(fleet, gpus=reserved.gpus)
    return max(1, capacity(nodes, sized) // max(reserved.actors, 1))


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
        # A file system that hangs answers nobody: a node that says nothing sees nothing.
        ready, _ = ray.wait([*answers.values()], num_returns=len(answers), timeout=_SECONDS)
        blind = [name for name, answer in answers.items() if answer not in ready or not ray.get(answer)]
    finally:
        remove_file(probe)
    if blind:
        raise UserError(
            f"Expected storage that all {len(nodes)} nodes of the cluster share, got '{address}', which "
            f"{', '.join(blind)} cannot read and write within {_SECONDS:g} s: give a network folder or an address, "
            "as in storage=s3://bucket.",
            code="not-shared", path=address,
        )  # fmt: skip


def sees(probe: str) -> bool:
    """Whether this node reads what another one wrote there (an address may name a disk of one node: file://...)."""
    try:
        there = read_text(probe) == _PROBE
    except (OSError, UserError):
        return False
    return there and (is_address(probe) or os.access(Path(probe).parent, os.W_OK))
