"""How many client actors there are, which clients live in which, and whether the cluster can hold them.

Pure arithmetic on resources: nothing here talks to Ray.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from actors.balance import balanced
from archipelago.core.errors import UserError
from archipelago.core.settings import FleetSettings

Node = Mapping[str, float]  # {"CPU": 8.0, "GPU": 2.0}
SHARING = 4  # trials of small rounds that share a GPU at most: each alone leaves most of it unused


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


def resolved(
    fleet: FleetSettings, clients: int, nodes: Sequence[Node], *, cuda: bool = True
) -> FleetSettings:
    """The settings with a number in place of `gpus=auto`: the one place where that is decided.

    One whole device per actor wherever a node has one; devices are shared evenly if more actors were asked for than
    there are devices. None where no node has one, where torch cannot use it (`cuda`), or where the actors that were
    asked for fit on the CPUs of the cluster, but not on the nodes with GPUs.

    >>> mixed = [{"CPU": 8}, {"CPU": 16, "GPU": 2}]
    >>> [resolved(FleetSettings(actors=count), 50, mixed).gpus for count in (None, 1, 4, 6, 20)]
    [1.0, 1.0, 0.5, 0.3333, 0.0]
    >>> resolved(FleetSettings(actors=8), 50, [{"CPU": 2, "GPU": 1}]).gpus  # two of them fit, on CPUs or on the GPU
    0.5
    >>> resolved(FleetSettings(), 50, [{"CPU": 8}]).gpus, resolved(FleetSettings(gpus=0.0), 50, mixed).gpus
    (0.0, 0.0)
    """
    if fleet.gpus is not None:
        return fleet
    wanted = wanted_actors(fleet, clients) or 1
    with_gpus = [node for node in nodes if cuda and node.get("GPU", 0.0) >= 1]
    most = max((fits(node, fleet.cpus, 0.0) for node in with_gpus), default=0)
    # Ray counts in ten-thousandths: a third of a device is 0.3333.
    shares = [math.floor(1e4 / sharing) / 1e4 for sharing in range(1, min(wanted, most) + 1)]
    sizes = [dataclasses.replace(fleet, gpus=gpus) for gpus in shares]
    on_cpus = dataclasses.replace(fleet, gpus=0.0)
    best = max(sizes, key=lambda sized: min(capacity(nodes, sized), wanted), default=on_cpus)
    return on_cpus if capacity(nodes, best) < wanted <= capacity(nodes, on_cpus) else best


def resolved_for_trials(
    fleet: FleetSettings, trials: int, small: bool, nodes: Sequence[Node], *, cuda: bool = True
) -> FleetSettings:
    """What `gpus=auto` means for trials whose clients live in the trial's own process.

    A whole device each; up to SHARING trials of small rounds on one device if there are more trials than devices.

    >>> [resolved_for_trials(FleetSettings(), trials, True, [{"CPU": 16, "GPU": 2}]).gpus for trials in (2, 3, 50)]
    [1.0, 0.5, 0.25]
    >>> resolved_for_trials(FleetSettings(), 50, False, [{"CPU": 16, "GPU": 2}]).gpus
    1.0
    """
    alone = dataclasses.replace(fleet, actors=None, clients_per_actor=None)
    whole = resolved(alone, 1, nodes, cuda=cuda)
    if fleet.gpus is not None or not whole.gpus or not small:
        return whole
    devices = max(capacity(nodes, whole), 1)
    return dataclasses.replace(alone, gpus=1.0 / max(1, min(SHARING, math.ceil(trials / devices))))


def capacity(nodes: Sequence[Node], fleet: FleetSettings) -> int:
    """How many client actors of resolved settings a cluster holds."""
    return sum(fits(node, fleet.cpus, gpus_of(fleet)) for node in nodes)


def gpus_of(fleet: FleetSettings) -> float:
    """GPUs per actor of resolved settings."""
    if fleet.gpus is None:
        raise ValueError("fleet.gpus=auto has no number yet: call `resolved` first")
    return fleet.gpus


def bundle_of(fleet: FleetSettings) -> dict[str, float]:
    """What Ray reserves for one actor of resolved settings.

    >>> bundle_of(FleetSettings(gpus=0.5)), bundle_of(FleetSettings(gpus=0.0))
    ({'CPU': 1.0, 'GPU': 0.5}, {'CPU': 1.0})
    """
    gpus = gpus_of(fleet)
    return {"CPU": fleet.cpus, **({"GPU": gpus} if gpus else {})}


def wanted_actors(fleet: FleetSettings, clients: int) -> int | None:
    """The number of actors that was asked for; None: as many as fit."""
    if fleet.clients_per_actor is not None:
        return math.ceil(clients / fleet.clients_per_actor)
    return None if fleet.actors is None else min(fleet.actors, clients)


def actor_count(fleet: FleetSettings, clients: int, nodes: Sequence[Node], *, shrink: bool = False) -> int:
    """How many client actors of resolved settings to start; a sentence if the cluster cannot hold what was asked for.

    `shrink` (after a loss) takes what is left instead of refusing.
    """
    most = capacity(nodes, fleet)
    wanted = wanted_actors(fleet, clients) or min(clients, max(most, 1))
    if wanted <= most:
        return wanted
    if shrink and most >= 1:
        return most
    raise UserError(_cannot_hold(wanted, most, fleet, nodes), code="capacity", wanted=wanted, capacity=most)


def _cannot_hold(wanted: int, most: int, fleet: FleetSettings, nodes: Sequence[Node]) -> str:
    gpus = _total(nodes, "GPU")
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundle_of(fleet).items())
    has = f"{_count(_total(nodes, 'CPU'), 'CPU')} and {_count(gpus, 'GPU')}"
    if fleet.gpus and not gpus:
        remedy = "set fleet.gpus=0, or join a cluster with GPUs (fleet.address or RAY_ADDRESS)"
    elif most:
        remedy = f"set fleet.actors={most} (or fewer), or ask for less per actor (fleet.cpus, fleet.gpus)"
    else:
        remedy = "ask for less per actor (fleet.cpus, fleet.gpus)"
    return (
        f"Expected capacity for {_count(wanted, 'client actor')} of {each} each, but the "
        f"cluster has {has} on {_count(len(nodes), 'node')}, which holds {most}: {remedy}."
    )


def idle_gpus(
    asked: FleetSettings,
    sized: FleetSettings,
    clients: int,
    actors: int,
    nodes: Sequence[Node],
    *,
    cuda: bool = True,
    alone: bool = False,
    of: str = "clients",
) -> str:
    """A sentence about the GPUs of a cluster that a run does not use, and why; empty if it uses all.

    `asked` is what the user set, `sized` the same resolved, `actors` how many of them there are; `alone`: all of it
    is one process, without Ray.

    >>> nodes = [{"CPU": 8, "GPU": 4}]
    >>> idle_gpus(FleetSettings(), FleetSettings(gpus=1.0), 3, 3, nodes)
    '1 of 4 GPUs stays idle: there are fewer clients (3) than GPUs.'
    >>> idle_gpus(FleetSettings(gpus=0.0), FleetSettings(gpus=0.0), 20, 8, nodes)
    '4 of 4 GPUs stay idle: fleet.gpus=0 was set.'
    """
    total, gpus = int(_total(nodes, "GPU")), gpus_of(sized)
    used = math.ceil(actors / math.floor(1 / gpus + 1e-9)) if gpus else 0
    idle = total - used
    if idle <= 0:
        return ""
    if asked.gpus == 0:
        why = "fleet.gpus=0 was set"
    elif not gpus and not cuda:
        why = "torch is a CPU build here (install its CUDA build, or set fleet.gpus if only this machine lacks it)"
    elif not gpus:
        wanted = _count(wanted_actors(asked, clients) or 1, "actor")
        why = f"no node with GPUs holds {wanted} of {asked.cpus:g} CPU each"
    elif alone:
        why = "fleet.backend=in_process computes on one"
    elif asked.actors is not None or asked.clients_per_actor is not None:
        name = "actors" if asked.actors is not None else "clients_per_actor"
        why = f"fleet.{name}={getattr(asked, name)} was set"
    elif actors >= clients:
        why = f"there are fewer {of} ({clients}) than GPUs"
    elif actors >= capacity(nodes, sized):
        why = f"the CPUs of their nodes hold no more actors of {asked.cpus:g} CPU (fleet.cpus)"
    else:
        why = "others use them"
    return f"{idle} of {_count(total, 'GPU')} {'stays' if idle == 1 else 'stay'} idle: {why}."


def _total(nodes: Sequence[Node], name: str) -> float:
    return sum(node.get(name, 0.0) for node in nodes)


def _count(amount: float, noun: str) -> str:
    return f"{amount:g} {noun}{'' if amount == 1 else 's'}"


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
