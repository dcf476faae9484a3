"""`--dry-run`: which trials a sweep would run, on what, and for about how long."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from actors.cluster import cluster_address, connected
from actors.placement import capacity
from actors.session import InProcessSession
from experiments.config import gpu_count
from experiments.plan import make_plan
from experiments.progress import duration
from experiments.sweep import Room, live_nodes, room_for
from experiments.sweep_config import Sweep
from experiments.sweep_directory import sweep_address
from federated_data import build_federation
from foundation.settings import ExperimentSettings

CALIBRATED = 8  # combinations that are tried; the others are taken for their mean
BUDGET = 60.0  # seconds that trying may take
START = 6.0  # seconds until the first round of the first trials: imports, and nothing else

Rows = list[tuple[str, ...]]


def describe(sweep: Sweep) -> Iterable[tuple[str, Rows]]:
    """Titles and rows to print."""
    nodes = _nodes(sweep)
    seeds = f"{len(sweep.seeds)} seed{'' if len(sweep.seeds) == 1 else 's'}"
    points = f" x {sweep.settings.samples} points" if sweep.settings.sampler != "grid" else ""
    title = (
        f"{sweep.planned} trials: {len(sweep.combinations)} combinations{points} x {seeds} ({sweep.seeds})"
    )
    rooms = {
        label: room_for(config, sweep.settings.fleet, sweep.planned, nodes)
        for label, config in sweep.combinations.items()
    }
    yield (
        title,
        [
            (
                label,
                f"{config.rounds} rounds, {config.clients} clients on {config.data.name}",
                _where(rooms[label]),
            )
            for label, config in sweep.combinations.items()
        ],
    )
    yield "Resources", _resources(sweep, nodes, rooms)
    yield "Time", _time(sweep, nodes, rooms)


def _nodes(sweep: Sweep) -> Sequence[Mapping[str, float]]:
    """The nodes of the cluster that the sweep would join, or this machine."""
    fleet = sweep.base.fleet
    if cluster_address(fleet) in (None, "local") or fleet.backend == "in_process":
        return [{"CPU": float(os.cpu_count() or 1), "GPU": float(gpu_count())}]
    with connected(fleet):
        return live_nodes()


def _where(room: Room) -> str:
    share = " and ".join(f"{amount:g} {name}" for name, amount in room.bundles[-1].items())
    if not room.actors:
        return f"clients in the trial's own process, {share}"
    return f"{room.actors} client actor{'' if room.actors == 1 else 's'} of {share} each"


def _resources(sweep: Sweep, nodes: Sequence[Mapping[str, float]], rooms: Mapping[str, Room]) -> Rows:
    settings = sweep.settings
    cpus, gpus = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
    rows: Rows = [
        ("cluster", f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}, {cpus:g} CPUs, {gpus:g} GPUs"),
        ("trials at a time", f"{_at_a_time(sweep, nodes, rooms)}"),
        ("results", sweep_address(sweep)),
    ]
    if sweep.tunes or sweep.space:
        rows.append(
            (
                "tuned by",
                f"{sweep.mode} of {settings.metric} ({settings.sampler}, scheduler {settings.scheduler})",
            )
        )
    return rows


def _at_a_time(sweep: Sweep, nodes: Sequence[Mapping[str, float]], rooms: Mapping[str, Room]) -> int:
    if sweep.base.fleet.backend == "in_process":
        return 1
    slots = max(capacity(nodes, sweep.base.fleet), 1)
    most = max(1, min(slots // max(room.actors, 1) for room in rooms.values()))
    return min(most, sweep.planned, sweep.settings.concurrent or most)


def _time(sweep: Sweep, nodes: Sequence[Mapping[str, float]], rooms: Mapping[str, Room]) -> Rows:
    """From two rounds of some combinations, run here: the second one is timed."""
    began = time.monotonic()
    measured: dict[str, float] = {}
    step = max(1, len(sweep.combinations) // CALIBRATED)
    for label in list(sweep.combinations)[::step]:
        if measured and time.monotonic() - began > BUDGET:
            break
        measured[label] = seconds_per_round(sweep.combinations[label])
    mean = sum(measured.values()) / len(measured)
    per_trial = {
        label: measured.get(label, mean) * config.rounds / max(rooms[label].actors, 1)
        for label, config in sweep.combinations.items()
    }
    each = sum(per_trial.values()) / len(per_trial)
    whole = START + each * sweep.planned / _at_a_time(sweep, nodes, rooms)
    scheduled = (
        " at most: the scheduler stops some early" if sweep.settings.scheduler in ("asha", "median") else ""
    )
    return [
        ("calibrated", f"{len(measured)} of {len(sweep.combinations)} combinations, two rounds each"),
        (
            "seconds per round",
            f"{min(measured.values()):.2g} to {max(measured.values()):.2g} on this machine's CPU",
        ),
        ("one trial", f"about {duration(each)}"),
        ("the sweep", f"about {duration(whole)}{scheduled}"),
    ]


def seconds_per_round(config: ExperimentSettings) -> float:
    """How long the second round takes in this process, without a GPU."""
    fleet = dataclasses.replace(
        config.fleet, backend="in_process", actors=None, clients_per_actor=None, gpus=0.0
    )
    config = dataclasses.replace(config, fleet=fleet)
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    session = InProcessSession(make_plan(config, federation))
    try:
        session.run_round(1)
        began = time.perf_counter()
        session.run_round(2)
        return time.perf_counter() - began
    finally:
        session.close()
