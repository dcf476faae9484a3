"""A small run of every method: its figure and its costs, made by a command and kept in `docs/methods/figures/`.

    python -m docs.hooks.small_runs            # those that are missing
    python -m docs.hooks.small_runs ifca cam   # these again
    python -m docs.hooks.small_runs all        # all of them again

What is missing when the site is built is made then.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from archipelago.reports.palette import ACCENT, GREY

FOLDER = Path(__file__).parents[1] / "methods" / "figures"
KEPT = FOLDER / "runs.json"
CLIENTS, ROUNDS = 12, 10
SHARED = {"clients": CLIENTS, "clusters": 4, "rounds": ROUNDS, "data": "digits", "data.rotations": 4}
# Entries that do nothing in the setting above, or too little to be seen, and one in which they act.
ACTS: dict[str, dict[str, Any]] = {
    "fedbn": {"model": "cnn_fashion"},  # which has BatchNorm layers
    "feddrift": {"rounds": 20, "drift": ["label_swap@8:0.5"]},  # something that drifts
    "fedsgd": {"rounds": 60, "local.lr": 1.0},  # one step a round
    "few_shots": {"few_shots.rounds": 1},  # the first clusters are kept, right or wrong
    "rr_cluster": {"clusters": 5, "rr_cluster.min_size": 2},  # more clusters than groups: small ones
}
ON = {"few_shots": "ifca"}  # a base whose first clusters are not the last
BASES = ("fesem", "wecfl", "fedavg")  # what an add-on is shown on: the first that it goes with


@dataclass(frozen=True)
class Found:
    """What a run came to."""

    words: list[str]
    accuracy: float
    reference: float  # FedAvg's
    costs: dict[str, float]


def kept() -> dict[str, Any]:
    """All that was found so far, by name."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def found(kind: str, name: str) -> Found | None:
    """What the small run of an entry came to; made now if it never was, None where it cannot run."""
    known = kept()
    if name not in known or (known[name] is not None and not (FOLDER / f"{name}.svg").exists()):
        make(kind, name)
        known = kept()
    return None if known[name] is None else Found(**known[name])


def make(kind: str, name: str) -> None:
    """Run it, draw it, keep it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as storage:
        made = _run(kind, name, storage, settings(name))
        value = None
        if made is not None:
            method, run = made
            reference = run if method == "fedavg" else _fedavg(json.dumps(_compared(name)))
            draw(run, reference, method).savefig(
                FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None}
            )
            words = [f"method={method}", *(f"{key}={_word(value)}" for key, value in settings(name).items())]
            value = asdict(Found(words, _last(run), _last(reference), _costs(run)))
    known = {**kept(), name: value}
    KEPT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def settings(name: str) -> dict[str, Any]:
    """What the small run of an entry is given, apart from its method."""
    return {**SHARED, **ACTS.get(name, {})}


def _compared(name: str) -> dict[str, Any]:
    """The same for FedAvg, which reads no option of others and has its own learning rate."""
    own = settings(name).items()
    return {key: value for key, value in own if key.partition(".")[0] not in (name, "local")}


def _word(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _run(kind: str, name: str, storage: str, given: dict[str, Any]) -> tuple[str, Any] | None:
    import archipelago as ar
    from archipelago.experiments.config import load_config
    from archipelago.experiments.runner import run_experiment

    for method in (
        [name] if kind == "method" else [f"{base}+{name}" for base in ([ON[name]] if name in ON else BASES)]
    ):
        try:
            words = [f"method={method}", *(f"{key}={_word(value)}" for key, value in given.items())]
            config = load_config(None, [*words, "fleet.backend=in_process", f"storage={storage}"])
            return method, ar.open_run(run_experiment(config, quiet=True))
        except ar.UserError as error:
            reason = error
    print(f"{name} has no small run: {reason}", file=sys.stderr)
    return None


@cache
def _fedavg(given: str) -> Any:
    """FedAvg under the same settings, once for all that share them."""
    folder = tempfile.mkdtemp(prefix="archipelago-docs-")
    made = _run("method", "fedavg", folder, json.loads(given))
    assert made is not None
    return made[1]


def _last(run: Any) -> float:
    return float(run.metrics["micro_accuracy"].iloc[-3:].mean())


def _costs(run: Any) -> dict[str, float]:
    names = [name for name in run.metrics.columns if name.startswith("cost_")]
    return {name.removeprefix("cost_"): round(float(run.metrics[name].mean()), 4) for name in names}


def draw(run: Any, reference: Any, method: str) -> Any:
    """Accuracy by round beside FedAvg's; clusters by round, or what each client reaches where there are none."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "archipelago", "svg.fonttype": "none", "font.size": 9,
                         "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.6), layout="constrained")
    if method != "fedavg":
        left.plot(reference.metrics["round"], 100 * reference.metrics["micro_accuracy"], color=GREY, ls="--", label="fedavg")  # fmt: skip
    left.plot(run.metrics["round"], 100 * run.metrics["micro_accuracy"], color=ACCENT, lw=2, label=method)
    left.set(xlabel="round", ylabel="accuracy (%)", ylim=(0, 100))
    left.legend(frameon=False, loc="lower right")
    last = run.clients[run.clients["round"] == run.clients["round"].max()].sort_values("client")
    order = (
        last.sort_values(["group", "client"])["client"].tolist()
        if "group" in last
        else last["client"].tolist()
    )
    clusters = run.assignments
    if clusters is not None and len(clusters) and (clusters["cluster"] >= 0).any():
        _draw_clusters(right, clusters, order)
    else:
        _draw_clients(right, last, reference, order, method)
    plt.close(figure)
    return figure


def _draw_clusters(axes: Any, clusters: Any, order: list[int]) -> None:
    import numpy as np
    from matplotlib.colors import ListedColormap

    from archipelago.reports.palette import for_page

    table = clusters.pivot(index="client", columns="round", values="cluster").loc[order]
    shown = np.ma.masked_less(table.to_numpy(), 0)
    colours = ListedColormap(for_page()["palette"][:8])
    axes.imshow(shown % 8, aspect="auto", cmap=colours, vmin=-0.5, vmax=7.5, interpolation="nearest",
                extent=(table.columns.min() - 0.5, table.columns.max() + 0.5, len(order) - 0.5, -0.5))  # fmt: skip
    for edge in range(len(order) // 4, len(order), len(order) // 4):
        axes.axhline(edge - 0.5, color="white", lw=2.5)
    axes.set(
        xlabel="round", ylabel="clients, by true group", yticks=[], title="cluster of each client (colour)"
    )
    axes.title.set_fontsize(9)


def _draw_clients(axes: Any, last: Any, reference: Any, order: list[int], method: str) -> None:
    other = reference.clients[reference.clients["round"] == reference.clients["round"].max()].set_index(
        "client"
    )
    mine = last.set_index("client")
    places = range(len(order))
    if method != "fedavg":
        axes.plot(places, [100 * other["accuracy"][client] for client in order], "o", mfc="white", color=GREY, label="fedavg")  # fmt: skip
    axes.plot(places, [100 * mine["accuracy"][client] for client in order], "o", color=ACCENT, label=method)
    axes.set(
        xlabel="clients, by true group",
        ylabel="accuracy (%)",
        ylim=(0, 104),
        xticks=[],
        title="each client, last round",
    )
    axes.title.set_fontsize(9)
    for edge in range(len(order) // 4, len(order), len(order) // 4):
        axes.axvline(edge - 0.5, color=GREY, lw=0.6, ls=":")


def main(names: list[str]) -> None:
    """Make what is missing, or what is named."""
    from docs.hooks.entries import KINDS, entries

    every = [(kind, entry.name) for kind in KINDS for entry in entries(kind)]
    for kind, name in every:
        if name in names or names == ["all"]:
            make(kind, name)
        else:
            found(kind, name)
    gone = {**kept()}.keys() - {name for _, name in every}
    KEPT.write_text(
        json.dumps(
            {name: value for name, value in kept().items() if name not in gone}, indent=1, sort_keys=True
        )
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
