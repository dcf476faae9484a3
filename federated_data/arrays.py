"""A user's own arrays as a data set: what they may look like, and how they become samples and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from federated_data.datasets import DATASETS, Array, Dataset, DataSource, hold_out, kind
from foundation.errors import UserError
from foundation.randomness import generator
from foundation.settings import DataSettings


def use_arrays(
    name: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    owners: tuple[Any, Any] | Any = None,
) -> None:
    """Make a pair of arrays (x, y) available as `data=NAME` in this process.

    Without `test`, `data.test_fraction` of each class (of each owner, where there are owners) is held out.
    `owners` says who each sample belongs to: one array, or one for each part. What x and y may be: see
    `from_arrays`. Giving a name again replaces its arrays.

    >>> use_arrays("mine", (np.zeros((8, 5, 5), np.uint8), np.arange(8) % 2))
    >>> DATASETS.find("mine")(DataSettings(test_fraction=0.25), 0).x_test.shape
    (2, 1, 5, 5)
    """
    if name in DATASETS and "arrays given" not in DATASETS[name].about:
        raise UserError(
            f"Expected a name of your own for the arrays, got '{name}': it is a data set already."
        )

    def load(settings: DataSettings, seed: int) -> Dataset:
        parts, whose = _split(train, test, owners, settings)
        return from_arrays(name, parts, where=f"Data set '{name}'", owners=whose)

    DATASETS.remove(name)
    DATASETS.register(name, "arrays given by use_arrays")(
        DataSource(load, lambda settings: "in this process", seeded=False)
    )


def _split(
    train: tuple[Any, Any], test: tuple[Any, Any] | None, owners: Any, settings: DataSettings
) -> tuple[dict[str, list[Array]], tuple[Array, Array] | None]:
    """The parts that `from_arrays` takes, with a test part held out where none is given."""
    x, y = (np.asarray(each) for each in train)
    if test is not None:
        x_test, y_test = (np.asarray(each) for each in test)
        return {"x_train": [x], "y_train": [y], "x_test": [x_test], "y_test": [y_test]}, owners
    if y.shape[:1] != x.shape[:1]:
        raise UserError(f"Expected one label for each of {len(x)} samples, but got {kind(y)}.")
    strata = np.asarray(owners) if owners is not None else y
    if strata.ndim != 1 or strata.dtype.kind == "f":
        strata = np.zeros(len(x), dtype=np.int64)  # real targets: no classes to keep in proportion
    kept, held = hold_out(strata, settings.test_fraction, generator(0, "split of arrays"))
    parts = {"x_train": [x[kept]], "y_train": [y[kept]], "x_test": [x[held]], "y_test": [y[held]]}
    return parts, None if owners is None else (strata[kept], strata[held])


def from_arrays(
    name: str,
    parts: Mapping[str, Sequence[Array]],
    *,
    where: str,
    owners: tuple[Array, Array] | None = None,
    channels_first: bool = False,
) -> Dataset:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), or vectors (N, features), each part in pieces.

    Channels are where there are 1, 3 or 4 of them, last if in doubt; `channels_first` leaves no doubt.
    uint8 is taken for pixels (mean and std 0.5, as in the papers), anything else for numbers that are
    ready to use. Whole-number labels make classes, other labels a regression.
    """
    x_train, x_test = (
        _join(where, [_samples(where, x, channels_first) for x in parts[k]]) for k in ("x_train", "x_test")
    )
    y_train, y_test = (_join(where, [_labels(where, y) for y in parts[k]]) for k in ("y_train", "y_test"))
    classes = None
    if y_train.dtype == np.int64 and y_test.dtype == np.int64:
        low, high = (int(pick([pick(y, initial=0) for y in (y_train, y_test)])) for pick in (np.min, np.max))
        if low < 0 or high >= max(len(y_train), 2):
            raise UserError(
                f"{where}: labels must be class numbers 0, 1, 2, ... below the number of samples, but lie in "
                f"{low}..{high}; number the classes from 0."
            )
        classes = high + 1
    else:
        y_train, y_test = y_train.astype(np.float32), y_test.astype(np.float32)
    centre, scale = (0.5, 0.5) if x_train.dtype == np.uint8 else (0.0, 1.0)
    channels = x_train.shape[1] if x_train.ndim == 4 else 1
    return Dataset(
        *(name, x_train, y_train, x_test, y_test, classes, (centre,) * channels, (scale,) * channels),
        **_owners(where, owners),
    )


def _owners(where: str, owners: tuple[Array, Array] | None) -> dict[str, Any]:
    """Owners of any kind (names, numbers) as numbers from 0."""
    if owners is None:
        return {}
    train, test = (np.asarray(each) for each in owners)
    if train.ndim != 1 or test.ndim != 1:
        raise UserError(
            f"{where}: expected one owner for each sample, but got {kind(train)} and {kind(test)}."
        )
    numbers = np.unique(np.concatenate([train, test]), return_inverse=True)[1].astype(np.int64)
    return {"owners_train": numbers[: len(train)], "owners_test": numbers[len(train) :]}


def _samples(where: str, x: Array, channels_first: bool) -> Array:
    if x.dtype.kind not in "uifb":
        raise UserError(f"{where}: samples must be numbers, but are of type {x.dtype}.")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is refused below
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(f"{where}: samples must be finite float32 numbers, but some are NaN or infinite.")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4:
        colours = (1, 3, 4)
        if channels_first or (x.shape[1] in colours and x.shape[3] not in colours):
            return x
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 2:
        return x
    raise UserError(
        f"{where}: expected images (N, H, W), (N, H, W, C) or (N, C, H, W), or vectors (N, features), but got "
        f"{kind(x)}."
    )


def _labels(where: str, y: Array) -> Array:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "uifb":
        raise UserError(f"{where}: expected one number as the label of each sample, but got {kind(y)}.")
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    with np.errstate(over="ignore"):
        y = y.astype(np.float32)
    if not np.isfinite(y).all():
        raise UserError(f"{where}: labels must be finite numbers, but some are NaN or infinite.")
    return y


def _join(where: str, parts: list[Array]) -> Array:
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise UserError(
            f"{where}: validation and test part must have one shape and type, but are "
            f"{' and '.join(kind(part) for part in parts)}."
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
