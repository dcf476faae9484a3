"""Memory of the whole process tree on workload W: driver, Ray's own processes, server and client actors.

Images are float32, as most scripts hold them (four times the bytes of what the platform's own data sets have). PSS from
/proc, so that shared memory (the object store, libraries) counts once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.machine import Peak
from benchmarks.tables import table, verdict
from benchmarks.workload import MINIATURE, Workload

LIMIT = 2.0e9  # bytes above the data


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """A few rounds of workload W on two client actors, watched."""
    from actors.cluster import connected
    from actors.session import RaySession

    workload = replace(MINIATURE if miniature else Workload(), floats=True)
    after = []
    peak = Peak()
    peak.start()
    plan = workload.plan("fleet.actors=2")
    with connected(plan.fleet):
        plan, data = plan.in_object_store()  # as a run does it
        session = RaySession(plan, data=data)
        for round in range(1, (rounds or 3) + 1):
            session.run_round(round)
            after.append(peak.look())
        session.close()
    peak.stop()
    size, total = workload.facts()["data_bytes"], sum(peak.largest.values())
    return {
        "limit": LIMIT,
        "workload": workload.facts(),
        "data_bytes": size,
        "peak_bytes": total,
        "above_data_bytes": total - size,
        "kept": total - size <= LIMIT,
        "peak_by_process": peak.largest,
        "after_round_bytes": [sum(look.values()) for look in after],
        "after_last_round_by_process": after[-1],
    }


def report(result: dict[str, Any]) -> str:
    """Largest processes first."""
    above = result["above_data_bytes"]
    title = (
        f"Memory on workload W: peak {result['peak_bytes'] / 1e9:.2f} GB, data "
        f"{result['data_bytes'] / 1e9:.2f} GB, above it {above / 1e9:.2f} GB, limit "
        f"{result['limit'] / 1e9:.1f} GB: {verdict(above, result['limit'])}"
    )
    processes = sorted(result["peak_by_process"].items(), key=lambda item: -item[1])
    rows = [[name, f"{size / 1e6:,.0f}"] for name, size in processes]
    rows += [
        [f"all, after round {number}", f"{size / 1e6:,.0f}"]
        for number, size in enumerate(result["after_round_bytes"], 1)
    ]
    return table(title, ["process at the peak", "MB"], rows)
