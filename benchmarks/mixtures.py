"""What FedSoft and FedEM say a client's data are a mixture of, beside what they really are.

FedSoft's synthetic data (two true linear models) in its four splits. FedSoft's importance weights u and FedEM's pi
are both compared with the true shares of the client's training samples, whichever cluster model is called first: the
mean absolute error, and the mean weight that a client gives to the source that it has most of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tables import table

METHODS = {"fedsoft": ("fedsoft.tau=1", "fedsoft.select=0", "fedsoft.lam=1.0"), "fedem": ()}
SPLITS = ("10:90", "30:70", "linear", "random")
COMMON = (
    "clients=20", "clusters=2", "rounds=40", "data=synthetic", "data.sources=2", "data.samples=4000",
    "partition=mixture", "model=linear_regression", "local.lr=0.05", "local.momentum=0", "local.steps=8",
    "local.batch=20", "evaluation.every=40", "fleet.backend=in_process",
)  # fmt: skip
SHOWN = (10, 40)  # after which rounds

Shares = npt.NDArray[np.float64]


def weights(method: str, split: str, seed: int, *smaller: str) -> tuple[Shares, dict[int, Shares]]:
    """(true shares, estimated ones by round) of every client and source."""
    from actors.session import InProcessSession
    from archipelago.data import build_federation, load_dataset
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan

    changed = {each.partition("=")[0] for each in smaller}
    given = [each for each in COMMON if each.partition("=")[0] not in changed]
    settings = [f"method={method}", *METHODS[method], *given, f"partition.mixture={split}", f"seed={seed}"]
    config = load_config(None, [*settings, *smaller])
    sources = load_dataset(config.data, config.seed).sources_train
    assert sources is not None
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    plan = make_plan(config, federation)
    truth = np.array([np.bincount(sources[client.train], minlength=2) for client in plan.clients], np.float64)
    session = InProcessSession(plan)
    found = {}
    for round in range(1, config.rounds + 1):
        session.run_round(round)
        if round in (*SHOWN, config.rounds):
            found[round] = np.array(session.server.method.base.mixture)  # type: ignore[attr-defined]  # both have one
    return truth / truth.sum(axis=1, keepdims=True), found


def error(estimate: Shares, truth: Shares) -> tuple[float, float]:
    """(mean absolute error, mean weight of each client's larger source) under the better of both namings."""
    both = [estimate, estimate[:, ::-1]]
    best = min(both, key=lambda each: float(np.abs(each - truth).mean()))
    main = truth.argmax(axis=1)
    return float(np.abs(best - truth).mean()), float(best[np.arange(len(best)), main].mean())


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """Every split and method; `rounds` stands for the number of seeds here."""
    seeds = range(rounds or (1 if miniature else 5))
    smaller = ("rounds=2", "clients=4", "data.samples=800") if miniature else ()
    rows = []
    for split in SPLITS:
        for method in METHODS:
            by_round: dict[int, list[tuple[float, float]]] = {}
            larger = []
            for seed in seeds:
                truth, found = weights(method, split, seed, *smaller)
                larger.append(float(truth.max(axis=1).mean()))
                for round, estimate in found.items():
                    by_round.setdefault(round, []).append(error(estimate, truth))
            rows.append({"split": split, "method": method, "larger": larger, "by_round": by_round})
            print(f"{split}: {method}", flush=True)
    return {"seeds": len(seeds), "settings": [*COMMON, *smaller], "rows": rows}


def report(result: dict[str, Any]) -> str:
    """One table: a line for each split and method."""
    rounds = sorted({int(round) for row in result["rows"] for round in row["by_round"]})
    lines = []
    for row in result["rows"]:
        cells = [row["split"], row["method"], f"{np.mean(row['larger']):.3f}"]
        for round in rounds:
            errors, weight = np.array(row["by_round"][round]).T
            cells += [
                f"{errors.mean():.3f} ({errors.min():.3f} to {errors.max():.3f})",
                f"{weight.mean():.3f}",
            ]
        lines.append(cells)
    header = ["split", "method", "true larger share"]
    for round in rounds:
        header += [f"error, round {round}", "estimated"]
    return table(f"{' '.join(result['settings'])}; {result['seeds']} seeds", header, lines)
