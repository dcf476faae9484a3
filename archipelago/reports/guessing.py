"""What guessing is worth: always the most frequent class of the client, or of its ground-truth group.

Worked out from what clients hold (`federation/` of a run directory), so runs from before have it too. With skewed
labels it is the larger part of an accuracy, and it changes from partition to partition: a table without it cannot say
how much was learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.metrics import METRICS
from archipelago.reports.federation import read_federation
from archipelago.runs.files import RunFiles

# Who the class is the most frequent one of -> what a row and a line are called.
GUESSES = {
    "client": "client's most frequent class",
    "cluster": "group's most frequent class",
}
ABOVE = "client"  # what lift is measured from

Integers = npt.NDArray[np.int64]


def guessing(run: RunFiles) -> dict[str, dict[str, float]]:
    """{"client": {column of metrics.csv: value}, "cluster": ...}; empty without classes, or without `federation/`.

    The class is that of training samples, the score that of test samples; clients held out do not count.
    """
    if not (run.path / "federation" / "counts.parquet").is_file():
        return {}
    try:
        described = read_federation(run.path)
    except UserError:  # damaged: the figures of the federation say so
        return {}
    if described.facts["classes"] is None:
        return {}
    train, test = described.table("train"), described.table("test")
    weights = train if run.setting("evaluation.weights") != "test" else test
    counted = (test.sum(axis=1) > 0) & ~_held_out(run, len(test))
    if not counted.any():
        return {}
    guesses = {"client": train.argmax(axis=1)}
    groups = described.groups
    if groups is not None:
        by_group = np.zeros((int(groups.max()) + 1, train.shape[1]), np.int64)
        np.add.at(by_group, groups, train)
        guesses["cluster"] = by_group.argmax(axis=1)[groups]
    sizes = weights.sum(axis=1)[counted].astype(np.float64)
    return {kind: _columns(test[counted], guess[counted], sizes) for kind, guess in guesses.items()}


def most_frequent(train: Integers, test: Integers, sizes: npt.NDArray[np.float64], by: Integers) -> float:
    """Accuracy (weighted by `sizes`) of always predicting the most frequent training class of all clients alike `by`.

    >>> train, test = np.array([[3, 1], [0, 2], [1, 5]]), np.array([[2, 2], [0, 4], [1, 3]])
    >>> most_frequent(train, test, np.ones(3), np.array([0, 1, 1]))
    0.75
    """
    found = np.zeros((int(by.max()) + 1, train.shape[1]), np.int64)
    np.add.at(found, by, train)
    return _columns(test, found.argmax(axis=1)[by], sizes)["micro_accuracy"]


def _held_out(run: RunFiles, clients: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(clients, bool)
    if run.setting("holdout_clients"):
        table = run.table("clients", ["client", "held_out"])
        if "held_out" in table:
            found[table["client"][table["held_out"].astype(bool)]] = True
    return found


def _columns(test: Integers, guess: Integers, sizes: npt.NDArray[np.float64]) -> dict[str, float]:
    """The columns of metrics.csv that a guess would have."""
    hits = test[np.arange(len(test)), guess].astype(np.float64)
    samples = test.sum(axis=1)
    present = (test > 0).sum(axis=1)
    found: dict[str, float] = {}
    for name, entry in METRICS.items():
        if (value := entry.capabilities.get("guess")) is None:
            continue
        column = value(hits, samples, present)
        found[f"micro_{name}"] = math.fsum(column * sizes) / math.fsum(sizes)
        found[f"macro_{name}"] = math.fsum(column) / len(column)
        worst = np.sort(column)[: math.ceil(len(column) / 10)]
        found[f"worst10_{name}"] = math.fsum(worst) / len(worst)
    return found


def lift(final: Mapping[str, Any], guessed: Mapping[str, Mapping[str, float]], metric: str) -> float | None:
    """How far a metric is above always guessing the client's most frequent class; None where that has none."""
    floor, value = guessed.get(ABOVE, {}).get(metric), final.get(metric)
    return None if floor is None or not isinstance(value, int | float) else float(value) - floor
