"""IFCA's collapse, and CAM's cure, where both really happen: ground-truth models with a large part in common.

Linear regression, four ground-truth models w_s = w + d_s with d_s ~ N(0, I). The larger the common part w, the more the
losses of K models drawn at random agree over all clients: the one nearest to w is the best for everybody, is
trained by everybody, and stays the best. With CAM the shared model learns w first; what is left for the clusters
is d_s, on which clients of different groups disagree. Without the warm-up there is no cure.

The seeds of a row change the initial models and the batches, never the federation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.tables import table

METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "oracle": (),
    "ifca": (),
    "ifca+cam": (),
    "ifca+cam, no warm-up": ("cam.warmup=0",),
}
COMMON_PARTS = (0.0, 1.0, 2.0, 5.0)
SETTING = (
    "data=synthetic", "data.weight_scale=1", "model=linear_regression", "partition=iid", "clients=20", "clusters=4",
    "rounds=20", "local.steps=10", "local.lr=0.01", "fleet.backend=in_process",
)  # fmt: skip


def outcome(method: str, common: float, seed: int, *smaller: str) -> dict[str, Any]:
    """One run: test error, clusters in use at the end, agreement with the ground-truth groups."""
    from actors.session import InProcessSession
    from archipelago.data import build_federation
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan

    changed = {each.partition("=")[0] for each in smaller}
    given = [each for each in SETTING if each.partition("=")[0] not in changed]
    config = load_config(
        None, [f"method={method}", *given, *smaller, f"data.common_scale={common}", f"seed={seed}"]
    )
    federation = build_federation(config.data, config.partition, config.clients, 0)
    session = InProcessSession(make_plan(config, federation))
    for round in range(1, config.rounds + 1):
        report = session.run_round(round)
    used = 1 if report.assignment is None else len(set(report.assignment.tolist()))
    return {"mse": report.metrics["micro_mse"], "used": used, "ari": report.metrics.get("ari")}


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """Every method for every size of the common part; `rounds` stands for the number of seeds here."""
    seeds = range(rounds or (2 if miniature else 10))
    smaller = ("rounds=4", "clients=8", "data.samples=400") if miniature else ()
    found = {
        method: {
            str(common): [
                outcome(method.partition(",")[0], common, seed, *options, *smaller) for seed in seeds
            ]
            for common in COMMON_PARTS
        }
        for method, options in METHODS.items()
    }
    return {"seeds": len(seeds), "setting": list(SETTING), "outcomes": found}


def report(result: dict[str, Any]) -> str:
    """A line for each method and size of the common part."""
    rows = []
    for method, parts in result["outcomes"].items():
        for common, ends in parts.items():
            error = np.array([end["mse"] for end in ends])
            used = np.bincount([end["used"] for end in ends], minlength=5)
            clustered = ends[0]["ari"] is not None
            rows.append(
                [
                    method,
                    f"{float(common):g}",
                    f"{error.mean():.3f} +- {error.std(ddof=1):.3f}",
                    f"{error.max():.3f}",
                    f"{np.mean([end['ari'] for end in ends]):.2f}" if clustered else "",
                    ", ".join(f"{count}x {k}" for k, count in enumerate(used) if count) if clustered else "",
                ]
            )
    title = f"IFCA's collapse: {' '.join(result['setting'])}; {result['seeds']} seeds"
    header = ["", "common part", "test error (MSE)", "worst seed", "ARI", "seeds x clusters in use"]
    return table(title, header, rows)
