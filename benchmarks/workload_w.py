"""Seconds per round on workload W, beside a bare two-process PyTorch loop that does the same arithmetic.

The two sides take turns round by round, so that whatever else the machine does meets both; the side that
waits sleeps. Ratios are taken pair by pair. Processor seconds stand beside wall-clock seconds: they do not
count the time in which somebody else's work had the cores.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.bare import PROCESSES, BareLoop
from benchmarks.machine import cpu_seconds, tree
from benchmarks.tables import shown, spread, table, verdict
from benchmarks.workload import MINIATURE, Workload

LIMIT = 1.10
WARM_UP = 2


def compare(workload: Workload, rounds: int, *overrides: str, backend: str = "ray") -> dict[str, Any]:
    """Rounds of both sides in turn; seconds of each, and how far apart their models are after the first."""
    from actors.cluster import connected
    from actors.session import InProcessSession, RaySession

    actors = [f"fleet.actors={PROCESSES}"] if backend == "ray" else []
    plan = workload.plan(*actors, f"fleet.backend={backend}", *overrides)
    with ExitStack() as stack:
        if backend == "ray":
            stack.enter_context(connected(plan.fleet))
        session: Any = RaySession(plan) if backend == "ray" else InProcessSession(plan)
        stack.callback(session.close)
        start = session.models()["models"]["global"]
        bare = stack.enter_context(BareLoop(workload, start))
        workers = _workers(session) if backend == "ray" else [os.getpid()]
        seconds: dict[str, list[float]] = {"platform": [], "bare": []}
        processor: dict[str, list[float]] = {"platform": [], "client actors": [], "bare": []}
        for round in range(1, WARM_UP + rounds + 1):
            # Whoever goes first in a pair has no advantage: the order alternates.
            for side in ("platform", "bare") if round % 2 else ("bare", "platform"):
                pids = {"bare": bare.pids}
                if side == "platform":
                    # Everything but the bare loop: the driver, the server, the actors, and all of Ray.
                    pids = {"platform": list(set(tree()) - set(bare.pids)), "client actors": workers}
                before = {name: cpu_seconds(those) for name, those in pids.items()}
                started = time.perf_counter()
                (session if side == "platform" else bare).run_round(round)
                seconds[side].append(time.perf_counter() - started)
                for name, those in pids.items():
                    processor[name].append(cpu_seconds(those) - before[name])
            if round == 1:  # later, rounding itself is trained on: what differs by one bit drifts apart
                ours, theirs = session.models()["models"]["global"], bare.model.clone().numpy()
        return {
            "workload": workload.facts(),
            "overrides": list(overrides),
            "backend": backend,
            "parameters": len(ours),
            "warm_up_rounds": WARM_UP,
            "seconds": {side: values[WARM_UP:] for side, values in seconds.items()},
            "processor_seconds": {side: values[WARM_UP:] for side, values in processor.items()},
            "largest_change": float(np.max(np.abs(ours - start))),
            "largest_difference": float(np.max(np.abs(ours - theirs))),
        }


def _workers(session: Any) -> list[int]:
    import ray

    return [about["pid"] for about in ray.get([actor.about.remote() for actor in session.clients])]


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Over the bare loop, pair by pair: seconds, processor time of all processes and of the client actors."""
    took = found["seconds"]
    # A miniature's round may be over within one tick of the processor's clock.
    used = {side: np.maximum(values, 0.01) for side, values in found["processor_seconds"].items()}
    return {
        "seconds": spread(np.divide(took["platform"], took["bare"])),
        "processor_seconds": spread(np.divide(used["platform"], used["bare"])),
        "processor_seconds_of_client_actors": spread(np.divide(used["client actors"], used["bare"])),
    }


def run(rounds: int | None, miniature: bool, *, ragged: bool = False) -> dict[str, Any]:
    """Workload W with momentum kept, and (not in miniature) with fresh momentum every round.

    `ragged`: as many images in all, in unequal numbers (cluster-wise Dirichlet).
    """
    from actors.cluster import connected
    from archipelago.core.settings import FleetSettings

    rounds = rounds or (2 if miniature else 10)
    workload = replace(MINIATURE if miniature else Workload(), ragged=ragged)
    variants: dict[str, Any] = {"momentum kept": workload}
    if not miniature:
        variants["fresh momentum"] = replace(workload, keep_momentum=False)
    with connected(FleetSettings()):
        for name, workload in variants.items():
            found = compare(workload, rounds)
            variants[name] = {**found, "ratios": ratios(found)}
    ratio = variants["momentum kept"]["ratios"]["seconds"]["median"]
    return {"limit": LIMIT, "ratio": ratio, "kept": ratio <= LIMIT, "variants": variants}


def report(result: dict[str, Any]) -> str:
    """What a reader wants to see first."""
    rows = []
    for name, found in result["variants"].items():
        seconds = {side: spread(values) for side, values in found["seconds"].items()}
        rows.append(
            [
                name,
                shown(seconds["platform"]),
                shown(seconds["bare"]),
                shown(found["ratios"]["seconds"]),
                shown(found["ratios"]["processor_seconds"]),
                shown(found["ratios"]["processor_seconds_of_client_actors"]),
                f"{found['largest_difference']:.1e}",
            ]
        )
    facts = next(iter(result["variants"].values()))
    workload, rounds = facts["workload"], len(facts["seconds"]["bare"])
    title = (
        f"Workload W{', ragged' if workload['ragged'] else ''}: {workload['clients']} clients x {workload['samples']} "
        f"images{' on average' if workload['ragged'] else ''}, {facts['parameters']:,} "
        f"parameters, {workload['steps']} steps of {workload['batch']}; {rounds} pairs of rounds, median "
        f"(quartiles)\nRatio {result['ratio']:.3f}, limit {result['limit']:.2f}: "
        f"{verdict(result['ratio'], result['limit'])}"
    )
    header = [
        "",
        "platform s/round",
        "bare s/round",
        "ratio",
        "processor time, all of Ray",
        "processor time, client actors",
        "models differ by",
    ]
    return table(title, header, rows)
