"""What figures of a run read from its tables: clusters by round, ground-truth groups."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from archipelago.runs.files import RunFiles

Labels = npt.NDArray[np.int64]


def assignments(run: RunFiles) -> dict[int, Labels]:
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


def ground_truth(run: RunFiles) -> Labels | None:
    """The ground-truth group of each client, if there are any."""
    table = run.table("clients", ["round", "client", "group"])
    if "group" not in table or not len(table["group"]):
        return None
    # Of a run under way, metrics may be rounds ahead of this table.
    last = table["round"] == table["round"].max()
    return np.asarray(table["group"], np.int64)[last][np.argsort(table["client"][last])]


def cluster_name(number: int) -> str:
    """
    >>> cluster_name(2), cluster_name(-1)
    ('cluster 2', 'none')
    """
    return "none" if number < 0 else f"cluster {number}"
