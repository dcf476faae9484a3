"""Cluster models on every ground-truth distribution (FedSoft's Tables 1, 3, 4), as metrics that seeds have in common.

Which model is number 0 is an accident of a run, and of a paper. Models are distinguished by what they are for: each
is matched with the distribution that it serves, so that all of them together serve all distributions best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.metrics import Spec
from archipelago.core.vocabulary import Vocabulary, built_in

Matrix = npt.NDArray[np.float64]

BEGINNING = "centre_"  # of columns of metrics.csv: a row per distribution, a column per model


def centre_columns(known: Iterable[str], vocabulary: Vocabulary) -> dict[str, Spec]:
    """{column: metric} of those among `known` that measure cluster models on distributions.

    >>> list(centre_columns(["round", "centre_mse"], built_in()))
    ['centre_mse']
    """
    there = set(known)
    named = {f"{BEGINNING}{spec.name}": spec for spec in vocabulary.shown("distributions")}
    return {column: spec for column, spec in named.items() if column in there}


def is_of_centres(column: str) -> bool:
    """Whether a metric is about one cluster model on one distribution."""
    return column.startswith(BEGINNING)


def centre_metrics(
    rows: Sequence[Mapping[str, Any]], vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    """Means over evaluations: `centre_accuracy[d,s]` of the model for s on d, `best_centre_accuracy[d]` of any.

    >>> found = centre_metrics([{"centre_accuracy": [[0.25, 0.5], [0.75, 0.5]]}])
    >>> found["centre_accuracy[0,0]"], found["centre_accuracy[1,1]"], found["best_centre_accuracy[0]"]
    (0.5, 0.75, 0.5)
    """
    found: dict[str, float] = {}
    for name, spec in centre_columns(
        (name for row in rows for name in row), vocabulary or built_in()
    ).items():
        higher = spec.better == "higher"
        measured = [np.asarray(row[name], np.float64) for row in rows if name in row]
        if not measured or len({each.shape for each in measured}) > 1:
            continue
        matrix = np.mean(measured, axis=0)
        best = matrix.max(axis=1) if higher else matrix.min(axis=1)
        found |= {f"best_{name}[{d}]": float(value) for d, value in enumerate(best)}
        if matrix.shape[0] == matrix.shape[1] and np.isfinite(matrix).all():
            found |= named(name, matrix, higher)
    return found


def named(name: str, matrix: Matrix, higher: bool) -> dict[str, float]:
    """The cells of a square matrix (distribution, model), models named by the distribution they serve."""
    serves = served_by(matrix, higher)
    return {
        f"{name}[{d},{serves[model]}]": float(value)
        for d, row in enumerate(matrix)
        for model, value in enumerate(row)
    }


def served_by(matrix: Matrix, higher: bool) -> dict[int, int]:
    """Model -> the distribution that it serves; `higher` values are the better ones, or the lower.

    >>> served_by(np.array([[68.4, 29.5], [21.8, 58.6]]), higher=False)
    {1: 0, 0: 1}
    """
    from scipy.optimize import linear_sum_assignment

    distributions, models = linear_sum_assignment(matrix, maximize=higher)
    return {int(model): int(d) for d, model in zip(distributions, models, strict=True)}
