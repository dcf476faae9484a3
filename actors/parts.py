"""How the parts of an additive method are: CAM's shared and cluster part, FeMAM's levels.

A sum can be as good as one of its parts while the other does nothing, and no accuracy of the sum shows it. So at some
evaluations each part is measured alone: its norm against that of a fresh model, its accuracy, and its share of the
variance of the summed logits. `archipelago/reports/health.py` reads the columns `part_NAME_norm`, `_accuracy` and
`_variance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.fleet import Fleet
from actors.metrics import summarise
from archipelago.strategies.interface import ClientView
from archipelago.strategies.references import Prediction

MOST = 20  # evaluations of a run at which parts are measured


def due(round: int, rounds: int, every: int, most: int = MOST) -> bool:
    """Whether parts are measured at this evaluation: at all of a few, at evenly spaced ones of many, at the last one.

    >>> [round for round in range(1, 101) if round % 2 == 0 and due(round, 100, 2, most=5)]
    [20, 40, 60, 80, 100]
    >>> [round for round in (3, 6, 7) if due(round, 7, 3)]
    [3, 6, 7]
    """
    evaluated = rounds // every + (rounds % every > 0)
    left = evaluated - (evaluated if round == rounds else round // every)
    return left % -(-evaluated // most) == 0


def part_metrics(
    fleet: Fleet,
    prediction: Prediction,
    population: npt.NDArray[np.int64],
    weights: npt.NDArray[Any],
    fresh: float,
    measured: Sequence[str],
) -> dict[str, float]:
    """The columns of every part of a prediction that names its parts; `weights` are aligned with the fleet's
    clients, `fresh` is a norm, `measured` are the metrics that are asked of a part alone."""
    names = prediction.names or []
    parts = {f"part{at}": model for at, model in enumerate(prediction.models)}
    described = fleet.describe(_described, stage="parts", left=_left_out(fleet, prediction), **parts)
    table = np.array(described, np.float64).reshape(len(fleet.ids), len(parts), 2)
    trains = np.isin(fleet.ids, population)
    whole = np.nansum(table[trains, :, 1])
    found: dict[str, float] = {}
    for at, name in enumerate(names):
        norms = table[:, at, 0]
        holds = trains & np.isfinite(norms)
        if prediction.weights is not None:
            holds &= prediction.weights[:, at] != 0
        if not holds.any():
            continue
        found[f"part_{name}_norm"] = float(norms[holds].mean()) / fresh
        columns = fleet.evaluate(_alone(prediction, at, holds), "test")
        ids = np.flatnonzero(holds)
        alone = {name: column[ids] for name, column in columns.items() if name != "client"}
        summed = summarise(alone, weights[ids])
        for metric in (each for each in measured if each in alone):
            found[f"part_{name}_{metric}"] = summed[f"micro_{metric}"]
        if whole > 0:
            found[f"part_{name}_variance"] = float(np.nansum(table[trains, at, 1])) / float(whole)
    return found


def _left_out(fleet: Fleet, prediction: Prediction) -> dict[int, list[int]]:
    """By client: the parts that it still has and predicts without."""
    if prediction.weights is None:
        return {}
    rows = zip(fleet.ids.tolist(), prediction.weights, strict=True)
    return {i: np.flatnonzero(row == 0).tolist() for i, row in rows if (row == 0).any()}


def _alone(prediction: Prediction, at: int, holds: npt.NDArray[np.bool_]) -> Prediction:
    """One part for the clients that have it; the others, who must predict with something, keep all of theirs."""
    if holds.all():
        return Prediction([prediction.models[at]])
    weights = np.ones((len(holds), len(prediction.models)))
    weights[holds] = np.arange(len(prediction.models)) == at
    return Prediction(prediction.models, weights)


def norm_of(model: npt.NDArray[Any]) -> float:
    """The Euclidean norm, by NumPy's own sum: BLAS has other bits with another number of threads.

    >>> norm_of(np.array([3.0, 4.0], np.float32))
    5.0
    """
    return float(np.sqrt(np.add.reduce(np.square(np.asarray(model, np.float64)))))


def _described(client: ClientView, left: dict[int, list[int]], **parts: Any) -> list[float]:
    """Of each part in turn: its norm (NaN where the client has none), and its covariance with the summed logits.

    `left` are parts that a client does not predict with.

    Logits are compared among the classes of a sample: what is added to all of them changes no prediction.
    """
    test = client.unlabelled("test")
    outputs: list[npt.NDArray[np.float64] | None] = []
    without = left.get(client.id, [])
    for at in range(len(parts)):
        if parts[f"part{at}"] is None or at in without or not test.size:
            outputs.append(None)
            continue
        logits = np.asarray(test.outputs(parts[f"part{at}"]), np.float64)
        logits = logits.reshape(len(logits), -1)
        outputs.append(logits - logits.mean(axis=1, keepdims=True) if logits.shape[1] > 1 else logits)
    whole = sum(each for each in outputs if each is not None)
    found: list[float] = []
    for at, each in enumerate(outputs):
        model = parts[f"part{at}"]
        norm = float("nan") if model is None else norm_of(model)
        found += [norm, 0.0 if each is None else float((each * whole).sum())]
    return found
