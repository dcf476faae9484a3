"""What large models cost the processes between the clients: sums, the server's peak, and checkpoints.

Three questions, each with real Ray actors or real arrays:

- how long fixed-point sums take for each client, chunked (`partial_sums`) and as they were taken until 0.2.0;
- whether the server's memory grows with the number of client actors that add their sums up (K = 10 models);
- whether the driver's and the server's memory grow with the number of clients whose states a checkpoint holds.

A multi-layer perceptron stands for the large network: what is counted is the number of its parameters.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import table, verdict
from benchmarks.workload import Workload

SLOPE = (
    0.25  # of what a client (an actor's sums) holds may stay in the driver or server for each more of them
)
K = 10
PARAMETERS = {"sums": (62_006, 11_200_000), "tree": 11_200_000, "checkpoints": 2_800_000}


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` repetitions of each timing (5 by default)."""
    tree, stored = (PARAMETERS[part] // (100 if miniature else 1) for part in ("tree", "checkpoints"))
    actors = (1, 2) if miniature else (2, 4, 8)
    clients = (2, 4) if miniature else (10, 20, 40)
    sums = [_sums(size // (100 if miniature else 1), rounds or 5) for size in PARAMETERS["sums"]]
    at_actors = {count: _tree(tree, count) for count in actors}
    at_clients = {count: _checkpoints(stored, count) for count in clients}
    dense, state = 8 * K * tree, 2 * 4 * stored
    slopes = {
        "server_a_client_actor": _slope(at_actors, "server") / dense,
        "driver_a_client": _slope(at_clients, "driver") / state,
        "server_a_client": _slope(at_clients, "server") / state,
    }
    return {
        "limit": SLOPE,
        "sums": sums,
        "tree": {"parameters": tree, "models": K, "dense_sum_bytes": dense, "actors": at_actors},
        "checkpoints": {"parameters": stored, "client_state_bytes": state, "clients": at_clients},
        "slopes": slopes,
        "kept": max(slopes.values()) <= SLOPE,
    }


def _slope(found: dict[int, dict[str, Any]], process: str) -> float:
    """Bytes of its own memory that a process grows by, at its peak, for each more."""
    counts = list(found)
    peaks = [found[count][process]["peak_bytes"] for count in counts]
    return float(np.polyfit(counts, peaks, 1)[0])


def _sums(size: int, repetitions: int, clients: int = 8) -> dict[str, Any]:
    """Processor seconds a client of one-hot weights, the common case: the median of a few, whatever else runs."""
    from archipelago.strategies.parameters import (
        fixed_point_exponents,
        normalised_rows,
        one_hot,
        partial_sums,
    )

    rng = np.random.default_rng(0)
    values = [(0.05 * rng.standard_normal(size)).astype(np.float32) for _ in range(clients)]
    weights = normalised_rows(one_hot(np.arange(clients) % 4, 4, np.arange(1.0, clients + 1)))
    exponents = fixed_point_exponents(weights, [float(np.abs(value).max()) for value in values])
    seconds: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(repetitions):
        for name, function in (("before", _sums_before), ("now", partial_sums)):
            started = time.process_time()
            found = function(values, weights, exponents, size)
            seconds[name].append((time.process_time() - started) / clients)
            seconds.setdefault("bits", []).append(float(found.sum(dtype=np.int64)))
    assert len(set(seconds.pop("bits"))) == 1
    return {"parameters": size, **{name: float(np.median(each)) for name, each in seconds.items()}}


def _sums_before(values: Any, weights: Any, exponents: Any, size: int) -> Any:
    """One pass over all columns for each operation, with temporary copies."""
    totals, scratch = np.zeros((len(weights), size), np.int64), np.empty(size)
    for row, column in zip(*np.nonzero(weights), strict=True):
        np.multiply(values[column], weights[row, column] * 2.0 ** int(exponents[row]), out=scratch)
        np.rint(scratch, out=scratch)
        totals[row] += scratch.astype(np.int64)
    return totals


def _plan(parameters: int, clients: int, *settings: str) -> Any:
    hidden = max(1, round(parameters / (3072 + 1 + 10)))
    workload = Workload(clients=clients, samples=4, steps=1, batch=4, model="mlp")
    return workload.plan(f"model.hidden=[{hidden}]", *settings)


def _tree(parameters: int, actors: int) -> dict[str, Any]:
    """Two rounds of IFCA with 16 clients; the server's memory, before the first and at its peak."""
    import ray

    from actors.cluster import connected
    from actors.session import RaySession

    plan = _plan(parameters, 16, "method=ifca", f"clusters={K}", f"fleet.actors={actors}", "fleet.cpus=0.1")
    with connected(plan.fleet):
        session = RaySession(plan)
        pid = ray.get(session.server.about.remote())["pid"]
        with Watched({"server": pid}) as watched:
            for round in (1, 2):
                session.run_round(round)
        session.close()
    return watched.found


def _checkpoints(parameters: int, clients: int) -> dict[str, Any]:
    """Train, write a checkpoint, train on while it is written, restore it on other actors."""
    import os

    import ray

    from actors.cluster import connected
    from actors.session import Checkpoint, RaySession
    from archipelago.runs.checkpoints import CheckpointWriter, latest

    plan = _plan(parameters, clients, "fleet.actors=2", "fleet.cpus=0.1")
    with connected(plan.fleet), tempfile.TemporaryDirectory(prefix="archipelago-benchmark-") as folder:
        session = RaySession(plan)
        session.run_round(1)
        processes = {"driver": os.getpid(), "server": ray.get(session.server.about.remote())["pid"]}
        with Watched(processes) as watched:
            started = time.perf_counter()
            writer = CheckpointWriter(folder, every=1, keep=1)
            writer.submit(1, session.snapshot())
            session.run_round(2)
            writer.close()
            seconds = time.perf_counter() - started
            session.close()
            found = latest(folder, deep=False)
            assert found is not None
            again = RaySession(plan, Checkpoint(found[1]["server"], found[1]))
            again.run_round(2)
        size = sum(file.stat().st_size for file in Path(folder).rglob("clients-*"))
        again.close()
    return {**watched.found, "shard_bytes": size, "seconds": seconds}


class Watched:
    """The largest memory of some processes in a while: their own (not what they share through the object store)."""

    def __init__(self, pids: dict[str, int], pause: float = 0.02) -> None:
        self._pids, self._pause = pids, pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.found: dict[str, Any] = {}

    def __enter__(self) -> Watched:
        self.found = {name: {"before_bytes": own_bytes(pid)} for name, pid in self._pids.items()}
        for each in self.found.values():
            each["peak_bytes"] = each["before_bytes"]
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(self._pause):
            for name, pid in self._pids.items():
                each = self.found[name]
                each["peak_bytes"] = max(each["peak_bytes"], own_bytes(pid))

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def report(result: dict[str, Any]) -> str:
    """Three tables."""
    worst = max(result["slopes"].values())
    sums = table(
        "Fixed-point sums, processor ms a client",
        ["parameters", "until 0.2.0", "now"],
        [
            [f"{each['parameters']:,}", f"{each['before'] * 1e3:.2f}", f"{each['now'] * 1e3:.2f}"]
            for each in result["sums"]
        ],
    )
    tree, stored = result["tree"], result["checkpoints"]
    peaks = table(
        f"IFCA, K = {tree['models']}, {tree['parameters']:,} parameters: a dense sum is "
        f"{tree['dense_sum_bytes'] / 1e6:,.0f} MB; the server's own memory grows by "
        f"{result['slopes']['server_a_client_actor']:.2f} of one for each more actor, limit {result['limit']}",
        ["client actors", "server before, MB", "at its peak, MB"],
        [
            [str(count), *(f"{each['server'][at] / 1e6:,.0f}" for at in ("before_bytes", "peak_bytes"))]
            for count, each in tree["actors"].items()
        ],
    )
    states = table(
        f"Checkpoints, {stored['parameters']:,} parameters: a client's optimizer state is "
        f"{stored['client_state_bytes'] / 2e6:,.0f} MB; limit {result['limit']}: {verdict(worst, result['limit'])}",
        ["clients", "shards, MB", "driver's peak, MB", "server's peak, MB", "seconds to write, with a round"],
        [
            [str(count), f"{each['shard_bytes'] / 1e6:,.0f}",
             *(f"{each[name]['peak_bytes'] / 1e6:,.0f}" for name in ("driver", "server")), f"{each['seconds']:.1f}"]
            for count, each in stored["clients"].items()
        ],
    )  # fmt: skip
    return "\n".join([sums, peaks, states])
