"""What an evaluation costs where everybody is visited, and where `evaluation.clients` draws a share of the clients.

Small images, a small network, a round of one client in a thousand: most of a round is its evaluation. Processor time of
this process, in which all clients are. `--clients 400000 --rounds 1` is a large federation, 5 minutes.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.tables import table
from benchmarks.workload import Workload

CLIENTS = 2_000
SHARES = ("everybody", "0.1", "0.01")
LIMIT = 0.3  # of everybody's seconds, with a tenth of the clients


def run(rounds: int | None, miniature: bool, clients: int = CLIENTS) -> dict[str, Any]:
    """`rounds` evaluations of each kind (3 by default), after one that is not counted."""
    from actors.session import InProcessSession

    clients = 200 if miniature else clients
    workload = Workload(clients=clients, samples=2, steps=1, model="mlp", shape=(1, 8, 8))
    found: dict[str, dict[str, float]] = {}
    for share in SHARES:
        drawn = () if share == "everybody" else (f"evaluation.clients={share}",)
        more = ("evaluation.every=1", f"participation.fraction={1 / clients}", *drawn)
        session, seconds, visited = InProcessSession(workload.plan(*more)), [], 0
        for number in range(1, (rounds or 3) + 2):
            started = time.process_time()
            columns = session.run_round(number).clients
            seconds.append(time.process_time() - started)
            visited = int(np.isfinite(np.asarray((columns or {})["accuracy"])).sum())
        found[share] = {"visited": visited, "processor_seconds": float(np.median(seconds[1:]))}
    tenth = found["0.1"]["processor_seconds"] / found["everybody"]["processor_seconds"]
    return {"clients": clients, "limit": LIMIT, "found": found, "tenth": tenth, "kept": tenth <= LIMIT}


def report(result: dict[str, Any]) -> str:
    """One row for each share."""
    title = (
        f"A round of one client and an evaluation, {result['clients']:,} clients; a tenth of them takes "
        f"{result['tenth']:.2f} of everybody's processor time, limit {result['limit']:.2f}"
    )
    rows = [
        [share, f"{at['visited']:,}", f"{at['processor_seconds']:.2f}"]
        for share, at in result["found"].items()
    ]
    return table(title, ["evaluation.clients", "visited", "processor seconds"], rows)
