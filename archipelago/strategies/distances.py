"""How far apart clients are: Euclidean distances, cosines, and angles between subspaces.

Pure functions in float64 on one thread, so that the same points have the same distances anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

Features = npt.NDArray[np.floating[Any]]
Points = npt.NDArray[np.float64]

DISTANCES = ("euclidean", "cosine", "principal_angles")


def pairwise(features: Features, distance: str = "euclidean", vectors: int = 1) -> Points:
    """(n, n) distances of the rows of `features`; principal angles in degrees, summed.

    A row may be a subspace: an orthonormal basis (d, `vectors`), flattened.

    >>> pairwise(np.array([[0.0, 0.0], [3.0, 4.0]])).tolist()
    [[0.0, 5.0], [5.0, 0.0]]
    >>> pairwise(np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]), "cosine").tolist()
    [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
    >>> pairwise(np.array([[1.0, 0.0], [1.0, 1.0]]), "principal_angles").round(6).tolist()
    [[0.0, 45.0], [45.0, 0.0]]
    """
    return between(features, features, distance, vectors, same=True)


def between(
    rows: Features, others: Features, distance: str = "euclidean", vectors: int = 1, same: bool = False
) -> Points:
    """(n, m) distances of two sets of points; `same`: of one set, whose distances to themselves are exactly 0."""
    if distance not in DISTANCES:
        raise ValueError(f"expected a distance of {', '.join(DISTANCES)}, got {distance!r}")
    with threadpool_limits(limits=1):
        a, b = np.asarray(rows, np.float64), np.asarray(others, np.float64)
        if distance == "principal_angles":
            found = _angles(_bases(a, vectors), _bases(b, vectors))
        elif distance == "cosine":
            found = 1.0 - np.clip(normalised(a, "l2") @ normalised(b, "l2").T, -1.0, 1.0)
        else:
            # Row by row: the difference of two near points loses no digits, as their squared lengths would.
            found = np.stack([np.sqrt(np.add.reduce((b - row) ** 2, axis=1)) for row in a])
    if same:
        found = (found + found.T) / 2.0
        np.fill_diagonal(found, 0.0)
    return found


def principal_angles(first: Points, second: Points) -> Points:
    """The angles between two subspaces in degrees, ascending, given orthonormal bases (d, p) and (d, q).

    >>> plane, tilted = np.eye(3)[:, :2], np.array([[1.0, 0.0], [0.0, 0.8], [0.0, 0.6]])
    >>> principal_angles(plane, tilted).round(2).tolist()
    [0.0, 36.87]
    """
    cosines = np.linalg.svd(first.T @ second, compute_uv=False)
    return np.sort(np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0))))


def _bases(points: Points, vectors: int) -> Points:
    """(n, d, vectors) with columns of length 1."""
    bases = points.reshape(len(points), -1, vectors)
    length = np.sqrt(np.add.reduce(bases**2, axis=1, keepdims=True))
    return np.divide(bases, length, out=bases.copy(), where=length > 0)


def _angles(first: Points, second: Points) -> Points:
    return np.array([[principal_angles(u, v).sum() for v in second] for u in first])


def normalised(features: Features, rule: str) -> Points:
    """Rows divided by their length ("l2"), by |sum of their entries| ("sum"), or not at all ("none").

    >>> normalised(np.array([[3.0, 4.0], [0.0, 0.0]]), "l2").tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    >>> normalised(np.array([[3.0, -1.0]]), "sum").tolist()
    [[1.5, -0.5]]
    """
    points = np.asarray(features, np.float64)
    if rule == "none":
        return points
    size = (
        np.sqrt(np.add.reduce(points**2, axis=1)) if rule == "l2" else np.abs(np.add.reduce(points, axis=1))
    )
    return np.divide(points, size[:, None], out=points.copy(), where=size[:, None] > 0)
