"""`--dry-run`: which trials a sweep would run, on what, and for about how long."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from actors.cluster import cluster_address, connected, nodes_of
from actors.devices import device_names, torch_has_cuda
from actors.node_data import shared_federation
from actors.placement import idle_gpus
from actors.session import InProcessSession, Plan, RaySession, Session
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.plan import make_plan
from archipelago.experiments.progress import duration
from archipelago.strategies.method import without_late_addons
from archipelago.sweeps.config import Sweep
from archipelago.sweeps.directory import sweep_address
from archipelago.sweeps.resources import Reservation, at_a_time, reservation_for
from archipelago.sweeps.shared_prefix import branch_point, shared_prefixes

CALIBRATED = 20  # combinations that are tried; the others are taken for their mean
SAMPLED = 4  # clients of a miniature
MINIATURE = 10  # rounds of a miniature
BUDGET = 60.0  # seconds that trying may take
AGAIN = 1.0  # seconds after which a calibration that did not end is told to end again
START = 6.0  # seconds until the first round of the first trials: imports, and nothing else

Rows = list[tuple[str, ...]]


def describe(sweep: Sweep) -> Iterable[tuple[str, Rows]]:
    """Titles and rows to print."""
    nodes = nodes_of(sweep.base.fleet)
    seeds = f"{len(sweep.seeds)} seed{'' if len(sweep.seeds) == 1 else 's'}"
    if sweep.partitions != [None]:
        seeds = f"{len(sweep.partitions)} partitions x {seeds}"
    points = f" x {sweep.sampler.count} points" if sweep.sampler.draws else ""
    title = (
        f"{sweep.planned} trials: {len(sweep.combinations)} combinations{points} x {seeds} ({sweep.seeds})"
    )
    reserved = {
        label: reservation_for(config, sweep.settings.fleet, sweep.planned, nodes)
        for label, config in sweep.combinations.items()
    }
    yield (
        title,
        [
            (
                label,
                f"{config.rounds} rounds, {config.clients} clients on {config.data.name}",
                _where(reserved[label]),
            )
            for label, config in sweep.combinations.items()
        ],
    )
    yield "Resources", _resources(sweep, nodes, reserved)
    yield "Time", _time(sweep, nodes, reserved)


def _where(reservation: Reservation) -> str:
    share = " and ".join(f"{amount:g} {name}" for name, amount in reservation.bundles[-1].items())
    if not reservation.actors:
        return f"clients in the trial's own process, {share}"
    return f"{reservation.actors} client actor{'' if reservation.actors == 1 else 's'} of {share} each"


def _resources(
    sweep: Sweep, nodes: Sequence[Mapping[str, float]], reserved: Mapping[str, Reservation]
) -> Rows:
    settings = sweep.settings
    cpus, gpus = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
    rows: Rows = [
        ("cluster", f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}, {cpus:g} CPUs, {gpus:g} GPUs"),
        ("devices", _devices(sweep, nodes, reserved)),
        ("trials at a time", f"{_at_a_time(sweep, nodes, reserved)}"),
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


def _devices(sweep: Sweep, nodes: Sequence[Mapping[str, float]], reserved: Mapping[str, Reservation]) -> str:
    """What trials compute on, and why GPUs stay idle."""
    kinds = sorted({each.gpus for each in reserved.values()})
    words = [f"{gpus:g} GPU for each process with clients" if gpus else "CPUs" for gpus in kinds]
    trials = _at_a_time(sweep, nodes, reserved)
    processes = trials * max(max(each.actors, 1) for each in reserved.values())
    asked, cuda = sweep.base.fleet, torch_has_cuda()
    sized = dataclasses.replace(asked, gpus=kinds[-1])
    idle = idle_gpus(asked, sized, processes, processes, nodes, cuda=cuda, of="processes with clients")
    base, names = sweep.base, device_names(nodes) if kinds[-1] else ""
    words[-1] += f" ({names})" if names else ""
    return f"{' and '.join(words)}, precision {base.precision}" + (f"; {idle}" if idle else "")


def _at_a_time(
    sweep: Sweep, nodes: Sequence[Mapping[str, float]], reserved: Mapping[str, Reservation]
) -> int:
    if sweep.base.fleet.backend == "in_process":
        return 1
    most = min(at_a_time(each, sweep.base.fleet, nodes) for each in reserved.values())
    return min(most, sweep.planned, sweep.settings.concurrent or most)


def _time(sweep: Sweep, nodes: Sequence[Mapping[str, float]], reserved: Mapping[str, Reservation]) -> Rows:
    """From miniatures of some combinations, run on what their trials would have."""
    measured, tried = _calibrated(sweep, reserved)
    on_gpus = any(each.gpus for each in reserved.values())
    where = "a GPU of the cluster" if on_gpus else "this machine's CPU"
    sampled = "the clients of one process" if on_gpus else f"{SAMPLED} clients"
    if not measured:
        return [
            ("calibrated", f"0 of {len(sweep.combinations)} combinations: {tried} tried, and stopped"),
            (
                "one round",
                f"more than {duration(BUDGET / MINIATURE)} for {sampled} on {where}",
            ),
        ]
    mean = sum(measured.values()) / len(measured)
    prefixes = {} if sweep.tunes else shared_prefixes(sweep.trials())
    begun = {trial.combination for trial in sweep.trials() if trial.name in prefixes}
    per_trial = {
        label: measured.get(label, mean)
        * (config.rounds - branch_point(config) * (label in begun))
        / max(reserved[label].actors, 1)
        for label, config in sweep.combinations.items()
    }
    each = sum(per_trial.values()) / len(per_trial)
    whole = START + each * sweep.planned / _at_a_time(sweep, nodes, reserved)
    scheduled = " at most: the scheduler stops some early" if sweep.scheduler.stops else ""
    stopped = "" if tried == len(measured) else f"; {tried - len(measured)} took too long and was stopped"
    return [
        (
            "calibrated",
            f"{len(measured)} of {len(sweep.combinations)} combinations, {MINIATURE} rounds of {sampled} "
            f"each{stopped}",
        ),
        (
            "seconds per round",
            f"{min(measured.values()):.2g} to {max(measured.values()):.2g} on {where}",
        ),
        ("one trial", f"about {duration(each)}"),
        ("the sweep", f"about {duration(whole)}{scheduled}"),
    ]


def _calibrated(sweep: Sweep, reserved: Mapping[str, Reservation]) -> tuple[dict[str, float], int]:
    """Seconds of a round by combination, of some of them; and how many were tried."""
    began = time.monotonic()
    measured: dict[str, float] = {}
    tried = 0
    step = max(1, len(sweep.combinations) // CALIBRATED)
    for label in list(sweep.combinations)[::step]:
        left = BUDGET - (time.monotonic() - began)
        if left <= 0:
            break
        tried += 1
        found = seconds_per_round(sweep.combinations[label], left, reserved=reserved[label])
        if found is not None:
            measured[label] = found
    return measured, tried


def seconds_per_round(
    config: ExperimentSettings,
    limit: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
    reserved: Reservation | None = None,
) -> float | None:
    """How long a round takes in one process of a trial, its share of an evaluation included.

    A miniature of the whole run, so that a warm-up or a level has its share: a few of the clients, ten rounds of which
    the first does not count, every second one evaluated. Where the trial reserves GPUs: on one of them, with all
    clients that it would serve, because what is batched costs no more for more clients. None after `limit` seconds.
    """
    gpus = reserved.gpus if reserved is not None else 0.0
    actors = max(reserved.actors, 1) if reserved is not None else 1
    count = -(-config.clients // actors) if gpus else min(SAMPLED, config.clients)
    with contextlib.suppress(_TooLong), _at_most(limit):
        federation, _ = shared_federation(config)
        kept = np.unique(np.linspace(0, config.clients - 1, count).astype(np.int64))
        tried = _miniature(config, len(kept), gpus)
        with _session(make_plan(tried, federation.only(kept))) as session:
            session.run_round(1)
            seconds: list[float] = []
            took_part: list[Any] = []
            for number in range(2, MINIATURE + 1):
                began = clock()
                took_part.append(session.run_round(number).metrics["participants"])
                seconds.append(clock() - began)
        # Even rounds are evaluated: each against the plain one after it. The first round is taken for its second.
        extra = max(float(np.mean([seconds[i] - seconds[i + 1] for i in range(0, MINIATURE - 2, 2)])), 0.0)
        plain = [each - extra * (i % 2 == 0) for i, each in enumerate(seconds)]
        everyone = config.clients * (1.0 - config.holdout_clients)
        share = max(1.0, everyone * config.participation.fraction) / max(float(np.mean(took_part)), 1.0)
        mean = float(np.mean([plain[0], *plain])) * share
        return mean + extra * config.clients / len(kept) / config.evaluation.every  # it asks every client
    return None


@contextlib.contextmanager
def _session(plan: Plan) -> Iterator[Session]:
    """In this process, or, where the GPUs are elsewhere, in one actor there."""
    fleet = plan.fleet
    with contextlib.ExitStack() as stack:
        if fleet.gpus and fleet.backend == "ray" and cluster_address(fleet) not in (None, "local"):
            stack.enter_context(connected(fleet))
            session: Session = RaySession(plan)
        else:
            session = InProcessSession(plan)
        stack.callback(session.close)
        stack.callback(_no_limit)  # called first: closing is not interrupted
        yield session


def _miniature(config: ExperimentSettings, clients: int, gpus: float) -> ExperimentSettings:
    fleet = dataclasses.replace(config.fleet, actors=1, clients_per_actor=None, gpus=gpus)
    evaluation = dataclasses.replace(config.evaluation, every=2)
    # What belongs to the last evaluations would be a third of ten rounds.
    method = without_late_addons(config.method)
    return dataclasses.replace(
        config,
        method=method,
        fleet=fleet,
        evaluation=evaluation,
        rounds=MINIATURE,
        clients=clients,
        precision=config.precision if gpus else "32",
        holdout_clients=0.0,
    )


def _no_limit() -> None:
    """Switch the limit of `_at_most` off before it ends."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0)


class _TooLong(BaseException):
    """What a calibration ends with that is not ready in time; no client's own failure."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` inside after that time; only a program's main thread can be interrupted so.

    Python drops what is raised while a finalizer or a callback of the garbage collector runs, and such a calibration
    would never end. The collector therefore rests meanwhile, and the exception comes again every `AGAIN` seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _TooLong

    collected = gc.isenabled()
    gc.disable()
    before, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    others, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if collected:
            gc.enable()
        if others:  # somebody else waits for this signal, too
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 0.001))
