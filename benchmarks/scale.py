"""Cost of a client and round, and memory per client, from 100 to 5,000 clients on two actors.

One session for each number of clients, all alive at once, and rounds in turn: whatever else the machine does
meets all of them. The cost includes what a round costs once (calls through Ray, the server), shared by its
clients.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.machine import cpu_seconds, proportional_bytes
from benchmarks.tables import shown, spread, table, verdict
from benchmarks.workload import Workload

LIMIT = 1.15
SIZES = (100, 1000, 5000)
WARM_UP = 1


def workload(clients: int) -> Workload:
    """Small images, a small network, ten steps."""
    return Workload(clients=clients, samples=64, model="mlp", shape=(1, 8, 8))


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` turns (6 by default); in a turn, each session does about a thousand clients' work or a round."""
    import ray

    from actors.cluster import connected
    from actors.session import RaySession

    sizes = (10, 40) if miniature else SIZES
    turns = rounds or (2 if miniature else 6)
    found: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        sessions: dict[int, Any] = {}
        pids: dict[int, list[int]] = {}
        for size in sizes:
            # All sessions share the machine's cores: those that wait use none.
            plan = workload(size).plan("fleet.actors=2", "fleet.cpus=0.1")
            if not sessions:
                stack.enter_context(connected(plan.fleet))
            sessions[size] = RaySession(plan)
            stack.callback(sessions[size].close)
            actors = [sessions[size].server, *sessions[size].clients]
            pids[size] = [about["pid"] for about in ray.get([actor.about.remote() for actor in actors])]
            found[size] = {
                "seconds": [],
                "processor_seconds": [],
                "data_bytes": plan.x.nbytes + plan.y.nbytes,
            }
        done = dict.fromkeys(sizes, 0)
        for turn in range(WARM_UP + turns):
            for size in sizes:
                count = max(1, 1000 // size)
                used, started = cpu_seconds(pids[size]), time.perf_counter()
                for _ in range(count):
                    done[size] += 1
                    sessions[size].run_round(done[size])
                if turn >= WARM_UP:
                    clients = count * size
                    found[size]["seconds"].append((time.perf_counter() - started) / clients)
                    found[size]["processor_seconds"].append((cpu_seconds(pids[size]) - used) / clients)
        for size in sizes:
            found[size]["memory_bytes"] = sum(proportional_bytes(pid) for pid in pids[size])
    return _result(found)


def _result(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    smallest, largest = min(found), max(found)
    for at in found.values():
        at["ratios"] = {
            kind: spread(np.asarray(at[kind]) / np.asarray(found[smallest][kind]))
            for kind in ("seconds", "processor_seconds")
        }
    medians = [float(np.median(at["seconds"])) for at in found.values()]
    processor = [float(np.median(at["processor_seconds"])) for at in found.values()]
    growth = (found[largest]["memory_bytes"] - found[smallest]["memory_bytes"]) / (largest - smallest)
    return {
        "limit": LIMIT,
        "workload": workload(largest).facts(),
        "sizes": {str(size): at for size, at in found.items()},
        "largest_over_smallest_cost": max(medians) / min(medians),
        "largest_over_smallest_processor_cost": max(processor) / min(processor),
        "kept": max(medians) / min(medians) <= LIMIT,
        "memory_bytes_per_client": growth,
        "data_bytes_per_client": found[largest]["data_bytes"] / largest,
    }


def report(result: dict[str, Any]) -> str:
    """One row for each number of clients."""
    facts = result["workload"]
    cost = result["largest_over_smallest_cost"]
    title = (
        f"Cost of a client and round ({facts['model']}, {facts['steps']} steps of {facts['batch']}), largest over "
        f"smallest: {cost:.3f}, limit {result['limit']:.2f}: {verdict(cost, result['limit'])} "
        f"(processor time {result['largest_over_smallest_processor_cost']:.3f})\n"
        f"Memory of server and client actors grows by {result['memory_bytes_per_client'] / 1e3:.1f} KB a client, "
        f"of which {result['data_bytes_per_client'] / 1e3:.1f} KB are its data"
    )
    rows = [
        [
            f"{int(size):,}",
            shown({k: v * 1e3 for k, v in spread(at["seconds"]).items()}),
            shown(at["ratios"]["seconds"]),
            shown({k: v * 1e3 for k, v in spread(at["processor_seconds"]).items()}),
            f"{at['memory_bytes'] / 1e6:,.0f}",
        ]
        for size, at in result["sizes"].items()
    ]
    header = ["clients", "ms a client", "over the fewest", "processor ms a client", "memory of actors, MB"]
    return table(title, header, rows)
