"""Figures of the inside of a method: mixture weights, models on distributions, levels, parts that add up."""

from __future__ import annotations

import numpy as np

from archipelago.core.vocabulary import of_run
from archipelago.reports.centres import centre_columns
from archipelago.reports.federation import SHOWN, read_federation
from archipelago.reports.figures import FIGURES, Figure, chosen_of, evenly, numbers
from archipelago.reports.figures_results import level_rounds
from archipelago.reports.health import parts_of
from archipelago.reports.palette import PALETTE
from archipelago.reports.run_tables import Labels, ground_truth
from archipelago.runs.files import RunFiles

_WEIGHT_ROUNDS = 60
_PARTS = {
    "accuracy": ("accuracy alone (%)", 100.0, "Test accuracy of each part alone, over the clients that have it."),
    "variance": ("share of the logits' variance", 1.0, "Covariance of a part's logits with the sum's, as a share of "
                 "the sum's variance among classes: shares add up to one; one below zero works against the others."),
    "norm": ("norm / norm of a fresh model", 1.0, "A part far below 1 is as good as empty."),
}  # fmt: skip


@FIGURES.register(
    "weights",
    "importance or mixture weights of clients",
    label="Weights",
    families=("weights-rounds", "weights-clients"),
    wide=("weights-rounds", "weights-clients"),
)
def weights(run: RunFiles, beside: int = 1) -> list[Figure]:
    """FedSoft's importance weights, FedEM's mixture weights (FedSoft, Figures 1 and 2)."""
    figures: list[Figure] = []
    for record, words in (("u", "importance weight"), ("pi", "mixture weight")):
        rounds = run.record_rounds(record)
        if not rounds:
            continue
        shown = [rounds[at] for at in np.unique(np.linspace(0, len(rounds) - 1, _WEIGHT_ROUNDS).astype(int))]
        tables = [run.record(record, number) for number in shown]
        models = sorted(
            (name for name in tables[0] if name.startswith(f"{record}_")),
            key=lambda name: int(name[len(record) + 1 :]),
        )
        groups = ground_truth(run)
        series = []
        for g in [None] if groups is None else np.unique(groups).tolist():
            for k, name in enumerate(models):
                y = []
                for table in tables:
                    clients = np.asarray(table["client"], np.int64)
                    mine = slice(None) if g is None or groups is None else groups[clients] == g
                    values = table[name][mine]
                    y.append(float(np.mean(values)) if len(values) else None)
                who = "all clients" if g is None else f"group {g}"
                series.append({"name": f"{who}, model {k}", "x": shown, "y": y, "low": None, "high": None, "marks": [],
                               "color": k, "dash": 0 if g is None else int(g)})  # fmt: skip
        about = (
            f"Mean {words} of the clients of each ground-truth group on each model."
            if groups is not None
            else f"Mean {words} of all clients on each model."
        )
        figures.append(Figure("weights-rounds", "inside", f"{words.capitalize()}s by round", about, "lines",
                              {"x": "round", "y": words, "series": series}))  # fmt: skip
        last = tables[-1]
        clients = np.asarray(last["client"], np.int64)
        order = np.argsort(clients) if groups is None else np.lexsort((clients, groups[clients]))
        order = evenly(order, SHOWN)
        bars = [
            {"name": f"model {k}", "y": numbers(last[name][order]), "color": k}
            for k, name in enumerate(models)
        ]
        at = [f"client {client}" for client in clients[order]]
        by = "" if groups is None else ", clients in the order of their ground-truth groups"
        figures.append(Figure("weights-clients", "inside", f"{words.capitalize()}s by client",
                              f"After round {shown[-1]}{by}.{chosen_of(len(order), len(clients))}", "stack",
                              {"x": "client", "y": words, "at": at, "series": bars, "bars": True}))  # fmt: skip
    return figures


@FIGURES.register(
    "distributions",
    "cluster models on every ground-truth distribution",
    label="Models on distributions",
    families=("distributions-rounds", "distributions"),
)
def distributions(run: RunFiles, beside: int = 1) -> list[Figure]:
    """Every cluster model on held-out samples of every ground-truth distribution (FedSoft, Figure 1, Table 1)."""
    figures: list[Figure] = []
    for name, spec in centre_columns((name for row in run.metrics for name in row), of_run(run.path)).items():
        rows = [row for row in run.metrics if name in row]
        label = spec.title
        values = np.asarray([row[name] for row in rows], np.float64) * spec.scale
        sources, models = values.shape[1:]
        series = [{"name": f"distribution {d}, model {k}", "x": [row["round"] for row in rows],
                   "y": numbers(values[:, d, k]), "low": None, "high": None, "marks": [], "color": k, "dash": d}
                  for d in range(sources) for k in range(models)]  # fmt: skip
        about = "Each cluster model on held-out samples of each ground-truth distribution."
        figures.append(Figure("distributions-rounds", "inside", "Models on distributions, by round", about, "lines",
                              {"x": "round", "y": label, "series": series}))  # fmt: skip
        data = {"z": [numbers(row) for row in values[-1]], "x": [f"model {k}" for k in range(models)],
                "y": [f"distribution {d}" for d in range(sources)], "edges": [], "title": label,
                "names": None}  # fmt: skip
        figures.append(Figure("distributions", "inside", "Models on distributions", f"After round {rows[-1]['round']}. "
                              + about, "heatmap", data))  # fmt: skip
    return figures


@FIGURES.register("parts", "norm, accuracy and share of each part that adds up", label="Parts")
def parts(run: RunFiles, beside: int = 1) -> list[Figure]:
    """Whether CAM's two parts, or FeMAM's levels, both do something."""
    measured = parts_of(run)
    figures = []
    for key, (words, scale, about) in _PARTS.items():
        series = []
        for at, (part, rows) in enumerate(measured.items()):
            known = [row for row in rows if key in row]
            series.append({"name": f"{part.replace('_', ' ')} part", "x": [row["round"] for row in known],
                           "y": numbers(scale * row[key] for row in known), "low": None, "high": None, "marks": [],
                           "color": at, "dash": 0})  # fmt: skip
        if any(one["x"] for one in series):
            data = {"x": "round", "y": words, "series": series}
            figures.append(Figure("parts", "inside", "Parts", about, "lines", data, {"measure": words}))
    return figures


@FIGURES.register("levels", "which model each client has at each level", label="Levels of models")
def levels(run: RunFiles, beside: int = 1) -> list[Figure]:
    """FeMAM's structure (its Figure 4): which model each client has at each level."""
    rounds = run.record_rounds("levels")
    if not rounds:
        return []
    table = run.record("levels", rounds[-1])
    levels, at = np.unique(table["level"], return_inverse=True)
    clients, row = np.unique(table["client"], return_inverse=True)
    z = np.full((len(clients), len(levels)), -1)
    z[row, at] = np.where(table["pruned"], -1, table["cluster"])
    truth = _ground_truth_columns(run)
    columns = [*truth, *(f"level {level}" for level in levels)]
    z = np.column_stack([*(labels[clients] for labels in truth.values()), z])
    order = evenly(np.lexsort([clients, *z.T[::-1]]), SHOWN)
    z = z[order]
    cuts = np.argwhere(z[1:] != z[:-1])
    added = ", ".join(map(str, level_rounds(run))) or "none"
    colours = f" (colours repeat after {len(PALETTE)})"
    if int(z.max()) < len(PALETTE):
        colours = ", and so do equal colours"
    about = (
        "One row a client, one column a level; an empty cell has no model. In a column, neighbours without a line "
        f"between them share a model{colours}. Levels added in rounds: {added}."
    )
    data = {"z": z.tolist(), "x": columns, "y": [f"client {client}" for client in clients[order]], "edges": [],
            "cuts": [[int(column), int(above)] for above, column in cuts], "title": "model",
            "names": [f"model {k}" for k in range(int(z.max()) + 1)]}  # fmt: skip
    about += chosen_of(len(order), len(clients))
    return [Figure("levels", "inside", "Levels of models", about, "heatmap", data)]


def _ground_truth_columns(run: RunFiles) -> dict[str, Labels]:
    """The ground truth, coarsest first: every level of a partition that has several, else the one group."""
    if (run.path / "federation" / "facts.json").is_file():
        described = read_federation(run.path)
        return {
            f"ground-truth {name.replace('_', ' ')}": described.clients[name]
            for name in described.ground_truth
        }
    groups = ground_truth(run)
    return {} if groups is None else {"ground-truth group": groups}
