"""CAM's claims, measured: with and without it, over several initialisations, on digits in ground-truth groups.

- initialisation: does the first assignment decide the end? Spread of accuracy and ARI over seeds of the initial
  models, on one fixed federation.
- outliers: some clients have labels at random; accuracy of the others, and whether their groups are found.
- many clusters: ten of them, ten ground-truth groups, a small learning rate: does one cluster take most clients?

The seeds of a row change the initial models and the batches, never the federation. Figures are means over seeds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from benchmarks.tables import table

METHODS = ("fedavg", "ifca", "ifca+cam", "fesem", "fesem+cam", "wecfl", "wecfl+cam")
OUTLIERS = 0.2
COMMON = (
    "data=digits", "model=mlp", "model.hidden=[32]", "fleet.backend=in_process", "evaluation.every=5",
    "weights=size",
)  # fmt: skip
SETTINGS: dict[str, tuple[str, ...]] = {
    "initialisation": ("clients=20", "clusters=4", "data.rotations=4", "partition=iid", "local.steps=10",
                       "local.lr=0.05", "rounds=20"),
    "outliers": ("clients=20", "clusters=4", "data.rotations=4", "partition=iid", "local.steps=10",
                 "local.lr=0.05", "rounds=20"),
    "many clusters": ("clients=30", "clusters=10", "partition=cluster_dirichlet", "partition.groups=10",
                 "local.steps=10", "local.lr=0.01", "rounds=25"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one run."""

    accuracy: float
    ari: float | None
    used: int  # clusters with clients in them
    largest: float  # share of the clients in the largest cluster


def with_outliers(plan: Any, share: float) -> tuple[Any, npt.NDArray[np.bool_]]:
    """The plan with the labels of some clients drawn at random, and which clients they are."""
    rng = generator(0, "outliers")
    chosen = rng.permutation(len(plan.clients))[: int(share * len(plan.clients))]
    y = plan.y.copy()
    for client in chosen:
        samples = plan.clients[client]
        held = np.concatenate([samples.train, samples.validation, samples.test])
        y[held] = rng.integers(0, int(plan.y.max()) + 1, len(held))
    outlying = np.zeros(len(plan.clients), bool)
    outlying[chosen] = True
    return dataclasses.replace(plan, y=y), outlying


def outcome(setting: str, method: str, seed: int, *smaller: str) -> Outcome:
    """One run: the federation of seed 0, everything else of `seed`."""
    from actors.session import InProcessSession
    from archipelago.data import build_federation
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan

    given = [each for each in SETTINGS[setting] if each.partition("=")[0] not in _keys(smaller)]
    config = load_config(None, [f"method={method}", *COMMON, *given, *smaller, f"seed={seed}"])
    federation = build_federation(config.data, config.partition, config.clients, 0)
    plan, outlying = make_plan(config, federation), np.zeros(config.clients, bool)
    if setting == "outliers":
        plan, outlying = with_outliers(plan, OUTLIERS)
    session = InProcessSession(plan)
    for round in range(1, config.rounds + 1):
        report = session.run_round(round)
    assert report.clients is not None
    kept = ~outlying
    weights = report.clients["samples"][kept]
    accuracy = float(np.average(report.clients["accuracy"][kept], weights=weights))
    if report.assignment is None:
        return Outcome(accuracy, None, 1, 1.0)
    from sklearn.metrics import adjusted_rand_score

    groups, c = plan.server.groups, report.assignment
    ari = None if groups is None else float(adjusted_rand_score(groups[kept], c[kept]))
    sizes = np.bincount(c, minlength=config.clusters)
    return Outcome(accuracy, ari, int((sizes > 0).sum()), float(sizes.max() / sizes.sum()))


def _keys(settings: tuple[str, ...]) -> set[str]:
    return {setting.partition("=")[0] for setting in settings}


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """Every method in every setting; `rounds` stands for the number of seeds here."""
    seeds = range(rounds or (2 if miniature else 5))
    smaller = ("rounds=4", "clients=12") if miniature else ()
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        found[setting] = {}
        for method in METHODS:
            ends = [dataclasses.asdict(outcome(setting, method, seed, *smaller)) for seed in seeds]
            found[setting][method] = ends
            print(f"{setting}: {method}", flush=True)
    return {"seeds": len(seeds), "settings": {k: list(v) for k, v in SETTINGS.items()}, "outcomes": found}


def report(result: dict[str, Any]) -> str:
    """A table for each setting."""
    parts = []
    for setting, methods in result["outcomes"].items():
        rows = []
        for method, ends in methods.items():
            accuracy = np.array([end["accuracy"] for end in ends])
            clustered = ends[0]["ari"] is not None
            ari = np.array([end["ari"] for end in ends]) if clustered else np.zeros(1)
            rows.append(
                [
                    method,
                    f"{accuracy.mean():.4f} +- {accuracy.std(ddof=1):.4f}",
                    f"{accuracy.min():.4f}",
                    f"{ari.mean():.2f} ({ari.min():.2f} to {ari.max():.2f})" if clustered else "",
                    f"{np.mean([end['used'] for end in ends]):.1f}" if clustered else "",
                    f"{np.mean([end['largest'] for end in ends]):.2f}" if clustered else "",
                ]
            )
        title = f"{setting}: {' '.join(result['settings'][setting])}; {result['seeds']} seeds"
        header = ["", "accuracy", "worst seed", "ARI", "clusters in use", "largest cluster"]
        parts.append(table(title, header, rows))
    return "\n".join(parts)
