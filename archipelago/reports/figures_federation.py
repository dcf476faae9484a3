"""Figures of a federation: what its clients hold, and how alike that is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.reports.federation import SHOWN, Described, alikeness, divergence, read_federation
from archipelago.reports.figures import FEW, FIGURES, Figure, chosen_of, evenly
from archipelago.runs.files import RunFiles

COMPARED = 200  # clients in the heatmap at most
_COMPARED_OF_MANY = 100  # where there are many runs on a page


def _described(run: RunFiles) -> Described | None:
    return read_federation(run.path) if (run.path / "federation" / "facts.json").is_file() else None


@FIGURES.register(
    "labels", "training samples of each class at each client", label="Who holds what", wide=("labels",)
)
def label_bars(run: RunFiles, beside: int = 1) -> list[Figure]:
    """Samples of each class that each client trains on."""
    described = _described(run)
    if described is None or described.facts["classes"] is None:
        return []
    data = holdings(described)
    about = "Training samples of each class at each client" + (
        ", by ground-truth group." if described.groups is not None else "."
    )
    about += chosen_of(len(data["at"]), len(described.order))
    return [Figure("labels", "data", "Who holds what", about, "holdings", data)]


def holdings(described: Described) -> dict[str, Any]:
    """What each client trains on, by class (or by source, where targets are real numbers), and where it comes from."""
    facts, groups, order = described.facts, described.groups, evenly(described.order, SHOWN)
    by, word = ("label", "class") if facts["classes"] is not None else ("source", "source")
    counts = described.table(by=by)[order]
    names = [f"client {c}" + ("" if groups is None else f" (group {groups[c]})") for c in order]
    series = [{"name": f"{word} {k}", "y": counts[:, k].tolist(), "color": k} for k in range(counts.shape[1])]
    strips = []
    for number, column in enumerate(described.ground_truth):
        name = "group" if len(described.ground_truth) == 1 else f"level {number + 1}"
        strips.append({"name": name, "groups": described.clients[column][order].tolist()})
    shares = None
    if facts["sources"] > 1 and by == "label":
        found = described.table(by="source")[order]
        shares = (found / np.maximum(found.sum(axis=1, keepdims=True), 1)).round(4).T.tolist()
    marked = "published protocol, with copied clients: " if facts.get("published_protocol") else ""
    heading = f"{marked}{_problem(facts)}: what {facts['clients']:,} clients train on"
    if len(order) < facts["clients"]:
        heading += f" ({len(order)} of them, evenly chosen)"
    return {
        "x": "client", "y": "training samples", "at": names, "series": series, "bars": True, "word": word,
        "clients": order.tolist(), "strips": strips, "shares": shares, "heading": heading,
    }  # fmt: skip


@FIGURES.register(
    "similarity", "how alike the data of any two clients is", label="How alike clients' data is"
)
def similarity_map(run: RunFiles, beside: int = 1) -> list[Figure]:
    """How alike the data of any two clients is."""
    described = _described(run)
    if described is None:
        return []
    most = COMPARED if beside <= FEW else _COMPARED_OF_MANY
    shown, _, compared = alikeness(described, most)
    if not compared or len(shown) < 2:
        return []
    every = described.facts["clients"]
    mean = divergence(described, "kind" if "sources" in compared else "label")
    about = f"What every two clients train on, by {' and '.join(compared)}: 1 alike, 0 nothing in common" + (
        f"; {len(shown)} of {every:,} clients, evenly chosen." if len(shown) < every else "."
    )
    if mean["between"] is not None and mean["within"] is not None:
        about += (
            " Clients in the order of their ground-truth groups (lines between them); mean similarity "
            f"{1 - mean['between']:.2f} between groups, {1 - mean['within']:.2f} within."
        )
    title = "How alike clients' data is"
    return [Figure("similarity", "data", title, about, "heatmap", similarities(described, most))]


def similarities(described: Described, most: int = SHOWN) -> dict[str, Any]:
    """How alike any two clients are: one minus the total variation distance of what they hold."""
    shown, alike, compared = alikeness(described, most)
    groups, facts = described.groups, described.facts
    found = divergence(described, "kind" if "sources" in compared else "label")
    heading = f"{_problem(facts)}: mean distance"
    if found["between"] is None or found["within"] is None:
        heading += f" of two clients {found['all'] or 0:.2f}"
    else:
        heading += f" between groups {found['between']:.2f}, within {found['within']:.2f}"
    names = [f"client {c}" + ("" if groups is None else f" (group {groups[c]})") for c in shown]
    edges = [] if groups is None else (np.flatnonzero(np.diff(groups[shown])) + 0.5).tolist()
    blocks = [] if groups is None else _blocks(groups[shown])
    return {
        "z": np.round(alike, 2).tolist(), "x": names, "y": names, "edges": edges, "title": "similarity",
        "names": None, "range": [0, 1], "blocks": blocks, "heading": heading,
    }  # fmt: skip


def _problem(facts: dict[str, Any]) -> str:
    return f"{facts.get('data', 'data')}, {facts.get('partition', 'partition')}"


def _blocks(groups: npt.NDArray[Any]) -> list[dict[str, Any]]:
    """The middle of each run of equal groups and its name, as far as names fit."""
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    word = "group " if len(cuts) <= 6 else ""  # numbers alone where words would meet on a phone
    return [
        {"at": (start + end - 1) // 2, "name": f"{word}{groups[start]}"}
        for start, end in pairwise(cuts)
        if end - start >= len(groups) / 20
    ]
