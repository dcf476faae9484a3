"""How many client actors there are, which clients live in which, and whether the cluster can hold them.

Pure arithmetic on resources: nothing here talks to Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from actors.balance import balanced
from archipelago.core.errors import UserError
from archipelago.core.settings import FleetSettings, LocalSettings

Node = Mapping[str, float]  # {"CPU": 8.0, "GPU": 2.0}


def fits(node: Node, cpus: float, gpus: float) -> int:
    """How many actors of this size a node holds; a share of a GPU never spans two devices.

    >>> fits({"CPU": 16, "GPU": 2}, cpus=1, gpus=0.4)
    4
    >>> fits({"CPU": 3, "GPU": 2}, cpus=1, gpus=0.4)
    3
    """
    by_cpu = math.floor(node.get("CPU", 0.0) / cpus + 1e-9)
    if gpus <= 0:
        return by_cpu
    devices = node.get("GPU", 0.0)
    per_device = math.floor(1 / gpus + 1e-9)
    # Whole devices, or what others left of one; what is left of several may be less than a share of each.
    exact = gpus >= 1 or devices < 1
    by_gpu = math.floor(devices / gpus + 1e-9) if exact else int(devices) * per_device
    return min(by_cpu, by_gpu)


def capacity(nodes: Sequence[Node], fleet: FleetSettings) -> int:
    """How many client actors a cluster holds."""
    return sum(fits(node, fleet.cpus, fleet.gpus) for node in nodes)


def actor_count(fleet: FleetSettings, clients: int, nodes: Sequence[Node], *, shrink: bool = False) -> int:
    """How many client actors to start; a sentence if the cluster cannot hold what was asked for.

    `shrink` (after a loss) takes what is left instead of refusing.
    """
    room = capacity(nodes, fleet)
    if fleet.clients_per_actor is not None:
        wanted = math.ceil(clients / fleet.clients_per_actor)
    elif fleet.actors is not None:
        wanted = min(fleet.actors, clients)
    else:
        wanted = min(clients, max(room, 1))
    if wanted <= room:
        return wanted
    if shrink and room >= 1:
        return room
    raise UserError(_cannot_hold(wanted, room, fleet, nodes))


def _cannot_hold(wanted: int, room: int, fleet: FleetSettings, nodes: Sequence[Node]) -> str:
    cpus = sum(node.get("CPU", 0.0) for node in nodes)
    gpus = sum(node.get("GPU", 0.0) for node in nodes)
    each = f"{fleet.cpus:g} CPU" + (f" and {fleet.gpus:g} GPU" if fleet.gpus else "")
    has = f"{cpus:g} CPU{'' if cpus == 1 else 's'} and {gpus:g} GPU{'' if gpus == 1 else 's'}"
    if fleet.gpus and not gpus:
        remedy = "set fleet.gpus=0, or join a cluster with GPUs (fleet.address or RAY_ADDRESS)"
    elif room:
        remedy = f"set fleet.actors={room} (or fewer), or ask for less per actor (fleet.cpus, fleet.gpus)"
    else:
        remedy = "ask for less per actor (fleet.cpus, fleet.gpus)"
    return (
        f"Expected room for {wanted} client actor{'' if wanted == 1 else 's'} of {each} each, but the "
        f"cluster has {has} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}, which holds {room}: {remedy}."
    )


def trained_samples(
    local: LocalSettings, sizes: npt.NDArray[np.int64], share: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Samples of one local training of each client, a straggler doing a share of its steps.

    Whole passes, then batches of one more; a pass is over with a short batch (see `ClientBlock._batches`).

    >>> trained_samples(LocalSettings(steps=3, batch=4), np.array([6, 20]), np.ones(2))
    array([10, 12])
    """
    per_pass = -(-sizes // local.batch)
    steps = local.steps if local.epochs is None else local.epochs * per_pass
    steps = np.maximum(1, (steps * share).astype(np.int64))
    return steps // per_pass * sizes + np.minimum(steps % per_pass * local.batch, sizes)


def layout(
    costs: npt.NDArray[np.float64], actors: int, clients_per_actor: int | None = None
) -> list[list[int]]:
    """Clients of each actor: balanced by cost (one row, or one for every barrier), or blocks of a fixed number.

    >>> layout(np.array([4.0, 1.0, 1.0, 2.0]), 2)
    [[0], [1, 2, 3]]
    >>> layout(np.ones(5), 3, clients_per_actor=2)
    [[0, 1], [2, 3], [4]]
    """
    table = np.atleast_2d(costs)
    clients = table.shape[1]
    if clients_per_actor is not None and math.ceil(clients / clients_per_actor) == actors:
        return [
            list(range(at, min(at + clients_per_actor, clients)))
            for at in range(0, clients, clients_per_actor)
        ]
    return balanced(table, actors)
