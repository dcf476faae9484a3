"""The metrics of one client, of all clients of a round, and of a clustering: `archipelago.core.metrics`, computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archipelago.core.metrics import METRICS, Evaluated, chosen, spec_of, task_of
from archipelago.core.settings import EvaluationSettings

if TYPE_CHECKING:  # the server and the driver import this module too, and torch takes seconds
    from torch import Tensor


def client_metrics(
    outputs: Tensor,
    targets: Tensor,
    losses: Tensor,
    classes: int | None,
    plugins: Iterable[str] = (),
    evaluation: EvaluationSettings | None = None,
) -> dict[str, float]:
    """Every metric of the task for one client: `loss` and, say, `accuracy` and `macro_f1`; NaN without samples.

    `outputs` are logits of shape (samples, classes), or predictions of the shape of `targets` up to
    dimensions of size one (`classes=None`). `plugins` are the run's: their metrics count too, and those that
    `evaluation` names.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    >>> found = client_metrics(logits, torch.tensor([0, 1, 1]), torch.tensor([0.25, 0.5, 0.75]), classes=3)
    >>> {name: round(value, 3) for name, value in found.items()}
    {'loss': 0.5, 'accuracy': 0.667, 'macro_f1': 0.667}
    """
    task = task_of(classes)
    functions = {
        entry.name: entry.value
        for entry in chosen(plugins, () if evaluation is None else evaluation.metrics)
        if task in spec_of(entry).tasks and spec_of(entry).over == "clients"
    }
    if len(targets) == 0:
        return dict.fromkeys(functions, math.nan)
    arguments = {} if evaluation is None else evaluation.metric_options
    evaluated = Evaluated(outputs.detach(), targets, losses.detach(), classes, arguments)
    return {name: float(function(evaluated)) for name, function in functions.items()}


def summarise(clients: Mapping[str, npt.NDArray[Any]], weights: npt.ArrayLike) -> dict[str, float]:
    """Sums over clients of every metric among the columns of `clients`.

    `micro_` is weighted by `weights` (sizes), `macro_` the plain mean, `worst10_` the mean over the worst
    tenth of the clients (at least one: lowest accuracy, highest loss), `std_` the
    standard deviation (ddof 0). Clients whose `samples` column says 0 had nothing to be measured on and are
    left out; any other NaN shows in the sums. Sums are exactly rounded: no order changes a bit.

    >>> summarise({"accuracy": np.array([0.5, 1.0])}, [1, 3])
    {'micro_accuracy': 0.875, 'macro_accuracy': 0.75, 'worst10_accuracy': 0.5, 'std_accuracy': 0.25}
    """
    sizes = np.asarray(weights, dtype=np.float64)
    kept = np.asarray(clients["samples"]) > 0 if "samples" in clients else np.ones(len(sizes), dtype=bool)
    sizes = sizes[kept]
    total = math.fsum(sizes)
    found: dict[str, float] = {}
    for name, entry in METRICS.items():
        spec = spec_of(entry)
        if name not in clients or spec.over != "clients":
            continue
        column = np.asarray(clients[name], dtype=np.float64)
        if column.shape != kept.shape:
            raise ValueError(f"column '{name}' has shape {column.shape}, the weights {kept.shape}")
        values = np.asarray(column[kept])
        count = len(values)
        # NaN sorts last, hence among the worst of a loss; with samples, an accuracy is never NaN.
        ordered = np.sort(values) if spec.better == "higher" else np.sort(values)[::-1]
        mean = _mean(values)
        with np.errstate(all="ignore"):  # a diverged client's loss may be infinite: the sum says so
            found[f"micro_{name}"] = _sum(values * sizes) / total if total > 0 else math.nan
            found[f"macro_{name}"] = mean
            found[f"worst10_{name}"] = _mean(ordered[: math.ceil(count / 10)])
            found[f"std_{name}"] = math.sqrt(_mean((values - mean) ** 2))
    return found


def clustering_metrics(
    assignment: npt.NDArray[Any],
    previous: npt.NDArray[Any] | None,
    groups: npt.NDArray[Any] | None,
    clusters: int,
    plugins: Iterable[str] = (),
    more: Mapping[str, tuple[npt.NDArray[np.int64], npt.NDArray[Any]]] | None = None,
) -> dict[str, Any]:
    """Sizes, moves, and how good one assignment of clients is: by ground-truth groups (ARI, NMI, ...), and by `more`.

    That has, for other needs of metrics (silhouette, ...), some clients and what is known of them.

    -1 in any of the arrays means unknown, and counts nowhere. What cannot be said (no ground-truth groups, no
    earlier assignment) is None.

    >>> groups = np.array([0, 0, 1, 1])
    >>> found = clustering_metrics(np.array([1, 1, 0, -1]), np.array([1, 0, 0, 0]), groups, clusters=3)
    >>> {name: value for name, value in found.items() if value is not None}
    {'cluster_sizes': [1, 2, 0], 'empty_clusters': 1, 'changed': 1, 'ari': 1.0, 'nmi': 1.0}
    """
    assignment = np.asarray(assignment)
    known = assignment >= 0
    if known.any() and int(assignment.max()) >= clusters:
        raise ValueError(
            f"cluster {int(assignment.max())} is assigned, but there are only {clusters} clusters"
        )
    sizes = np.bincount(assignment[known], minlength=clusters)
    measured = [entry for entry in chosen(plugins) if spec_of(entry).over == "clusters"]
    found: dict[str, Any] = {
        "cluster_sizes": sizes.tolist(),
        "empty_clusters": int((sizes == 0).sum()),
        "changed": None,
        **dict.fromkeys(entry.name for entry in measured),
    }
    if previous is not None:
        both = known & (np.asarray(previous) >= 0)
        found["changed"] = int((assignment != previous)[both].sum())
    against = dict(more or {})
    if groups is not None:
        grouped = np.flatnonzero(known & (np.asarray(groups) >= 0)).astype(np.int64)
        against["groups"] = (grouped, np.asarray(groups)[grouped])
    for entry in measured:
        ids, what = against.get(spec_of(entry).needs, (np.zeros(0, np.int64), np.zeros(0)))
        rows = np.flatnonzero(assignment[ids] >= 0)
        if len(rows):
            seen = what[np.ix_(rows, rows)] if spec_of(entry).needs == "distances" else what[rows]
            value = float(entry.value(seen, assignment[ids][rows]))
            found[entry.name] = None if math.isnan(value) else value
    return found


def _mean(values: npt.NDArray[np.float64]) -> float:
    return _sum(values) / len(values) if len(values) else math.nan


def _sum(values: npt.NDArray[np.float64]) -> float:
    # fsum refuses what it cannot round (overflow, infinities of both signs); NumPy says inf or nan.
    if np.isfinite(values).all():
        try:
            return math.fsum(values)
        except OverflowError:
            pass
    with np.errstate(all="ignore"):
        return float(np.sum(values))
