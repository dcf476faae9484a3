"""What a lost client actor costs, in rounds and seconds, and what keeping copies for it costs in every round.

One run, in which an actor is killed twice, as many rounds after a checkpoint. First it is rebuilt from what the others
hold (`actors/recovery.py`); then as until 0.2.0: everybody is started again from the checkpoint, and the rounds
since are run again. Both ways come to the same models, bit for bit. The cost of copies is the share of a round's
seconds that go into them, for a small network and for a large one.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import table, verdict
from benchmarks.workload import Workload

RATIO = 0.5  # of the seconds that it took before
SHARE = 0.1  # of a round that copies may take
SMALL = Workload(clients=24, samples=250, steps=10)
LARGE = Workload(clients=8, samples=64, steps=4, batch=16, model="mlp")
PARAMETERS = 2_800_000
AFTER = 9  # rounds between the checkpoint and the loss: `checkpoint.every` is 10


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """`rounds` are run after the checkpoint (9 by default)."""
    after = rounds or (2 if miniature else AFTER)
    small = Workload(clients=4, samples=16, steps=1, model="mlp") if miniature else SMALL
    hidden = max(1, round((PARAMETERS // (100 if miniature else 1)) / (3072 + 1 + 10)))
    loss, copies = _loss(small, after)
    shares = {"small": copies, "large": _copies(LARGE, 3 if miniature else 6, f"model.hidden=[{hidden}]")}
    ratio = loss["now"]["seconds"] / loss["before"]["seconds"]
    worst = max(each["share"] for each in shares.values())
    return {
        "limits": {"ratio": RATIO, "share": SHARE},
        "workload": small.facts(),
        "after": after,
        "loss": loss,
        "ratio": ratio,
        "copies": shares,
        "kept": loss["equal"] and ratio <= RATIO and worst <= SHARE,
    }


def _loss(workload: Workload, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from actors.cluster import connected
    from actors.session import ActorsLost, Checkpoint, RaySession
    from archipelago.runs.checkpoints import CheckpointWriter, latest

    plan = workload.plan("method=ifca", "clusters=2", "fleet.actors=2", "fleet.cpus=0.5")
    last = 1 + after
    with connected(plan.fleet), tempfile.TemporaryDirectory(prefix="archipelago-benchmark-") as folder:
        session = RaySession(plan)
        session.run_round(1)
        writer = CheckpointWriter(Path(folder), every=1, keep=1)
        writer.submit(1, session.snapshot())
        writer.close()
        reports = [session.run_round(round) for round in range(2, last + 1)]

        def strike() -> float:
            os.kill(session.members[1].pid, signal.SIGKILL)
            began = time.perf_counter()
            try:
                session.run_round(last + 1)
            except ActorsLost:
                return began
            raise AssertionError("the actor is alive")

        began = strike()
        mended = session.mend(last)
        assert mended is not None and mended.round == last
        session.run_round(last + 1)
        now = {"seconds": time.perf_counter() - began, "rounds_again": 1, "processes": 1}
        here = session.models()["models"]
        began = strike()
        session.close()
        found = latest(folder, deep=False)
        assert found is not None
        session = RaySession(plan, Checkpoint(found[1]["server"], found[1], 1))
        for round in range(2, last + 2):
            session.run_round(round)
        before = {"seconds": time.perf_counter() - began, "rounds_again": after + 1, "processes": 3}
        there = session.models()["models"]
        session.close()
    equal = all(np.array_equal(here[name], there[name]) for name in here)
    seconds = float(np.median([report.timings["round"] for report in reports]))
    loss = {"now": now, "before": before, "equal": equal, "round_seconds": seconds}
    return loss, _share(reports)


def _share(reports: list[Any]) -> dict[str, Any]:
    seconds = [report.timings["copies"] for report in reports]
    shares = [report.timings["copies"] / report.timings["round"] for report in reports]
    return {"seconds": float(np.median(seconds)), "share": float(np.median(shares))}


def _copies(workload: Workload, rounds: int, *settings: str) -> dict[str, Any]:
    """The share of copies where models are large and rounds short."""
    from actors.cluster import connected
    from actors.session import RaySession

    plan = workload.plan(*settings, "method=fedavg", "fleet.actors=2", "fleet.cpus=0.5")
    with connected(plan.fleet):
        session = RaySession(plan)
        reports = [session.run_round(round) for round in range(1, rounds + 1)][1:]
        size = next(iter(session.models()["models"].values())).shape[-1]
        session.close()
    return {**_share(reports), "parameters": size, "state_bytes": 4 * size * workload.clients}


def report(result: dict[str, Any]) -> str:
    """Two tables."""
    loss, ratio = result["loss"], result["ratio"]
    first = table(
        f"A client actor lost {result['after']} rounds after a checkpoint, rounds of {loss['round_seconds']:.2f} s: "
        f"{ratio:.2f} of the seconds, limit {result['limits']['ratio']}: {verdict(ratio, result['limits']['ratio'])}; "
        f"the same models: {'yes' if loss['equal'] else 'NO'}",
        ["", "rounds run again", "processes started", "seconds until the next round is done"],
        [
            [name, str(loss[key]["rounds_again"]), str(loss[key]["processes"]), f"{loss[key]['seconds']:.1f}"]
            for name, key in (("from a checkpoint, until 0.2.0", "before"), ("from copies", "now"))
        ],
    )
    second = table(
        f"Copies in every round (fleet.copies), limit {result['limits']['share']:.0%} of it",
        ["network", "seconds", "share of a round", ""],
        [
            [name, f"{each['seconds']:.4f}", f"{each['share']:.1%}",
             verdict(each["share"], result["limits"]["share"])]
            for name, each in result["copies"].items()
        ],
    )  # fmt: skip
    return "\n".join([first, second])
