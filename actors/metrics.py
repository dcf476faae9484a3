"""Figures of one client, of all clients of a round, and of a clustering."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the server and the driver import this module too, and torchmetrics takes seconds
    from torch import Tensor

# Which end of a metric is the worse one.
_FIGURES = ("micro", "macro", "worst10", "std")
_LOW_IS_WORSE = {"loss": False, "accuracy": True, "macro_f1": True, "mse": False}


def client_metrics(outputs: Tensor, targets: Tensor, losses: Tensor, classes: int | None) -> dict[str, float]:
    """`loss`, and `accuracy` and `macro_f1` (classification) or `mse` (`classes=None`) of one client.

    `outputs` are logits of shape (samples, classes), or predictions of the shape of `targets` up to
    dimensions of size one. Macro-F1 is scikit-learn's `f1_score(average="macro", zero_division=0)`: over
    the labels that occur among the true or the predicted ones. Without samples every figure is NaN.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    >>> figures = client_metrics(logits, torch.tensor([0, 1, 1]), torch.tensor([0.25, 0.5, 0.75]), classes=3)
    >>> {name: round(value, 3) for name, value in figures.items()}
    {'loss': 0.5, 'accuracy': 0.667, 'macro_f1': 0.667}
    """
    samples = len(targets)
    if samples == 0:
        return dict.fromkeys(metric_names(classes), math.nan)
    loss = float(losses.detach().double().mean())
    if classes is None:
        error = outputs.detach().reshape(-1).double() - targets.reshape(-1).double()
        return {"loss": loss, "mse": float(error.square().mean())}
    import archipelago.core.torchvision_operators  # noqa: F401  (before the first import of torchmetrics)

    # isort: split
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    predicted = outputs.detach().argmax(dim=1)
    # Counting in torchmetrics and dividing in float64: exact, and half the time of its own F1 score.
    counts = multiclass_confusion_matrix(predicted, targets, max(classes, 2), validate_args=False)
    confusion = counts.cpu().numpy()
    right = confusion.diagonal()
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
    present = occurrences > 0
    f1 = 2.0 * right[present] / occurrences[present]
    return {"loss": loss, "accuracy": int(right.sum()) / samples, "macro_f1": math.fsum(f1) / len(f1)}


def metric_names(classes: int | None) -> list[str]:
    """What is measured of a client; without classes it is a regression."""
    return ["loss", "mse"] if classes is None else ["loss", "accuracy", "macro_f1"]


def figure_names(classes: int | None) -> list[str]:
    """The names that `summarise` gives to figures over clients.

    >>> figure_names(None)[:3]
    ['micro_loss', 'micro_mse', 'macro_loss']
    """
    return [f"{over}_{name}" for over in _FIGURES for name in metric_names(classes)]


def summarise(clients: Mapping[str, npt.NDArray[Any]], weights: npt.ArrayLike) -> dict[str, float]:
    """Figures over clients of every known metric among the columns of `clients`.

    `micro_` is weighted by `weights` (sizes), `macro_` the plain mean, `worst10_` the mean over the worst
    tenth of the clients (at least one: lowest accuracy and macro-F1, highest loss and mse), `std_` the
    standard deviation (ddof 0). Clients whose `samples` column says 0 had nothing to be measured on and are
    left out; any other NaN shows in the figures. Sums are exactly rounded: no order changes a bit.

    >>> summarise({"accuracy": np.array([0.5, 1.0])}, [1, 3])
    {'micro_accuracy': 0.875, 'macro_accuracy': 0.75, 'worst10_accuracy': 0.5, 'std_accuracy': 0.25}
    """
    sizes = np.asarray(weights, dtype=np.float64)
    kept = np.asarray(clients["samples"]) > 0 if "samples" in clients else np.ones(len(sizes), dtype=bool)
    sizes = sizes[kept]
    total = math.fsum(sizes)
    figures: dict[str, float] = {}
    for name, low_is_worse in _LOW_IS_WORSE.items():
        if name not in clients:
            continue
        column = np.asarray(clients[name], dtype=np.float64)
        if column.shape != kept.shape:
            raise ValueError(f"column '{name}' has shape {column.shape}, the weights {kept.shape}")
        values = np.asarray(column[kept])
        count = len(values)
        # NaN sorts last, hence among the worst of a loss; with samples, an accuracy is never NaN.
        ordered = np.sort(values) if low_is_worse else np.sort(values)[::-1]
        mean = _mean(values)
        with np.errstate(all="ignore"):  # a diverged client's loss may be infinite: the figure says so
            figures[f"micro_{name}"] = _sum(values * sizes) / total if total > 0 else math.nan
            figures[f"macro_{name}"] = mean
            figures[f"worst10_{name}"] = _mean(ordered[: math.ceil(count / 10)])
            figures[f"std_{name}"] = math.sqrt(_mean((values - mean) ** 2))
    return figures


def clustering_metrics(
    assignment: npt.NDArray[Any],
    previous: npt.NDArray[Any] | None,
    groups: npt.NDArray[Any] | None,
    clusters: int,
) -> dict[str, Any]:
    """Sizes, moves, and agreement with the planted groups (ARI, NMI) of one assignment of clients.

    -1 in any of the arrays means unknown, and counts nowhere. What cannot be said (no planted groups, no
    earlier assignment) is None.

    >>> groups = np.array([0, 0, 1, 1])
    >>> clustering_metrics(np.array([1, 1, 0, -1]), np.array([1, 0, 0, 0]), groups, clusters=3)
    {'cluster_sizes': [1, 2, 0], 'empty_clusters': 1, 'changed': 1, 'ari': 1.0, 'nmi': 1.0}
    """
    assignment = np.asarray(assignment)
    known = assignment >= 0
    if known.any() and int(assignment.max()) >= clusters:
        raise ValueError(
            f"cluster {int(assignment.max())} is assigned, but there are only {clusters} clusters"
        )
    sizes = np.bincount(assignment[known], minlength=clusters)
    figures: dict[str, Any] = {
        "cluster_sizes": sizes.tolist(),
        "empty_clusters": int((sizes == 0).sum()),
        "changed": None,
        "ari": None,
        "nmi": None,
    }
    if previous is not None:
        both = known & (np.asarray(previous) >= 0)
        figures["changed"] = int((assignment != previous)[both].sum())
    if groups is not None:
        both = known & (np.asarray(groups) >= 0)
        if both.any():
            figures |= _agreement(np.asarray(groups)[both], assignment[both])
    return figures


def _agreement(groups: npt.NDArray[Any], assignment: npt.NDArray[Any]) -> dict[str, float]:
    # Imported here because client actors import this module too and never need scikit-learn.
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    with warnings.catch_warnings():
        # scikit-learn finds many groups of few clients suspicious; here they are ordinary.
        warnings.simplefilter("ignore", UserWarning)
        return {
            "ari": float(adjusted_rand_score(groups, assignment)),
            "nmi": float(normalized_mutual_info_score(groups, assignment)),
        }


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
