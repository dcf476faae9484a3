"""A user's own arrays as a data set: what they may look like, and how they become samples and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import DataSettings
from archipelago.data.datasets import DATASETS, Array, Dataset, DataSource, hold_out, kind
from archipelago.data.kept import content_of, keep, kept_at, kept_content, read_kept
from archipelago.data.options import TargetOptions

Pair = tuple[Any, Any]


def use_arrays(name: str, train: Pair, test: Pair | None = None, *, owners: Any = None) -> None:
    """Make a pair of arrays (x, y) available as `data=NAME`:

        use_arrays("mine", (x, y))

    Without `test`, `data.test_fraction` of each class (of each owner, where there are owners) is held out.
    `owners` says who each sample belongs to, by numbers or names: one array, or one for each part. What x and y may
    be: see `from_arrays`. A copy is kept in the cache (`kept.py`), where other processes find it by its name: the
    trials of a sweep, `resume`, the command line. Giving a name again replaces its arrays.

    >>> use_arrays("stripes", (np.eye(8, dtype=np.float32).repeat(4, axis=0), np.arange(32) % 4))
    >>> DATASETS["stripes"].name
    'stripes'
    """
    if name in DATASETS and "arrays given" not in DATASETS[name].about:
        raise UserError(
            f"Expected a name of your own for the arrays, got '{name}': it is a data set already.",
            code="name-taken", name=name,
        )  # fmt: skip
    arrays = _given(f"Data set '{name}'", train, test, owners)
    keep(name, arrays)
    DATASETS.remove(name)
    content = content_of(arrays)
    _register(name, lambda: arrays, "in this process", lambda: content)


def find_kept(name: str) -> None:
    """Register the arrays that another process has kept under this name, if there are any."""
    if name not in DATASETS and kept_at(name) is not None:
        _register(name, lambda: read_kept(name), str(kept_at(name)), lambda: kept_content(name))


def _register(
    name: str, arrays: Callable[[], dict[str, Array]], where: str, content: Callable[[], str]
) -> None:
    def load(settings: DataSettings, options: TargetOptions, seed: int) -> Dataset:
        where, given = f"Data set '{name}'", arrays()
        labels = [key for key in given if key.startswith("y_")]
        read = as_targets(where, [given[key] for key in labels], options.targets)
        parts, owners = _split({**given, **dict(zip(labels, read, strict=True))}, settings)
        return from_arrays(name, parts, where=where, owners=owners, targets=options.targets)

    source = DataSource(
        load,
        lambda settings: where,
        seeded=False,
        content=content,
        options=TargetOptions,
        reads=("test_fraction",),
    )
    DATASETS.register(name, "arrays given by use_arrays", options=TargetOptions)(source)


def _given(where: str, train: Pair, test: Pair | None, owners: Any) -> dict[str, Array]:
    """The arrays under their names: x and y of each part, and owners as numbers from 0."""
    parts = {"train": train} if test is None else {"train": train, "test": test}
    found: dict[str, Array] = {}
    for part, pair in parts.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise UserError(
                f"{where}: expected a pair (x, y) to {part} on, got {type(pair).__name__}.",
                code="wrong-type", setting=part, given=type(pair).__name__,
            )  # fmt: skip
        x, y = (np.asarray(each) for each in pair)
        if y.shape[:1] != x.shape[:1] or x.ndim == 0:
            raise UserError(
                f"{where}: expected one label for each of {len(np.atleast_1d(x))} samples, got {kind(y)}.",
                code="unequal-lengths",
            )
        for array in (x, y):
            if array.dtype.kind not in "uifb":
                raise UserError(
                    f"{where}: samples and labels must be numbers, but some are of type {array.dtype}.",
                    code="wrong-dtype", dtype=array.dtype,
                )  # fmt: skip
        found |= {f"x_{part}": x, f"y_{part}": y}
    if owners is None:
        return found
    sizes = [len(found[f"y_{part}"]) for part in parts]
    each = [np.asarray(one) for one in ([owners] if test is None else _pair_of(owners))]
    if [one.shape for one in each] != [(size,) for size in sizes]:
        wanted = " and one of ".join(str(size) for size in sizes)
        raise UserError(
            f"{where}: expected an owner for each sample, as {'an array' if test is None else 'a pair of arrays, one'} "
            f"of {wanted}, got {' and '.join(kind(one) for one in each)}.",
            code="wrong-owners",
        )
    try:
        numbers = np.unique(np.concatenate(each), return_inverse=True)[1].astype(np.int64)
    except TypeError as error:  # numbers and names side by side
        raise UserError(
            f"{where}: owners must be all numbers or all names ({error}).", code="wrong-owners"
        ) from error
    cuts = np.split(numbers, np.cumsum(sizes)[:-1])
    return found | {f"owners_{part}": cut for part, cut in zip(parts, cuts, strict=True)}


def _pair_of(owners: Any) -> list[Any]:
    """Two arrays, or whatever was given instead, to be refused."""
    return [*owners] if isinstance(owners, tuple | list) and len(owners) == 2 else [owners]


def _split(
    arrays: Mapping[str, Array], settings: DataSettings
) -> tuple[dict[str, list[Array]], tuple[Array, Array] | None]:
    """The parts that `from_arrays` takes, with a test part held out where none was given."""
    whose = arrays.get("owners_train")
    if "x_test" in arrays:
        owners = None if whose is None else (whose, arrays["owners_test"])
        return {key: [arrays[key]] for key in ("x_train", "y_train", "x_test", "y_test")}, owners
    x, y = arrays["x_train"], arrays["y_train"]
    strata = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if strata.ndim != 1 or strata.dtype.kind == "f":
        strata = np.zeros(len(x), dtype=np.int64)  # real targets: no classes to keep in proportion
    kept, held = hold_out(
        strata if whose is None else whose, settings.test_fraction, generator(0, "split of arrays")
    )
    parts = {"x_train": [x[kept]], "y_train": [y[kept]], "x_test": [x[held]], "y_test": [y[held]]}
    return parts, None if whose is None else (whose[kept], whose[held])


def from_arrays(
    name: str,
    parts: Mapping[str, Sequence[Array]],
    *,
    where: str,
    owners: tuple[Array, Array] | None = None,
    channels_first: bool = False,
    targets: str = "auto",
) -> Dataset:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), or vectors (N, features), each part in pieces.

    Channels are where there are 1, 3 or 4 of them, last if in doubt; `channels_first` leaves no doubt.
    uint8 is taken for pixels (mean and std 0.5, as in the papers), anything else for numbers that are
    ready to use. Whole-number labels make classes, other labels a regression; `targets` (`data.targets`) overrules it.
    """
    x_train, x_test = (
        _join(where, [_samples(where, x, channels_first) for x in parts[k]]) for k in ("x_train", "x_test")
    )
    train, test = parts["y_train"], parts["y_test"]
    labels = [_labels(where, y) for y in as_targets(where, [*train, *test], targets)]
    y_train, y_test = (_join(where, each) for each in (labels[: len(train)], labels[len(train) :]))
    classes = None
    if y_train.dtype == np.int64 and y_test.dtype == np.int64:
        low, high = (int(pick([pick(y, initial=0) for y in (y_train, y_test)])) for pick in (np.min, np.max))
        if low < 0 or high >= max(len(y_train), 2):
            raise UserError(
                f"{where}: labels must be class numbers 0, 1, 2, ... below the number of samples, but lie in "
                f"{low}..{high}; number the classes from 0.",
                code="wrong-labels", low=low, high=high,
            )  # fmt: skip
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
            f"{where}: expected one owner for each sample, but got {kind(train)} and {kind(test)}.",
            code="wrong-owners",
        )
    numbers = np.unique(np.concatenate([train, test]), return_inverse=True)[1].astype(np.int64)
    return {"owners_train": numbers[: len(train)], "owners_test": numbers[len(train) :]}


def _samples(where: str, x: Array, channels_first: bool) -> Array:
    if x.dtype.kind not in "uifb":
        raise UserError(
            f"{where}: samples must be numbers, but are of type {x.dtype}.", code="wrong-dtype", dtype=x.dtype
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is refused below
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(
                f"{where}: samples must be finite float32 numbers, but some are NaN or infinite.",
                code="not-finite", what="samples",
            )  # fmt: skip
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
        f"{kind(x)}.",
        code="wrong-shape", given=kind(x),
    )  # fmt: skip


def as_targets(where: str, parts: Sequence[Array], targets: str) -> list[Array]:
    """Labels of the type that `data.targets` says; floats that look like classes must be called one or the other."""
    if any(y.dtype.kind not in "uifb" for y in parts):
        return list(parts)  # refused by `_labels`
    if targets == "numbers":
        return [y if y.dtype.kind == "f" else y.astype(np.float64) for y in parts]
    values = np.concatenate([np.ravel(y) for y in parts])
    whole = bool(np.isfinite(values).all() and (values == np.floor(values)).all())
    if targets == "classes" and not whole:
        odd = values[~(np.isfinite(values) & (values == np.floor(values)))][0]
        raise UserError(
            f"{where}: expected whole numbers as class labels (data.targets=classes), got {odd:g}: number the classes "
            "from 0, or predict numbers with data.targets=numbers.",
            code="wrong-labels", given=odd,
        )  # fmt: skip
    if targets == "classes":
        return [y.astype(np.int64) for y in parts]
    floats = any(y.dtype.kind == "f" for y in parts)
    if floats and whole and len(values) and values.min() >= 0 and values.max() < len(values):
        raise UserError(
            f"{where}: expected labels that say what they are, got {values.dtype} labels that are all whole numbers in "
            f"{values.min():g}..{values.max():g}: set data.targets=classes, or data.targets=numbers to predict them as "
            "numbers.",
            code="ambiguous-labels", dtype=values.dtype,
        )  # fmt: skip
    return list(parts)


def _labels(where: str, y: Array) -> Array:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "uifb":
        raise UserError(
            f"{where}: expected one number as the label of each sample, but got {kind(y)}.",
            code="wrong-labels", given=kind(y),
        )  # fmt: skip
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    with np.errstate(over="ignore"):
        y = y.astype(np.float32)
    if not np.isfinite(y).all():
        raise UserError(
            f"{where}: labels must be finite numbers, but some are NaN or infinite.",
            code="not-finite", what="labels",
        )  # fmt: skip
    return y


def _join(where: str, parts: list[Array]) -> Array:
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise UserError(
            f"{where}: validation and test part must have one shape and type, but are "
            f"{' and '.join(kind(part) for part in parts)}.",
            code="unequal-shapes",
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
