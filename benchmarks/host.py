"""What the host does in a stage besides arithmetic: processor time of every stage, with arithmetic next to nothing.

A network of 600 parameters on 8x8 images and batches of four, for ragged clients, in this process on one thread: what
is left are Python, torch's own work for an operation, and the fleet's and the server's bookkeeping. On a GPU all of
this has to be shorter than the kernels, or the GPU waits. The number of device operations is counted on the shadow
device, and gives microseconds for each: the cost model of `gpu` assumes 5.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu import CLIENTS, ENGINES, plan_for
from benchmarks.tables import table
from benchmarks.workload import Workload


def workload(clients: int) -> Workload:
    """Arithmetic next to nothing."""
    return Workload(ragged=True, clients=clients, samples=20, batch=4, model="mlp", shape=(1, 8, 8))


@contextmanager
def stages_timed(into: dict[str, float]) -> Iterator[None]:
    """Processor seconds of every stage."""
    from actors.fleet import InProcessFleet

    reach = InProcessFleet._reach

    def timed(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return reach(self, method, *args, **kwargs)
        finally:
            into[method] = into.get(method, 0.0) + time.process_time() - started

    with mock.patch.object(InProcessFleet, "_reach", timed):
        yield


def measure(clients: int, engine: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over some rounds after a warm-up, by stage; `server` is what happens outside of the stages."""
    from actors.session import InProcessSession

    plan = plan_for(workload(clients), engine, "model.hidden=[8]")
    here = dataclasses.replace(
        plan,
        fleet=dataclasses.replace(plan.fleet, gpus=0.0),
        block=dataclasses.replace(plan.block, gpus=0.0),
    )
    session, taken = InProcessSession(here), []
    for round in range(1, rounds + 2):
        seconds: dict[str, float] = {}
        started = time.process_time()
        with stages_timed(seconds):
            session.run_round(round)
        seconds["server"] = time.process_time() - started - sum(seconds.values())
        taken.append(seconds)
    session.close()
    operations = counted(plan)
    found = {}
    for stage in ("best", "train", "combine", "evaluate", "server"):
        found[stage] = {
            "seconds": float(np.median([each.get(stage, 0.0) for each in taken[1:]])),
            "operations": operations.get(stage, 0),
        }
    return found


def counted(plan: Any) -> dict[str, int]:
    """Device operations of a round by stage, if there were a device."""
    from tests.support.shadow_session import shadow_session

    with shadow_session(plan) as shadow:
        shadow.run_round(1)
        return {stage: counts.operations for stage, counts in shadow.run_round(2).items()}


def run(rounds: int | None, miniature: bool, *, engines: Sequence[str] = ENGINES) -> dict[str, Any]:
    """All numbers of clients and engines."""
    sizes = (12,) if miniature else CLIENTS
    rows = [
        {
            "clients": clients,
            "engine": engine,
            "stages": measure(clients, engine, rounds or (1 if miniature else 5)),
        }
        for clients in sizes
        for engine in engines
    ]
    return {"rows": rows}


def report(result: dict[str, Any]) -> str:
    """A line for each stage."""
    lines = []
    for row in result["rows"]:
        for stage, found in row["stages"].items():
            each = found["seconds"] / found["operations"] if found["operations"] else None
            lines.append(
                [
                    f"{row['clients']} clients, {row['engine']}: {stage}",
                    f"{1e3 * found['seconds']:.1f}",
                    f"{1e6 * found['seconds'] / row['clients']:.0f}",
                    f"{found['operations']:,}" if found["operations"] else "",
                    f"{1e6 * each:.1f}" if each is not None else "",
                ]
            )
    title = "The host's part of a round: processor time with next to no arithmetic, median of rounds"
    return table(title, ["", "ms", "us a client", "operations", "us an operation"], lines)
