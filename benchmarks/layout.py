"""How long an IFCA round takes on 32 and 128 actors, over what no layout can beat: simulated from measured clients.

200 clients of two Dirichlet partitions of 50,000 images, K = 10, ten steps of 32. What each client takes to
compute its losses, to train and to be evaluated is measured here, one client after the other. A round on simulated
actors is the sum over the stages of the slowest actor's seconds. Three layouts of the same clients:

- as until 0.2.0: by steps of training alone;
- expected: by forward passes in every stage, before anything has run;
- re-balanced: by what the actors of the expected layout took, in seconds (`actors/rebalancing.py`).

*Ideal* is the sum over the stages of the largest of an equal share of the work, the largest client, and the smallest
pair that must share an actor (`actors.balance.lower_bound`); the plain share of the work, which a client larger than
it puts out of reach, is shown beside it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tables import table, verdict
from benchmarks.workload import CLASSES, MEAN, NEVER, STD

LIMIT = 1.2
ACTORS = (32, 128)
K = 10
PARTITIONS: dict[str, dict[str, Any]] = {"cluster_dirichlet": {}, "dirichlet, alpha 0.1": {"alpha": 0.1}}
STAGES = ("losses", "train", "evaluate")
FRACTION, ROUNDS = 0.1, 50  # with partial participation

Stages = dict[str, npt.NDArray[np.float64]]


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """The best of `rounds` measurements of each client (3 by default)."""
    clients, samples = (12, 1200) if miniature else (200, 60_000)
    cases = {}
    for name, options in PARTITIONS.items():
        plan = _plan(name.partition(",")[0], options, clients, samples)
        measured = _measured(plan, rounds or (1 if miniature else 3))
        counts = (3, 6) if miniature else ACTORS
        cases[name] = {
            "sizes": sorted(plan.server.sizes.tolist()),
            "seconds": {stage: cost.tolist() for stage, cost in measured.items()},
            "actors": {count: _simulated(plan, measured, count) for count in counts},
        }
    worst = max(
        each["rebalanced"]["over_ideal"] for case in cases.values() for each in case["actors"].values()
    )
    return {"limit": LIMIT, "clients": clients, "cases": cases, "worst": worst, "kept": worst <= LIMIT}


def _plan(partition: str, options: dict[str, Any], clients: int, samples: int) -> Any:
    """Images of random pixels with balanced labels, divided as the partition divides CIFAR-10."""
    from archipelago import data
    from archipelago.core.randomness import generator
    from archipelago.core.schema import composed
    from archipelago.core.settings import PartitionSettings
    from archipelago.data import Federation, Labels
    from archipelago.data.division import Task, divide
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan

    test = samples // 6
    y = np.arange(samples) % CLASSES
    labels = Labels("generated", y[:-test], y[-test:], CLASSES)
    settings: Any = composed(PartitionSettings)(name=partition, **options)
    settings.groups = min(10, clients // 2)
    made = divide(data.PARTITIONS.find(partition), Task(labels, settings, clients, 0))
    x = generator(0, "benchmark images").integers(0, 256, (samples, 3, 32, 32), dtype=np.uint8)
    federation = Federation(
        x=x, y=y, clients=made.clients, classes=CLASSES, mean=MEAN, std=STD, name="random pixels"
    )
    config = load_config(
        None,
        ["data=synthetic", "model=cnn_cifar", "method=ifca", f"clusters={K}", f"clients={clients}",
         f"rounds={NEVER}", "local.steps=10", "local.batch=32", "fleet.backend=in_process"],
    )  # fmt: skip
    return make_plan(config, federation)


def _measured(plan: Any, repetitions: int) -> Stages:
    """Processor seconds of each client in each stage: what else the machine does must not make clients differ."""
    from actors.session import InProcessSession
    from archipelago.strategies.references import Prediction

    fleet = InProcessSession(plan).fleet
    models = fleet.initial(K)
    costs = {stage: np.full(len(plan.clients), np.inf) for stage in STAGES}
    for repetition in range(repetitions + 1):
        for client in range(len(plan.clients)) if repetition else [0]:  # the first client warms up
            fleet.begin(repetition + 1)
            alone = fleet.select([client])
            calls = {
                "losses": lambda alone=alone: alone.losses(models),
                "train": lambda alone=alone: alone.train(models[0]),
                "evaluate": lambda alone=alone: alone.evaluate(Prediction([models[0]])),
            }
            for stage, call in calls.items():
                started = time.process_time()
                call()
                if repetition:
                    seconds = time.process_time() - started
                    costs[stage][client] = min(costs[stage][client], seconds)
    return costs


def _simulated(plan: Any, measured: Stages, actors: int) -> dict[str, Any]:
    """A round of all clients, and some rounds of a tenth of them, on so many actors."""
    from actors.balance import balanced, barriers, lower_bound, makespan
    from actors.participation import participants
    from actors.rebalancing import MEASURED, WARM_UP, Rebalancing, expected_costs

    costs = np.stack([measured[stage] for stage in STAGES])
    local, sizes = plan.block.local, plan.server.sizes
    steps = (local.steps * np.minimum(sizes, local.batch)).astype(float)
    layouts = {
        "until 0.2.0": _longest_first(steps, actors),
        "expected": balanced(expected_costs(plan), actors),
    }
    watching = Rebalancing(plan)
    taken = [
        {stage: float(cost[block].sum()) for stage, cost in measured.items()} for block in layouts["expected"]
    ]
    moved = None
    for round in range(1, WARM_UP + MEASURED + 1):
        moved = watching.measured(round, layouts["expected"], taken)
    layouts["rebalanced"] = layouts["expected"] if moved is None else moved[0]
    ideal, share = lower_bound(costs, actors), float(costs.sum()) / actors
    found: dict[str, Any] = {
        name: {"over_ideal": makespan(costs, layout) / ideal, "over_share": makespan(costs, layout) / share}
        for name, layout in layouts.items()
    }
    setting = type(plan.server.participation)(fraction=FRACTION)
    chosen = [participants(setting, np.arange(len(sizes)), 0, round).ids for round in range(1, ROUNDS + 1)]
    rows = barriers(measured, chosen)
    expected = expected_costs(plan)
    known = barriers(dict(zip(STAGES, expected, strict=True)), chosen)
    bound = lower_bound(rows, actors)
    return {
        **found,
        "ideal_seconds": ideal,
        "share_seconds": share,
        "moved": None if moved is None else moved[1],
        "participation": {
            "until 0.2.0": makespan(rows, layouts["until 0.2.0"]) / bound,
            "without the rounds": makespan(rows, balanced(expected, actors)) / bound,
            "with the rounds": makespan(rows, balanced(known, actors)) / bound,
        },
    }


def _longest_first(costs: npt.NDArray[np.float64], actors: int) -> list[list[int]]:
    """The layout of 0.2.0: each to the least loaded, longest first."""
    blocks: list[list[int]] = [[] for _ in range(actors)]
    loads = np.zeros(actors)
    for client in np.argsort(-costs, kind="stable"):
        lightest = int(np.argmin(loads))
        blocks[lightest].append(int(client))
        loads[lightest] += costs[client]
    return blocks


def report(result: dict[str, Any]) -> str:
    """A row for each partition and number of actors."""
    title = (
        f"An IFCA round (K = {K}) of {result['clients']} clients, over the ideal: {result['worst']:.2f} re-balanced, "
        f"limit {result['limit']:.1f}: {verdict(result['worst'], result['limit'])}\n"
        "In brackets over an equal share of the work, which may be less than the largest client's own"
    )
    rows = []
    for name, case in result["cases"].items():
        for count, each in case["actors"].items():
            cells = [
                f"{each[layout]['over_ideal']:.2f} ({each[layout]['over_share']:.2f})"
                for layout in ("until 0.2.0", "expected", "rebalanced")
            ]
            sizes = f"{case['sizes'][0]} to {case['sizes'][-1]}"
            some = [f"{ratio:.2f}" for ratio in each["participation"].values()]
            rows.append([name, sizes, str(count), *cells, *some])
    header = ["partition", "samples", "actors", "until 0.2.0", "expected", "re-balanced",
              f"{FRACTION:.0%} take part, until 0.2.0", "not knowing who", f"knowing who, {ROUNDS} rounds"]  # fmt: skip
    return table(title, header, rows)
