"""Figures of one run: its clusters and its clients' models.

The inside of its method is in `figures_method.py`, its data in `figures_federation.py`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.vocabulary import of_run
from archipelago.reports import figures_federation, figures_method  # noqa: F401  (these register figures, too)
from archipelago.reports.figures import FEW, FIGURES, Figure, chosen_of, evenly, numbers, spaced
from archipelago.reports.run_tables import Labels, assignments, cluster_name, ground_truth
from archipelago.runs.files import RunFiles

_IMAGES, _IMAGES_OF_MANY = 14, 3  # example images of a cluster
_COMPARED = 100  # clients in a heatmap, where there are many runs


def run_figures(run: RunFiles, title: str, beside: int = 1) -> list[Figure]:
    """Whatever the run's files can show, each with `title` as its choice.

    `beside` runs share the page: of many, each shows fewer images and compared clients.
    """
    found = [figure for maker in FIGURES.of("run").values() for figure in maker(run, beside)]
    return [replace(figure, choice={"run": title, **figure.choice}) for figure in found]


@FIGURES.register(
    "cluster_sizes", "clients in each cluster, round by round", label="Cluster sizes", families=("sizes",)
)
def cluster_sizes(run: RunFiles, beside: int = 1) -> list[Figure]:
    rows = [row for row in run.metrics if "cluster_sizes" in row and any(row["cluster_sizes"])]
    if not rows:
        return []
    most = max(len(row["cluster_sizes"]) for row in rows)
    series = []
    for k in range(most):
        values = [row["cluster_sizes"][k] if k < len(row["cluster_sizes"]) else 0 for row in rows]
        series.append({"name": f"{cluster_name(k)} ({values[-1]})", "y": values, "color": k})
    data = {
        "x": "round",
        "y": "clients",
        "at": [row["round"] for row in rows],
        "series": series,
        "bars": False,
    }
    about = "Clients in each cluster, round by round; in brackets as the last round left them."
    return [Figure("sizes", "clusters", "Cluster sizes", about, "stack", data)]


@FIGURES.register(
    "ground_truth",
    "ground-truth groups against the clusters that were found",
    label="Ground truth and found",
    families=("ground-truth",),
)
def ground_truth_and_found(run: RunFiles, beside: int = 1) -> list[Figure]:
    groups, found = ground_truth(run), assignments(run)
    if groups is None or not found:
        return []
    last = max(found)
    data = flow_data(["ground-truth group", f"found in round {last}"], [groups, found[last]], str)
    for node in data["nodes"]:
        node["name"] = f"group {node['name']}" if node["column"] == 0 else cluster_name(int(node["name"]))
    shown = of_run(run.path).summary(over="clusters")
    agreement = [
        f"{label} {row[key]:.3f}" for row in run.metrics[-1:] for key, label in shown.items() if key in row
    ]
    about = f"Ground-truth groups against the clusters that were found. {', '.join(agreement)}".strip()
    return [Figure("ground-truth", "clusters", "Ground truth and found", about, "flow", data)]


@FIGURES.register(
    "flow", "who moved between clusters, and when", label="Assignments between rounds", wide=("flow",)
)
def assignment_flow(run: RunFiles, beside: int = 1) -> list[Figure]:
    found = assignments(run)
    if len(found) < 2:
        return []
    rounds = spaced(sorted(found), 6)
    data = flow_data(
        [f"round {number}" for number in rounds], [found[number] for number in rounds], cluster_name
    )
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


# Client models ----------------------------------------------------------------------------------------------


@FIGURES.register(
    "client_models",
    "client models in the plane (PCA, t-SNE)",
    label="Client models",
    families=("map",),
    wide=("map",),
)
def client_maps(run: RunFiles, beside: int = 1) -> list[Figure]:
    found, groups = assignments(run), ground_truth(run)
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
            ) + (", shaped by its ground-truth group." if groups is not None else ".")  # fmt: skip
            data = {"panels": panels, "ground_truth": groups is not None, "clustered": bool(found)}
            choice = {"projection": words}
            figures.append(Figure("map", "clusters", "Client models", about, "scatter", data, choice))
    return figures


@FIGURES.register(
    "cluster_models",
    "cosine of every two cluster models",
    label="How alike the clusters' models are",
    families=("centres",),
)
def cluster_cosines(run: RunFiles, beside: int = 1) -> list[Figure]:
    models = run.arrays("models/clusters.safetensors").get("clusters")
    if models is None or models.ndim != 2 or len(models) < 2:
        return []
    points = np.asarray(models, np.float64)
    unit = points / np.maximum(np.sqrt((points**2).sum(axis=1, keepdims=True)), 1e-300)
    names = [cluster_name(k) for k in range(len(models))]
    data = {"z": np.round(unit @ unit.T, 4).tolist(), "x": names, "y": names, "edges": [], "title": "cosine",
            "names": None}  # fmt: skip
    about = "Cosine of every two cluster models, all parameters, after the last round."
    return [Figure("centres", "clusters", "How alike the clusters' models are", about, "heatmap", data)]


@FIGURES.register(
    "client_cosines",
    "cosine of every two clients' models",
    label="How alike clients' models are",
    families=("cosine",),
)
def client_cosines(run: RunFiles, beside: int = 1) -> list[Figure]:
    rounds = run.record_rounds("cosine")
    if not rounds:
        return []
    found, groups = assignments(run), ground_truth(run)
    figures = []
    shown = [rounds[-1], rounds[0]] if beside <= FEW else [rounds[-1]]
    for number in dict.fromkeys(shown):
        table = run.record("cosine", number)
        clients, places = np.unique(table["client"], return_inverse=True)
        z = np.zeros((len(clients), len(clients)))
        z[places, np.unique(table["other"], return_inverse=True)[1]] = table["cosine"]
        known = [seen for seen in sorted(found) if seen <= number]
        cluster = found[known[-1]][clients] if known else np.zeros(len(clients), np.int64)
        keys = (clients, groups[clients], cluster) if groups is not None else (clients, cluster)
        order = np.lexsort(keys)
        if beside > FEW:
            order = evenly(order, _COMPARED)
        edges = np.flatnonzero(np.diff(cluster[order])) + 0.5
        names = [
            f"client {clients[at]}" + (f", {cluster_name(int(cluster[at]))}" if known else "") for at in order
        ]
        data = {"z": np.round(z[np.ix_(order, order)], 3).tolist(), "x": names, "y": names, "edges": edges.tolist(),
                "title": "cosine", "names": None}  # fmt: skip
        about = "Cosine of every two clients' last layers, clients in the order of their clusters (lines between them)."
        about += chosen_of(len(order), len(clients))
        figures.append(Figure("cosine", "clusters", "How alike clients' models are", about, "heatmap", data,
                              {"round": f"round {number}"}))  # fmt: skip
    return figures


@FIGURES.register(
    "examples", "images of the clients of each cluster", label="What clusters hold", wide=("examples",)
)
def examples(run: RunFiles, beside: int = 1) -> list[Figure]:
    arrays, found, groups = run.arrays("records/examples.safetensors"), assignments(run), ground_truth(run)
    if not {"client", "images"} <= set(arrays):  # not there, or another file in its place
        return []
    owners = np.asarray(arrays["client"], np.int64)
    labels, words = np.zeros(int(owners.max()) + 1, np.int64), "all clients"
    if found:
        labels, words = found[max(found)], "cluster {}"
    elif groups is not None:
        labels, words = groups, "ground-truth group {}"
    most = _IMAGES if beside <= FEW else _IMAGES_OF_MANY
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
