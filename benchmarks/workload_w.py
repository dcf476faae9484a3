"""Seconds per round on workload W, beside a bare two-process PyTorch loop that does the same arithmetic.

The two sides take turns round by round, so that whatever else the machine does meets both; the side that
waits sleeps. Ratios are taken pair by pair. Processor seconds stand beside wall-clock seconds: they do not
count the time in which somebody else's work had the cores.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
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

    plan = workload.plan(f"fleet.actors={PROCESSES}", f"fleet.backend={backend}", *overrides)
    with ExitStack() as stack:
        if backend == "ray":
            stack.enter_context(connected(plan.fleet))
        session: Any = RaySession(plan) if backend == "ray" else InProcessSession(plan)
        stack.callback(session.close)
        start = session.models()["models"]["global"]
        bare = stack.enter_context(BareLoop(workload, start))
        seconds: dict[str, list[float]] = {"platform": [], "bare": []}
        processor: dict[str, list[float]] = {"platform": [], "bare": []}
        for round in range(1, WARM_UP + rounds + 1):
            # Whoever goes first in a pair has no advantage: the order alternates.
            for side in ("platform", "bare") if round % 2 else ("bare", "platform"):
                took, used = _timed(side, session, bare, round)
                seconds[side].append(took)
                processor[side].append(used)
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


def _timed(side: str, session: Any, bare: BareLoop, round: int) -> tuple[float, float]:
    everyone = set(tree())
    # What Ray does in the background while the bare loop works is not the bare loop's doing.
    pids = everyone - set(bare.pids) if side == "platform" else set(bare.pids)
    used, started = cpu_seconds(pids), time.perf_counter()
    if side == "platform":
        session.run_round(round)
    else:
        bare.run_round(round)
    return time.perf_counter() - started, cpu_seconds(pids) - used


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Platform over bare, pair by pair."""
    return {
        kind: spread(np.asarray(found[kind]["platform"]) / np.asarray(found[kind]["bare"]))
        for kind in ("seconds", "processor_seconds")
    }


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """Workload W with momentum kept, and (not in miniature) with fresh momentum every round."""
    from actors.cluster import connected
    from foundation.settings import FleetSettings

    rounds = rounds or (2 if miniature else 10)
    variants: dict[str, Any] = {"momentum kept": MINIATURE if miniature else Workload()}
    if not miniature:
        variants["fresh momentum"] = Workload(keep_momentum=False)
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
                f"{found['largest_difference']:.1e}",
            ]
        )
    facts = next(iter(result["variants"].values()))
    workload, rounds = facts["workload"], len(facts["seconds"]["bare"])
    title = (
        f"Workload W: {workload['clients']} clients x {workload['samples']} images, {facts['parameters']:,} "
        f"parameters, {workload['steps']} steps of {workload['batch']}; {rounds} pairs of rounds, median "
        f"(quartiles)\nRatio {result['ratio']:.3f}, limit {result['limit']:.2f}: "
        f"{verdict(result['ratio'], result['limit'])}"
    )
    header = ["", "platform s/round", "bare s/round", "ratio", "ratio of processor time", "models differ by"]
    return table(title, header, rows)
