"""A federation as tables: one row a client, and how many samples of each source and class it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.data.division import PARTS
from archipelago.data.federation import Federation

Table = dict[str, NDArray[Any]]


def client_table(federation: Federation) -> Table:
    """`client`, samples by part, and the ground truth: `group`, `level_1` (coarsest) ..., `copy_of`."""
    table: Table = {"client": np.arange(len(federation.clients), dtype=np.int32)}
    for part in PARTS:
        sizes = [len(getattr(client, part)) for client in federation.clients]
        table[part] = np.array(sizes, dtype=np.int32)
    if federation.groups is not None:
        table["group"] = federation.groups.astype(np.int32)
    for number, level in enumerate(federation.levels if federation.levels is not None else ()):
        table[f"level_{number + 1}"] = level.astype(np.int32)
    if federation.copy_of is not None:
        table["copy_of"] = federation.copy_of.astype(np.int32)
    return table


def count_table(federation: Federation) -> Table:
    """`client`, `part`, `source`, `label`, `samples`: one row for each combination that occurs.

    `source` is 0 where there is no ground truth, `label` 0 where targets are real numbers. Rows of held-out sets have
    the number of their distribution for a client, and `part` "holdout".
    """
    pieces = [(part, [getattr(client, part) for client in federation.clients]) for part in PARTS]
    if federation.holdout:
        pieces.append(("holdout", list(federation.holdout)))
    rows: list[Table] = []
    for part, held in pieces:
        position = np.concatenate(held)
        client = np.repeat(np.arange(len(held)), [len(each) for each in held])
        source = np.zeros(len(position), dtype=np.int64)
        if federation.sources is not None:
            source = np.maximum(federation.sources[position], 0)
        label = np.zeros(len(position), dtype=np.int64)
        if federation.classes is not None:
            label = federation.y[position]
        cells, counts = np.unique(np.stack([client, source, label]), axis=1, return_counts=True)
        table = {name: cells[at].astype(np.int32) for at, name in enumerate(("client", "source", "label"))}
        rows.append(
            {
                "client": table["client"],
                "part": np.full(len(counts), part),
                "source": table["source"],
                "label": table["label"],
                "samples": counts.astype(np.int32),
            }
        )
    return {name: np.concatenate([table[name] for table in rows]) for name in rows[0]}


def facts(federation: Federation) -> dict[str, Any]:
    """What a reader of the tables must know besides."""
    return {
        "data": federation.name,
        "classes": federation.classes,
        "clients": len(federation.clients),
        "samples": len(federation.x),
        "sources": 1 if federation.sources is None else int(federation.sources.max()) + 1,
        "groups": None if federation.groups is None else int(federation.groups.max()) + 1,
        "levels": 0 if federation.levels is None else len(federation.levels),
        "holdout": [len(each) for each in federation.holdout],
        "published_protocol": federation.copy_of is not None,
        "notes": list(federation.notes),
        "address": federation.address,
        "fingerprint": federation.fingerprint,
    }
