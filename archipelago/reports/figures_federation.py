"""Figures of a run's federation: what its clients hold, and how alike that is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.reports.federation import SHOWN, alikeness, divergence, read_federation
from archipelago.reports.figures import Figure, chosen_of, evenly
from archipelago.reports.runs import RunFiles

COMPARED = 200  # clients in the heatmap at most


def label_bars(run: RunFiles) -> list[Figure]:
    """Samples of each class that each client trains on."""
    if not (run.path / "federation" / "facts.json").is_file():
        return []
    described = read_federation(run.path)
    if described.facts["classes"] is None:
        return []
    counts, groups, order = described.table(), described.groups, evenly(described.order, SHOWN)
    names = [f"client {c}" + ("" if groups is None else f" (group {groups[c]})") for c in order]
    series = [
        {"name": f"class {k}", "y": counts[order, k].tolist(), "color": k} for k in range(counts.shape[1])
    ]
    data = {"x": "client", "y": "training samples", "at": names, "series": series, "bars": True}
    about = "Training samples of each class at each client" + (
        ", by planted group." if groups is not None else "."
    )
    about += chosen_of(len(order), len(described.order))
    return [Figure("labels", "data", "Who holds what", about, "stack", data)]


def similarity_map(run: RunFiles, most: int = COMPARED) -> list[Figure]:
    """How alike the data of any two clients is."""
    if not (run.path / "federation" / "facts.json").is_file():
        return []
    described = read_federation(run.path)
    shown, alike, compared = alikeness(described, most)
    if not compared or len(shown) < 2:
        return []
    groups, every = described.groups, described.facts["clients"]
    mean = divergence(described, "kind" if "sources" in compared else "label")
    about = f"What every two clients train on, by {' and '.join(compared)}: 1 alike, 0 nothing in common" + (
        f"; {len(shown)} of {every:,} clients, evenly chosen." if len(shown) < every else "."
    )
    if mean["between"] is not None and mean["within"] is not None:
        about += (
            " Clients in the order of their planted groups (lines between them); mean similarity "
            f"{1 - mean['between']:.2f} between groups, {1 - mean['within']:.2f} within."
        )
    names = [f"client {c}" + ("" if groups is None else f" (group {groups[c]})") for c in shown]
    edges = [] if groups is None else (np.flatnonzero(np.diff(groups[shown])) + 0.5).tolist()
    blocks = [] if groups is None else _blocks(groups[shown])
    data = {"z": np.round(alike, 2).tolist(), "x": names, "y": names, "edges": edges, "title": "similarity",
            "names": None, "range": [0, 1], "blocks": blocks}  # fmt: skip
    return [Figure("similarity", "data", "How alike clients' data is", about, "heatmap", data)]


def _blocks(groups: npt.NDArray[Any]) -> list[dict[str, Any]]:
    """The middle of each run of equal groups and its name, as far as there is room for names."""
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    word = "group " if len(cuts) <= 6 else ""  # numbers alone where words would meet on a phone
    return [
        {"at": (start + end - 1) // 2, "name": f"{word}{groups[start]}"}
        for start, end in pairwise(cuts)
        if end - start >= len(groups) / 20
    ]
