"""A federation in words and pictures: who holds what, and how different clients and groups are.

Reads `federation/` of a run directory, or of what `launch partition` wrote, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.runs.files import read_yaml

Numbers = NDArray[Any]

SHOWN = 400  # clients that a figure can show; of more, evenly chosen ones are drawn
COMPARED = 500  # clients whose pairs are compared for the description in words


@dataclass(frozen=True, eq=False)
class Described:
    """The tables of one federation."""

    facts: dict[str, Any]
    clients: dict[str, Numbers]
    counts: dict[str, Numbers]

    @property
    def groups(self) -> Numbers | None:
        """The ground-truth group of each client."""
        return self.clients.get("group")

    @property
    def ground_truth(self) -> list[str]:
        """Columns of `clients` with ground-truth groups, coarsest first; empty where there are none."""
        levels = [name for name in self.clients if name.startswith("level_")]
        return levels or (["group"] if self.groups is not None else [])

    def table(self, part: str = "train", by: str = "label") -> Numbers:
        """(clients, labels or sources or both): samples of a part; `by` is label, source or kind (both)."""
        sources, labels = self.facts["sources"], self.facts["classes"] or 1
        rows = self.counts["part"] == part
        column, width = {
            "label": (self.counts["label"], labels),
            "source": (self.counts["source"], sources),
            "kind": (self.counts["source"] * labels + self.counts["label"], sources * labels),
        }[by]
        found = np.zeros((self.facts["clients"], width), dtype=np.int64)
        np.add.at(found, (self.counts["client"][rows], column[rows]), self.counts["samples"][rows])
        return found

    @cached_property
    def order(self) -> Numbers:
        """Clients as figures show them: by ground-truth group, then by number."""
        count = self.facts["clients"]
        return np.arange(count) if self.groups is None else np.argsort(self.groups, kind="stable")


def read_federation(path: str | Path) -> Described:
    """The federation of a run."""
    import pyarrow.parquet as pq

    folder = Path(path) / "federation"
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        facts["partition"] = _partition(Path(path) / "config.yaml")
        tables = [
            {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}
            for table in (pq.read_table(folder / f"{name}.parquet") for name in ("clients", "counts"))
        ]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} does not say how its data was divided: expected federation/ with facts.json, clients.parquet and "
            f"counts.parquet ({error}).",
            code="not-recorded", path=path,
        ) from error  # fmt: skip
    return Described(facts, *tables)


def _partition(config: Path) -> str:
    """The name of the partition, as the config beside the tables has it."""
    if not config.exists():
        return "partition"
    settings = read_yaml(config.read_text(encoding="utf-8"), config)
    section = settings.get("partition") if isinstance(settings, dict) else None
    return str(section.get("name")) if isinstance(section, dict) else "partition"


# How different clients are ----------------------------------------------------------------------------------


def distances(counts: Numbers) -> NDArray[np.float64]:
    """(n, n) total variation distances of the rows as distributions: 0 alike, 1 with nothing in common.

    >>> distances(np.array([[1, 1], [2, 2], [4, 0]])).tolist()
    [[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.5, 0.5, 0.0]]
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    found = np.zeros((len(shares), len(shares)))
    for row, own in enumerate(shares):
        found[row] = 0.5 * np.abs(shares - own).sum(axis=1)
    return found


def alikeness(
    described: Described, most: int = SHOWN
) -> tuple[Numbers, NDArray[np.float64], tuple[str, ...]]:
    """(clients, by ground-truth group and evenly chosen of many; how alike any two are; what was compared).

    One minus the distance of what they train on: 1 alike, 0 nothing in common. Nothing is compared, and no client
    distinguished from another, where targets are real numbers of one source.
    """
    shown, facts = _some(described.order, most), described.facts
    compared = (*["classes"] * (facts["classes"] is not None), *["sources"] * (facts["sources"] > 1))
    by = "kind" if facts["sources"] > 1 else "label"
    return shown, 1 - distances(described.table(by=by)[shown]), compared


def divergence(described: Described, by: str = "label") -> dict[str, float | None]:
    """Mean distance of pairs of clients: of all, of pairs in different ground-truth groups, in the same one."""
    chosen = _some(np.arange(described.facts["clients"]), COMPARED)
    apart = distances(described.table(by=by)[chosen])
    pairs = ~np.eye(len(chosen), dtype=bool)
    groups = np.zeros(len(chosen)) if described.groups is None else described.groups[chosen]
    same = groups[:, None] == groups[None, :]

    def mean(which: NDArray[np.bool_]) -> float | None:
        return float(apart[which].mean()) if which.any() else None

    grouped = described.groups is not None
    return {
        "all": mean(pairs),
        "between": mean(~same) if grouped else None,
        "within": mean(same & pairs) if grouped else None,
    }


def _some(ids: Numbers, most: int) -> Numbers:
    return ids if len(ids) <= most else ids[np.arange(most) * len(ids) // most]


# In words ---------------------------------------------------------------------------------------------------


def describe(path: str | Path) -> list[tuple[str, str]]:
    """What there is to say about a federation, as (what, how much) pairs."""
    described = read_federation(path)
    facts, clients = described.facts, described.clients
    rows = [("data", f"{facts['data']}, {facts['samples']:,} samples"), ("clients", f"{facts['clients']:,}")]
    for part, name in (("train", "training"), ("validation", "validation"), ("test", "test")):
        if clients[part].any():
            rows.append((f"{name} samples", f"{clients[part].sum():,}; per client {_spread(clients[part])}"))
    if facts["holdout"]:
        rows.append(("held out, per distribution", _some_numbers(facts["holdout"], "samples")))
    if facts["classes"] is not None:
        rows.append(("classes per client", _spread((described.table() > 0).sum(axis=1))))
    if facts["sources"] > 1:
        rows.append(("sources per client", _spread((described.table(by="source") > 0).sum(axis=1))))
    rows += _ground_truth(described)
    if facts["classes"] is not None:
        rows.append(("label divergence", _divergence(described, "label")))
    if facts["sources"] > 1:
        rows.append(
            ("divergence with shifts" if facts["classes"] else "divergence", _divergence(described, "kind"))
        )
    rows += [("note", note) for note in facts["notes"]]
    rows.append(("content address", facts["address"]))
    return rows


def _ground_truth(described: Described) -> list[tuple[str, str]]:
    if described.groups is None:
        return [("ground-truth groups", "none")]
    names, rows = described.ground_truth, []
    for number, name in enumerate(names):
        sizes = np.bincount(described.clients[name])
        title = "ground-truth groups" if len(names) == 1 else f"ground-truth groups, level {number + 1}"
        rows.append((title, f"{len(sizes)}, of {_some_numbers(sizes.tolist(), 'clients')}"))
    return rows


def _divergence(described: Described, by: str) -> str:
    found = divergence(described, by)
    if found["all"] is None:
        return "one client only"
    text = f"{found['all']:.3f} between two clients"
    if found["between"] is not None and found["within"] is not None:
        text = f"{found['between']:.3f} between groups, {found['within']:.3f} within"
    over = described.facts["clients"]
    sampled = f"; {COMPARED:,} of {over:,} clients compared" if over > COMPARED else ""
    return f"{text} (mean total variation distance of pairs: 0 alike, 1 nothing in common{sampled})"


def _spread(values: Numbers) -> str:
    if values.min() == values.max():
        return f"{values.min():,}"
    return f"{values.min():,} to {values.max():,}, median {np.median(values):,.4g}"


def _some_numbers(values: list[int], what: str, most: int = 12) -> str:
    if len(set(values)) == 1 and len(values) > 1:
        return f"{values[0]} {what} each"
    shown = ", ".join(map(str, values[:most]))
    return f"{shown} {what}" if len(values) <= most else f"{shown}, ... {what}"
