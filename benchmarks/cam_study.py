"""Which schedule and which warm-up CAM should have by default: measured, so that it need not be believed.

Schedules x warm-ups (none, the shared part, the clients' own models, the base alone; several lengths) x first clusters,
under a base that assigns by loss (IFCA) and one that assigns by parameters (FeSEM; with `cam.kmeans=size` WeCFL is the
same), at small and large local progress, on four problems. Seed s is partition s and start s, shared by all methods.
One line a run in `benchmarks/results/cam_study.jsonl`: a study that was stopped resumes there. What
results/cam-defaults.md stands on is in `results/cam-defaults.jsonl`.

`python -m benchmarks cam_study data.root=FOLDER` includes CIFAR-10; without the folder it is left out.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from benchmarks.tables import table

STORE = Path(__file__).resolve().parent / "results" / "cam_study.jsonl"
SEEDS = 5
COMMON = ("fleet.backend=in_process", "local.engine=compiled", "local.steps=10")
DIGITS = ("data=digits", "model=mlp", "model.hidden=[32]", "clients=20", "rounds=24")
PROBLEMS: dict[str, tuple[str, ...]] = {
    "rotated digits": (*DIGITS, "clusters=4", "data.rotations=4", "partition=iid"),
    "skewed digits": (*DIGITS, "clusters=5", "partition=cluster_dirichlet", "partition.groups=5"),
    "common part": ("data=synthetic", "data.weight_scale=1", "data.common_scale=5", "model=linear_regression",
                    "partition=iid", "clients=20", "clusters=4", "rounds=24"),
    "cifar10": ("data=cifar10", "clients=20", "clusters=5", "partition=cluster_dirichlet", "partition.groups=5",
                "rounds=24", "evaluation.every=4"),
}  # fmt: skip
RATES = {  # learning rates: small and large local progress
    "rotated digits": {"small": 0.01, "large": 0.05},
    "skewed digits": {"small": 0.01, "large": 0.05},
    "common part": {"small": 0.003, "large": 0.01},
    "cifar10": {"small": 0.003, "large": 0.01},
}
KEPT = {"cifar10": (250, 80)}  # training and test samples of a client, where it has more
SCHEDULES = ("simultaneous", "cluster_first", "alternating", "global_first", "global_first_aggregated")
WARM_UPS = {
    "none": ("cam.warmup=0",),
    "shared 0.1": ("cam.warm=shared", "cam.warmup=0.1"),
    "shared 0.3": ("cam.warm=shared", "cam.warmup=0.3"),
    "local 0.1": ("cam.warm=local", "cam.warmup=0.1"),
    "local 0.3": ("cam.warm=local", "cam.warmup=0.3"),
    "clusters 0.3": ("cam.warm=clusters", "cam.warmup=0.3"),
    "auto": ("cam.warm=shared", "cam.warmup=auto"),
}
FEW = ("simultaneous", "cluster_first", "alternating")  # schedules of the cures and of CIFAR-10
CURES = {
    "K-means first": ("cam.first=kmeans",),
    "balanced draws": ("ifca.init=balanced",),
    "output x 0.1": ("scale",),  # of the random cluster models, at the start
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run."""

    problem: str
    progress: str
    method: str
    schedule: str
    warmup: str
    first: str
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.astuple(self))


def cases(seeds: Sequence[int], problems: Sequence[str]) -> list[Case]:
    """What the choice depends on first, and seed by seed, so that a study that is stopped can be read."""
    found = [
        Case(problem, progress, method, schedule, warmup, first, seed)
        for seed in seeds
        for problem in problems
        for progress in RATES[problem]
        for method, schedule, warmup, first in settings_of(problem)
    ]
    return sorted(found, key=lambda case: (rank(case), case.seed))


def rank(case: Case) -> int:
    """0: the question; then CIFAR-10, more seeds, and at last all other combinations."""
    cure = case.method == "ifca+cam" and case.warmup == "none" and case.schedule == "cluster_first"
    core = case.method in ("ifca", "fesem") or (
        case.schedule in (("cluster_first", "simultaneous") if case.warmup in ("auto", "none") else FEW[1:2])
        and case.warmup in ("none", "shared 0.3", "local 0.3", "clusters 0.3", "auto")
        and (cure or case.first == expected_first(case))
    )
    if not core:
        return 4
    if case.problem == "cifar10":
        return 1 if case.progress == "large" and case.seed < 3 else 3
    return 2 if case.seed > 2 else 0


def expected_first(case: Case) -> str:
    """Of a loss-based base K-means finds the first clusters, unless the warm-up or its own way does."""
    return "K-means first" if case.method == "ifca+cam" and case.warmup in ("none", "shared 0.3") else ""


def settings_of(problem: str) -> Iterator[tuple[str, str, str, str]]:
    """(method, schedule, warm-up, first clusters) of a problem."""
    yield from ((method, "", "", "") for method in ("fedavg", "ifca", "fesem"))
    small = problem == "cifar10"
    warm_ups = ["none", "shared 0.3", "local 0.1", "local 0.3", "auto"] if small else list(WARM_UPS)
    for schedule in FEW if small else SCHEDULES:
        for warmup in warm_ups:
            for method in ("ifca+cam", "fesem+cam"):
                yield method, schedule, warmup, ""
    for cure in ["K-means first"] if small else list(CURES):
        for schedule in FEW[1:] if small else FEW:
            for warmup in ("none", "shared 0.3") if small else ("none", "shared 0.1", "shared 0.3"):
                yield "ifca+cam", schedule, warmup, cure


def outcome(case: Case, more: Sequence[str], miniature: bool) -> dict[str, Any]:
    """Run it: the objective, the accuracy (or -MSE) and the clusters of every round."""
    from actors.session import InProcessSession
    from archipelago.data import build_federation
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan

    given = [f"method={case.method}", *COMMON, *PROBLEMS[case.problem], f"seed={case.seed}"]
    given += [f"local.lr={RATES[case.problem][case.progress]}", *(more if case.problem == "cifar10" else ())]
    given += [f"cam.schedule={case.schedule}"] if case.schedule else []
    given += [*WARM_UPS.get(case.warmup, ()), *(each for each in CURES.get(case.first, ()) if "=" in each)]
    if miniature:
        given = [each for each in given if not each.startswith("rounds=")] + ["rounds=4"]
    config = load_config(None, given)
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    plan = make_plan(config, federation)
    if case.problem in KEPT:
        plan = fewer(plan, *KEPT[case.problem])
    session = InProcessSession(plan)
    if "scale" in CURES.get(case.first, ()):
        smaller_outputs(session, 0.1)
    began, rows, parts, last = time.process_time(), [], {}, None
    for round in range(1, config.rounds + 1):
        report = session.run_round(round)
        metrics, c = report.metrics, report.assignment
        accuracy = metrics.get(
            "micro_accuracy", None if "micro_mse" not in metrics else -metrics["micro_mse"]
        )
        moved = None if c is None or last is None else int((c != last).sum())
        rows.append([metrics["federated_objective"], accuracy, moved])
        parts = {name: rounded(metrics[name]) for name in metrics if name.startswith("part_")} or parts
        last = c
    session.close()
    sizes = None if last is None else np.bincount(last[last >= 0], minlength=config.clusters)
    return {
        "objective": [rounded(row[0]) for row in rows],
        "accuracy": [rounded(row[1]) for row in rows],
        "moved": [row[2] for row in rows],
        "ari": rounded(metrics.get("ari")),
        "used": None if sizes is None else int((sizes > 0).sum()),
        "largest": None if sizes is None else rounded(sizes.max() / sizes.sum()),
        "parts": parts,
        "seconds": rounded(time.process_time() - began),
    }


def rounded(value: float | None) -> float | None:
    """Five digits are enough for a study."""
    return None if value is None else float(f"{value:.5g}")


def fewer(plan: Any, train: int, test: int) -> Any:
    """The plan with at most so many samples of each client, a random choice of its own."""

    def some(index: npt.NDArray[np.int64], count: int, client: int) -> npt.NDArray[np.int64]:
        return np.sort(generator(0, "fewer samples", client=client).permutation(index)[:count])

    clients = [
        dataclasses.replace(each, train=some(each.train, train, i), test=some(each.test, test, i))
        for i, each in enumerate(plan.clients)
    ]
    sizes = np.array([len(each.train) for each in clients], np.int64)
    return dataclasses.replace(
        plan, clients=clients, server=dataclasses.replace(plan.server, sizes=sizes, one_class=None)
    )


def smaller_outputs(session: Any, scale: float) -> None:
    """Scale the last layer of the random cluster models: a cure that was tried, and is no setting."""
    from archipelago.strategies.references import Models

    base = session.server.method.base
    values = base.clusters.values.copy()
    last = session.server.fleet.spec.last_layer()
    values[:, last] *= np.float32(scale)
    base.clusters = Models(values)


def stored(path: Path = STORE) -> dict[str, dict[str, Any]]:
    """What earlier calls have measured, by case."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {json.dumps(line["case"]): line for line in lines}


def run(
    rounds: int | None, miniature: bool, settings: Sequence[str] = (), store: Path | None = None
) -> dict[str, Any]:
    """Every case that is not there yet; `rounds` stands for the number of seeds here."""
    seeds = range(rounds or (1 if miniature else SEEDS))
    problems = [
        p for p in PROBLEMS if p != "cifar10" or any(each.startswith("data.root=") for each in settings)
    ]
    chosen = cases(seeds, problems)
    if miniature:
        chosen = [case for case in chosen if case.problem == "common part" and case.progress == "large"][::7]
        store = None
    elif store is None:
        store = STORE
    found = stored(store) if store else {}
    for number, case in enumerate(chosen, start=1):
        if case.key in found:
            continue
        line = {"case": dataclasses.astuple(case), **outcome(case, settings, miniature)}
        found[case.key] = line
        if store:
            store.parent.mkdir(parents=True, exist_ok=True)
            with store.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if number % 50 == 0:
            print(f"{number} of {len(chosen)} runs", flush=True)
    return {"seeds": len(seeds), "lines": [found[case.key] for case in chosen]}


def oscillation(line: dict[str, Any]) -> float:
    """How much the objective rises on its way down, in rounds whose clusters stand still: rises / (rises + falls).

    0 is a steady fall, 0.5 as much up as down. Over the second half of the run.

    >>> oscillation({"objective": [9, 4, 3, 2], "moved": [None, 0, 0, 0]})
    0.0
    >>> oscillation({"objective": [9, 1, 3, 1], "moved": [None, 0, 0, 0]})
    0.5
    """
    steps = np.diff(np.array(line["objective"], float))
    still = np.array([moved in (0, None) for moved in line["moved"]])[1:]
    late = np.arange(len(steps)) >= len(steps) // 2
    steps = steps[still & late]
    rises, falls = float(steps[steps > 0].sum()), float(-steps[steps < 0].sum())
    return rises / (rises + falls) if rises + falls else 0.0


def final(line: dict[str, Any]) -> float:
    """The mean of the last three evaluations."""
    known = [value for value in line["accuracy"] if value is not None]
    return float(np.mean(known[-3:]))


def report(result: dict[str, Any]) -> str:
    """A table for each problem and progress: one row for each method and choice of settings."""
    groups: dict[tuple[str, str], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for line in result["lines"]:
        problem, progress, *row, _ = line["case"]
        groups.setdefault((problem, progress), {}).setdefault(tuple(row), []).append(line)
    parts = []
    for (problem, progress), rows in groups.items():
        title = f"{problem}, {progress} progress: {' '.join(PROBLEMS[problem])} local.lr={RATES[problem][progress]}"
        cells = [[*row, *measured(problem, lines)] for row, lines in rows.items()]
        value = "-MSE" if problem == "common part" else "accuracy"
        header = [
            "method",
            "schedule",
            "warm-up",
            "first clusters",
            value,
            "worst",
            "ARI",
            "in use",
            "rises",
            "shared part",
            "n",
        ]
        parts.append(table(f"{title}; up to {result['seeds']} seeds", header, cells))
    return "\n".join(parts)


def measured(problem: str, lines: list[dict[str, Any]]) -> list[str]:
    """The figures of a row."""
    values = np.array([final(line) for line in lines]) * (1 if problem == "common part" else 100)
    clustered = lines[0]["ari"] is not None
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    # of the variance of the summed outputs: what predictions owe to the part that all have
    shares = [line["parts"]["part_shared_variance"] for line in lines if line.get("parts")]
    return [
        f"{values.mean():.2f} +- {spread:.2f}",
        f"{values.min():.2f}",
        f"{np.mean([line['ari'] for line in lines]):.2f}" if clustered else "",
        f"{np.mean([line['used'] for line in lines]):.1f}" if clustered else "",
        f"{np.mean([oscillation(line) for line in lines]):.2f}",
        "" if not shares else f"{100 * np.mean(shares):.1f} %",
        str(len(lines)),
    ]
