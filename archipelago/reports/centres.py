"""Cluster models on every planted distribution (FedSoft's Tables 1, 3 and 4), as figures that seeds have in common.

Which model is number 0 is an accident of a run, and of a paper. Models are told apart by what they are for: each
is matched with the distribution that it serves, so that all of them together serve all distributions best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

KINDS = {"centre_accuracy": True, "centre_mse": False}  # column of metrics.csv -> whether more is better


def centre_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over evaluations: `centre_accuracy[d,s]` of the model for s on d, `best_centre_accuracy[d]` of any.

    >>> found = centre_figures([{"centre_accuracy": [[0.25, 0.5], [0.75, 0.5]]}])
    >>> found["centre_accuracy[0,0]"], found["centre_accuracy[1,1]"], found["best_centre_accuracy[0]"]
    (0.5, 0.75, 0.5)
    """
    found: dict[str, float] = {}
    for name, more_is_better in KINDS.items():
        measured = [np.asarray(row[name], np.float64) for row in rows if name in row]
        if not measured or len({each.shape for each in measured}) > 1:
            continue
        matrix = np.mean(measured, axis=0)
        best = matrix.max(axis=1) if more_is_better else matrix.min(axis=1)
        found |= {f"best_{name}[{d}]": float(value) for d, value in enumerate(best)}
        if matrix.shape[0] == matrix.shape[1] and np.isfinite(matrix).all():
            found |= named(name, matrix)
    return found


def named(name: str, matrix: Matrix) -> dict[str, float]:
    """The cells of a square matrix (distribution, model), models named by the distribution they serve."""
    serves = served_by(name, matrix)
    return {
        f"{name}[{d},{serves[model]}]": float(value)
        for d, row in enumerate(matrix)
        for model, value in enumerate(row)
    }


def served_by(name: str, matrix: Matrix) -> dict[int, int]:
    """Model -> the distribution that it serves.

    >>> served_by("centre_mse", np.array([[68.4, 29.5], [21.8, 58.6]]))
    {1: 0, 0: 1}
    """
    from scipy.optimize import linear_sum_assignment

    distributions, models = linear_sum_assignment(matrix, maximize=KINDS[name])
    return {int(model): int(d) for d, model in zip(distributions, models, strict=True)}
