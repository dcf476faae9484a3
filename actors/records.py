"""What a run writes down of its clients' models, so that a report can draw them: small tables of a few rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from actors.fleet import Fleet

COMPONENTS = 20  # enough for t-SNE to start from
_WIDEST = 50_000  # columns of a model that are compared at most

Tables = dict[str, dict[str, npt.NDArray[Any]]]


def compared_rounds(rounds: int, count: int) -> tuple[int, ...]:
    """`count` rounds from the first to the last, denser at the start, where clusters form.

    >>> compared_rounds(100, 4), compared_rounds(2, 4), compared_rounds(100, 1), compared_rounds(5, 0)
    ((1, 5, 22, 100), (1, 2), (100,), ())
    """
    if count < 2:
        return (rounds,) * count
    return tuple(sorted({round(float(at)) for at in np.geomspace(1, rounds, count)}))


def client_models(fleet: Fleet, most: int) -> Tables:
    """Tables of the round's first local training, for `most` clients at most; empty if nobody trained.

    `models` has the principal components (`pc_0`, ...) of each client's classifier, `cosine` the cosine of every two
    of them. Neither counts as a cost of the method: call this after the costs of the round were taken.
    """
    trained = fleet.first_trained
    if trained is None or trained.arrived.sum() < 2:
        return {}
    arrived = np.flatnonzero(trained.arrived)
    chosen = arrived[np.unique(np.linspace(0, len(arrived) - 1, min(most, len(arrived))).astype(np.int64))]
    columns = next(
        found for part in ("classifier", "head", "parameters") if len(found := fleet.spec.columns(part))
    )
    if len(columns) > _WIDEST:
        columns = columns[np.linspace(0, len(columns) - 1, _WIDEST).astype(np.int64)]
    points = trained.some(chosen).gather(columns).astype(np.float64)
    ids = trained.ids[chosen]
    scores = principal_components(points)
    count = len(ids)
    return {
        "models": {
            "client": ids,
            **{f"pc_{k}": scores[:, k].astype(np.float32) for k in range(scores.shape[1])},
        },
        "cosine": {
            "client": np.repeat(ids, count),
            "other": np.tile(ids, count),
            "cosine": cosines(points).ravel().astype(np.float32),
        },
    }


def principal_components(points: npt.NDArray[np.float64], most: int = COMPONENTS) -> npt.NDArray[np.float64]:
    """(n, k) scores on the principal components that are there, the widest first; the largest score is positive.

    >>> principal_components(np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0]])).round(6).tolist()
    [[2.0], [0.0], [-2.0]]
    """
    centred = points - points.mean(axis=0)
    with threadpool_limits(limits=1):  # the same sums on any machine
        values, vectors = np.linalg.eigh(centred @ centred.T)
    order = np.argsort(values)[::-1][:most]
    kept = order[values[order] > 1e-12 * max(float(values[-1]), 1e-300)]
    if not len(kept):
        return np.zeros((len(points), 1))
    scores = vectors[:, kept] * np.sqrt(values[kept])
    signs = np.sign(scores[np.abs(scores).argmax(axis=0), np.arange(len(kept))])
    return scores * signs + 0.0  # no negative zeros


def cosines(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The cosine of every two rows; 0 with a row of zeros."""
    norms = np.sqrt((points**2).sum(axis=1, keepdims=True))
    unit = np.divide(points, norms, out=np.zeros_like(points), where=norms > 0)
    with threadpool_limits(limits=1):
        return np.clip(unit @ unit.T, -1.0, 1.0)
