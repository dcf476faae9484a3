"""Figures of one run: its clusters, its clients' models, the inside of its method (its data: figures_federation.py)."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.vocabulary import of_run
from archipelago.reports.centres import centre_columns
from archipelago.reports.federation import SHOWN, read_federation
from archipelago.reports.figures import PALETTE, Figure, chosen_of, evenly, numbers, spaced
from archipelago.reports.figures_federation import COMPARED, label_bars, similarity_map
from archipelago.reports.figures_results import level_rounds
from archipelago.reports.runs import RunFiles

_FEW = 4  # runs on a page that can show everything
_IMAGES, _IMAGES_OF_MANY = 14, 3  # example images of a cluster
_COMPARED = 100  # clients in a heatmap, where there are many runs
_WEIGHT_ROUNDS = 60
Labels = npt.NDArray[np.int64]


def run_figures(run: RunFiles, title: str, beside: int = 1) -> list[Figure]:
    """Whatever the run's files can show, each with `title` as its choice.

    `beside` runs share the page: of many, each shows fewer images and compared clients.
    """
    makers: list[Callable[[RunFiles], list[Figure]]] = [
        _sizes, _flow, _planted, _maps, _centres, _weights, _distributions, _levels, label_bars,
    ]  # fmt: skip
    found = [figure for maker in makers for figure in maker(run)]
    found += [
        *_cosines(run, beside),
        *_examples(run, beside),
        *similarity_map(run, COMPARED if beside <= _FEW else _COMPARED),
    ]
    return [
        Figure(f.family, f.section, f.title, f.caption, f.kind, f.data, {"run": title, **f.choice})
        for f in found
    ]


def _assignments(run: RunFiles) -> dict[int, Labels]:
    """Round -> cluster of client 0, 1, ... (-1: none yet), of rounds in which anybody has one."""
    table = run.table("assignments")
    if not table:
        return {}
    found = {}
    starts = np.flatnonzero(np.diff(table["round"], prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(table["round"])], strict=True):
        cluster = table["cluster"][start:stop]
        if (cluster >= 0).any():
            found[int(table["round"][start])] = np.asarray(cluster, np.int64)
    return found


def _groups(run: RunFiles) -> Labels | None:
    """The planted group of each client, if anything is planted."""
    table = run.table("clients", ["round", "client", "group"])
    if "group" not in table or not len(table["group"]):
        return None
    last = (
        table["round"] == table["round"].max()
    )  # of a run under way, metrics may be rounds ahead of this table
    return np.asarray(table["group"], np.int64)[last][np.argsort(table["client"][last])]


def _cluster(number: int) -> str:
    return "none" if number < 0 else f"cluster {number}"


# Clusters ---------------------------------------------------------------------------------------------------


def _sizes(run: RunFiles) -> list[Figure]:
    rows = [row for row in run.metrics if "cluster_sizes" in row and any(row["cluster_sizes"])]
    if not rows:
        return []
    most = max(len(row["cluster_sizes"]) for row in rows)
    series = []
    for k in range(most):
        values = [row["cluster_sizes"][k] if k < len(row["cluster_sizes"]) else 0 for row in rows]
        series.append({"name": f"{_cluster(k)} ({values[-1]})", "y": values, "color": k})
    data = {
        "x": "round",
        "y": "clients",
        "at": [row["round"] for row in rows],
        "series": series,
        "bars": False,
    }
    about = "Clients in each cluster, round by round; in brackets as the last round left them."
    return [Figure("sizes", "clusters", "Cluster sizes", about, "stack", data)]


def _flow(run: RunFiles) -> list[Figure]:
    found = _assignments(run)
    if len(found) < 2:
        return []
    rounds = spaced(sorted(found), 6)
    data = flow_data([f"round {number}" for number in rounds], [found[number] for number in rounds], _cluster)
    about = "Every client is a thread: who moved between clusters, and when it settled."
    return [Figure("flow", "clusters", "Assignments between rounds", about, "flow", data)]


def flow_data(columns: Sequence[str], labels: Sequence[Labels], name: Callable[[int], str]) -> dict[str, Any]:
    """Nodes and links between neighbouring columns, by counting clients."""
    nodes: list[dict[str, Any]] = []
    places: dict[tuple[int, int], int] = {}
    for at, column in enumerate(labels):
        for value, count in zip(*np.unique(column, return_counts=True), strict=True):
            places[at, int(value)] = len(nodes)
            nodes.append({"column": at, "name": name(int(value)), "size": int(count), "color": int(value)})
    links = []
    for at, (left, right) in enumerate(pairwise(labels)):
        pairs, counts = np.unique(np.stack([left, right]), axis=1, return_counts=True)
        for (one, other), count in zip(pairs.T, counts, strict=True):
            links.append(
                {"source": places[at, int(one)], "target": places[at + 1, int(other)], "count": int(count)}
            )
    return {"columns": list(columns), "nodes": nodes, "links": links}


def _planted(run: RunFiles) -> list[Figure]:
    groups, found = _groups(run), _assignments(run)
    if groups is None or not found:
        return []
    last = max(found)
    data = flow_data(["planted group", f"found in round {last}"], [groups, found[last]], str)
    for node in data["nodes"]:
        node["name"] = f"group {node['name']}" if node["column"] == 0 else _cluster(int(node["name"]))
    shown = of_run(run.path).summary(over="clusters")
    agreement = [
        f"{label} {row[key]:.3f}" for row in run.metrics[-1:] for key, label in shown.items() if key in row
    ]
    about = f"Planted groups against the clusters that were found. {', '.join(agreement)}".strip()
    return [Figure("planted", "clusters", "Planted and found", about, "flow", data)]


# Client models ----------------------------------------------------------------------------------------------


def _maps(run: RunFiles) -> list[Figure]:
    found, groups = _assignments(run), _groups(run)
    figures = []
    for record, columns, words in (("tsne", ("x", "y"), "t-SNE"), ("models", ("pc_0", "pc_1"), "PCA")):
        panels = []
        for number in run.record_rounds(record):
            table = run.record(record, number)
            clients = np.asarray(table["client"], np.int64)
            known = [seen for seen in sorted(found) if seen <= number]
            cluster = found[known[-1]][clients] if known else np.full(len(clients), -1)
            flat = np.zeros(len(clients))
            panels.append({
                "title": f"round {number}",
                "x": numbers(table[columns[0]]),
                "y": numbers(table.get(columns[1], flat)),
                "client": clients.tolist(),
                "color": cluster.tolist(),
                "symbol": groups[clients].tolist() if groups is not None else [0] * len(clients),
            })  # fmt: skip
        if panels:
            about = f"{words} of the last layer that each client trained, before averaging: one point a client, " + (
                "coloured by its cluster" if found else "all of one model"
            ) + (", shaped by its planted group." if groups is not None else ".")  # fmt: skip
            figures.append(Figure("map", "clusters", "Client models", about, "scatter", {"panels": panels, "planted":
                                  groups is not None, "clustered": bool(found)}, {"projection": words}))  # fmt: skip
    return figures


def _cosines(run: RunFiles, beside: int) -> list[Figure]:
    rounds = run.record_rounds("cosine")
    if not rounds:
        return []
    found, groups = _assignments(run), _groups(run)
    figures = []
    shown = [rounds[-1], rounds[0]] if beside <= _FEW else [rounds[-1]]
    for number in dict.fromkeys(shown):
        table = run.record("cosine", number)
        clients, places = np.unique(table["client"], return_inverse=True)
        z = np.zeros((len(clients), len(clients)))
        z[places, np.unique(table["other"], return_inverse=True)[1]] = table["cosine"]
        known = [seen for seen in sorted(found) if seen <= number]
        cluster = found[known[-1]][clients] if known else np.zeros(len(clients), np.int64)
        keys = (clients, groups[clients], cluster) if groups is not None else (clients, cluster)
        order = np.lexsort(keys)
        if beside > _FEW:
            order = evenly(order, _COMPARED)
        edges = np.flatnonzero(np.diff(cluster[order])) + 0.5
        names = [
            f"client {clients[at]}" + (f", {_cluster(int(cluster[at]))}" if known else "") for at in order
        ]
        data = {"z": np.round(z[np.ix_(order, order)], 3).tolist(), "x": names, "y": names, "edges": edges.tolist(),
                "title": "cosine", "names": None}  # fmt: skip
        about = "Cosine of every two clients' last layers, clients in the order of their clusters (lines between them)."
        about += chosen_of(len(order), len(clients))
        figures.append(Figure("cosine", "clusters", "How alike clients' models are", about, "heatmap", data,
                              {"round": f"round {number}"}))  # fmt: skip
    return figures


def _centres(run: RunFiles) -> list[Figure]:
    models = run.arrays("models/clusters.safetensors").get("clusters")
    if models is None or models.ndim != 2 or len(models) < 2:
        return []
    points = np.asarray(models, np.float64)
    unit = points / np.maximum(np.sqrt((points**2).sum(axis=1, keepdims=True)), 1e-300)
    names = [_cluster(k) for k in range(len(models))]
    data = {"z": np.round(unit @ unit.T, 4).tolist(), "x": names, "y": names, "edges": [], "title": "cosine",
            "names": None}  # fmt: skip
    about = "Cosine of every two cluster models, all parameters, after the last round."
    return [Figure("centres", "clusters", "How alike the clusters' models are", about, "heatmap", data)]


def _examples(run: RunFiles, beside: int) -> list[Figure]:
    arrays, found, groups = run.arrays("records/examples.safetensors"), _assignments(run), _groups(run)
    if not arrays:
        return []
    owners = np.asarray(arrays["client"], np.int64)
    labels, words = np.zeros(int(owners.max()) + 1, np.int64), "all clients"
    if found:
        labels, words = found[max(found)], "cluster {}"
    elif groups is not None:
        labels, words = groups, "planted group {}"
    most = _IMAGES if beside <= _FEW else _IMAGES_OF_MANY
    rows = []
    for k in np.unique(labels[labels >= 0]):
        mine = np.flatnonzero(labels[owners] == k)
        if len(mine):
            chosen = mine[np.unique(np.linspace(0, len(mine) - 1, min(most, len(mine))).astype(int))]
            shown = arrays["images"][chosen]
            count = int((labels == k).sum())
            rows.append(
                {
                    "name": words.format(int(k)),
                    "about": f"{count} client{'s' if count != 1 else ''}",
                    **sprite(shown),
                }
            )
    about = "Training images of clients in each found cluster, as these clients see them."
    return (
        [Figure("examples", "clusters", "What clusters hold", about, "images", {"rows": rows})]
        if rows
        else []
    )


def sprite(images: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Images (n, channels, height, width) side by side, as one PNG in base64, with a gap of one pixel."""
    from PIL import Image

    count, channels, height, width = images.shape
    strip = np.zeros((height, count * (width + 1) - 1, 4), np.uint8)
    for at, image in enumerate(images):
        pixels = image.transpose(1, 2, 0) if channels == 3 else np.repeat(image[0][:, :, None], 3, axis=2)
        strip[:, at * (width + 1) : at * (width + 1) + width, :3] = pixels
        strip[:, at * (width + 1) : at * (width + 1) + width, 3] = 255
    buffer = io.BytesIO()
    Image.fromarray(strip, "RGBA").save(buffer, "PNG", optimize=True)
    return {"image": base64.b64encode(buffer.getvalue()).decode(), "width": strip.shape[1], "height": height}


# Inside the method ------------------------------------------------------------------------------------------


def _weights(run: RunFiles) -> list[Figure]:
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
        groups = _groups(run)
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
            f"Mean {words} of the clients of each planted group on each model."
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
        by = "" if groups is None else ", clients in the order of their planted groups"
        figures.append(Figure("weights-clients", "inside", f"{words.capitalize()}s by client",
                              f"After round {shown[-1]}{by}.{chosen_of(len(order), len(clients))}", "stack",
                              {"x": "client", "y": words, "at": at, "series": bars, "bars": True}))  # fmt: skip
    return figures


def _distributions(run: RunFiles) -> list[Figure]:
    """Every cluster model on held-out samples of every planted distribution (FedSoft, Figure 1 and Tables 1, 3, 4)."""
    figures: list[Figure] = []
    for name, spec in centre_columns((name for row in run.metrics for name in row), of_run(run.path)).items():
        rows = [row for row in run.metrics if name in row]
        label = spec.title
        values = np.asarray([row[name] for row in rows], np.float64) * spec.scale
        sources, models = values.shape[1:]
        series = [{"name": f"distribution {d}, model {k}", "x": [row["round"] for row in rows],
                   "y": numbers(values[:, d, k]), "low": None, "high": None, "marks": [], "color": k, "dash": d}
                  for d in range(sources) for k in range(models)]  # fmt: skip
        about = "Each cluster model on held-out samples of each planted distribution."
        figures.append(Figure("distributions-rounds", "inside", "Models on distributions, by round", about, "lines",
                              {"x": "round", "y": label, "series": series}))  # fmt: skip
        data = {"z": [numbers(row) for row in values[-1]], "x": [f"model {k}" for k in range(models)],
                "y": [f"distribution {d}" for d in range(sources)], "edges": [], "title": label,
                "names": None}  # fmt: skip
        figures.append(Figure("distributions", "inside", "Models on distributions", f"After round {rows[-1]['round']}. "
                              + about, "heatmap", data))  # fmt: skip
    return figures


def _levels(run: RunFiles) -> list[Figure]:
    """FeMAM's structure (its Figure 4): which model each client has at each level."""
    rounds = run.record_rounds("levels")
    if not rounds:
        return []
    table = run.record("levels", rounds[-1])
    levels, at = np.unique(table["level"], return_inverse=True)
    clients, row = np.unique(table["client"], return_inverse=True)
    z = np.full((len(clients), len(levels)), -1)
    z[row, at] = np.where(table["pruned"], -1, table["cluster"])
    planted = _planted_columns(run)
    columns = [*planted, *(f"level {level}" for level in levels)]
    z = np.column_stack([*(labels[clients] for labels in planted.values()), z])
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


def _planted_columns(run: RunFiles) -> dict[str, Labels]:
    """What is planted, coarsest first: every level of a partition that has several, else the one group."""
    if (run.path / "federation" / "facts.json").is_file():
        described = read_federation(run.path)
        return {f"planted {name.replace('_', ' ')}": described.clients[name] for name in described.planted}
    groups = _groups(run)
    return {} if groups is None else {"planted group": groups}
