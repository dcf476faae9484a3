"""Data sets: what they hold, where they are found, and the registry that new ones plug into.

A data set of your own is one decorated function that returns a `Dataset`:

    @dataset("mine", "what it is, in one line", present=lambda settings: "somewhere")
    def mine(settings: DataSettings, seed: int) -> Dataset:
        return Dataset("mine", x_train, y_train, x_test, y_test, classes=10, mean=(0.5,), std=(0.5,))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federated_data.apportion import Integers, apportion
from foundation.errors import UserError
from foundation.randomness import generator
from foundation.registry import Registry
from foundation.settings import DataSettings

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels with their official split.

    `x`: (N, C, H, W) images or (N, features) vectors, uint8 or float32. `y`: (N,), int64 labels
    0..classes-1, or float32 targets where `classes` is None (regression). `mean` and `std` hold one number
    per channel, or one for all, and normalise x / 255 where x is uint8, x itself otherwise (`normalised`).
    `sources_*`: which planted distribution each sample was drawn from, where that is known. `owners_*`:
    who each sample naturally belongs to (a writer, a person), numbered 0, 1, 2, ... over both parts.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sources_train: Integers | None = None
    sources_test: Integers | None = None
    owners_train: Integers | None = None
    owners_test: Integers | None = None

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            self._check(part, x, y)
        if self.x_train.shape[1:] != self.x_test.shape[1:] or self.x_train.dtype != self.x_test.dtype:
            raise UserError(
                f"Data set '{self.name}': training and test samples must have one shape and type, but are "
                f"{_kind(self.x_train)} and {_kind(self.x_test)}."
            )
        for what in ("sources", "owners"):
            if (getattr(self, f"{what}_train") is None) != (getattr(self, f"{what}_test") is None):
                raise UserError(f"Data set '{self.name}': give the {what} of both parts, or of none.")
        channels = self.x_train.shape[1]
        if not all(len(numbers) in (1, channels) for numbers in (self.mean, self.std)):
            raise UserError(
                f"Data set '{self.name}': mean and std need one number, or one per channel ({channels}), "
                f"but have {len(self.mean)} and {len(self.std)}."
            )

    def _check(self, part: str, x: Array, y: Array) -> None:
        where = f"Data set '{self.name}', {part} part: "
        if x.ndim not in (2, 4) or x.dtype not in (np.uint8, np.float32):
            raise UserError(
                f"{where}expected images (N, channels, height, width) or vectors (N, features) of uint8 or "
                f"float32, but got {_kind(x)}."
            )
        if y.shape != (len(x),):
            raise UserError(f"{where}expected one label for each of {len(x)} samples, but got {_kind(y)}.")
        if x.size == 0:
            raise UserError(f"{where}it holds no samples.")
        wanted = np.dtype(np.float32 if self.classes is None else np.int64)
        if y.dtype != wanted:
            raise UserError(f"{where}expected labels of type {wanted}, but got {y.dtype}.")
        if self.classes is not None and not (y.min() >= 0 and y.max() < self.classes):
            raise UserError(
                f"{where}labels must lie in 0..{self.classes - 1}, but lie in {y.min()}..{y.max()}."
            )
        for what in ("source", "owner"):
            given = getattr(self, f"{what}s_{part}")
            if given is not None and given.shape != y.shape:
                raise UserError(f"{where}expected one {what} for each sample, but got {_kind(given)}.")


@dataclass(frozen=True)
class DataSource:
    """A registered data set: `load` it, or ask where it is `present` (None: not here)."""

    load: Callable[[DataSettings, int], Dataset]
    present: Callable[[DataSettings], str | None]

    def __call__(self, settings: DataSettings, seed: int) -> Dataset:
        return self.load(settings, seed)


DATASETS: Registry[DataSource] = Registry("data set")


def dataset(
    name: str, about: str, *, present: Callable[[DataSettings], str | None]
) -> Callable[[Callable[[DataSettings, int], Dataset]], Callable[[DataSettings, int], Dataset]]:
    """Decorator: register a loader, with one line about it and a way to ask where its files are."""

    def add(load: Callable[[DataSettings, int], Dataset]) -> Callable[[DataSettings, int], Dataset]:
        DATASETS.register(name, about)(DataSource(load, present))
        return load

    return add


def load_dataset(settings: DataSettings, seed: int) -> Dataset:
    """The data set that the settings name."""
    return DATASETS.find(settings.name)(settings, seed)


def normalised(x: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Samples as a network sees them: float32, shifted and scaled per channel.

    >>> normalised(np.array([[0, 255]], dtype=np.uint8), (0.5,), (0.5,)).tolist()
    [[-1.0, 1.0]]
    """
    shape = (1, -1) + (1,) * (x.ndim - 2)
    values = x.astype(np.float32)
    if x.dtype == np.uint8:
        values /= np.float32(255)
    values -= np.asarray(mean, dtype=np.float32).reshape(shape)
    values /= np.asarray(std, dtype=np.float32).reshape(shape)
    return values


def hold_out(
    strata: NDArray[Any], fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions to train and to test on: `fraction` of each stratum, one sample at least, for testing."""
    _, strata, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    held = np.clip(apportion(round(fraction * len(strata)), sizes), 1, sizes - 1)
    shuffled = rng.permutation(len(strata))
    shuffled = shuffled[np.argsort(strata[shuffled], kind="stable")]
    rank = np.arange(len(strata)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    test = rank < np.repeat(held, sizes)
    return np.sort(shuffled[~test]), np.sort(shuffled[test])


@dataset(
    "digits",
    "scikit-learn's 1,797 real 8x8 grey images of handwritten digits; needs no files",
    present=lambda settings: "embedded (scikit-learn)",
)
def digits(settings: DataSettings, seed: int) -> Dataset:
    """The digits, as uint8. Their split depends on `data.test_fraction` alone, not on the seed."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    # Grey levels are 0..16; as uint8 they take a quarter of the room, and all 17 stay distinct.
    images = np.rint(x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = y.astype(np.int64)
    train, test = hold_out(labels, settings.test_fraction, generator(0, "split of digits"))
    return Dataset(
        "digits", images[train], labels[train], images[test], labels[test], 10, mean=(0.5,), std=(0.5,)
    )


def planted_weights(settings: DataSettings, seed: int) -> NDArray[np.float64]:
    """The linear models that `synthetic` plants: (sources, dimension), entries of N(0, weight_scale^2)."""
    rng = generator(seed, "synthetic weights")
    return rng.normal(scale=settings.weight_scale, size=(settings.sources, settings.dimension))


@dataset(
    "synthetic",
    "linear regression drawn from planted linear models (FedSoft's generator); needs no files",
    present=lambda settings: "embedded (generated)",
)
def synthetic(settings: DataSettings, seed: int) -> Dataset:
    """y = <theta_s, x> + noise, with theta_s ~ N(0, sigma_0^2 I) and x ~ N(0, I).

    Ruan, Joe-Wong: "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022,
    experiments on synthetic data. sigma_0 is a standard deviation, as printed there; its released code
    takes it for a variance. The sources share the samples evenly.
    """
    if settings.samples < 2 * settings.sources:
        raise UserError(
            f"data.samples={settings.samples} cannot give each of data.sources={settings.sources} planted "
            f"models a training and a test sample: ask for at least {2 * settings.sources} samples."
        )
    weights = planted_weights(settings, seed)
    rng = generator(seed, "synthetic samples")
    sources = np.arange(settings.samples, dtype=np.int64) * settings.sources // settings.samples
    x = rng.normal(size=(settings.samples, settings.dimension))
    y = np.einsum("nd,nd->n", x, weights[sources]) + settings.noise * rng.normal(size=settings.samples)
    train, test = hold_out(sources, settings.test_fraction, generator(seed, "split of synthetic"))
    inputs, targets = x.astype(np.float32), y.astype(np.float32)
    return Dataset(
        "synthetic",
        *(inputs[train], targets[train], inputs[test], targets[test]),
        classes=None,
        mean=(0.0,),
        std=(1.0,),
        sources_train=sources[train],
        sources_test=sources[test],
    )


_NPZ_WANTED = (
    "Expected one .npz file with arrays x_train, y_train, x_test, y_test (or train_images, train_labels, "
    "test_images, test_labels, as MedMNIST names them)"
)
_NPZ_INSTEAD = "Set data.root to such a file or its folder, or use data=digits, which needs no files."
_NPZ_NAMES = {
    "x_train": "train_images",
    "y_train": "train_labels",
    "x_test": "test_images",
    "y_test": "test_labels",
}


def _npz_file(settings: DataSettings) -> Path:
    """The one .npz file that `data.root` is or holds."""
    root = Path(settings.root).expanduser()
    if root.is_file():
        return root
    if not root.is_dir():
        raise UserError(f"{_NPZ_WANTED}, but data.root={settings.root} does not exist. {_NPZ_INSTEAD}")
    found = sorted(path for path in root.glob("*.npz") if path.is_file())
    if not found:
        there = sorted(path.name for path in root.iterdir())
        holds = f"holds only {_some(there)}" if there else "is an empty folder"
        raise UserError(f"{_NPZ_WANTED}, but data.root={settings.root} {holds}. {_NPZ_INSTEAD}")
    if len(found) > 1:
        raise UserError(
            f"data.root={settings.root} holds {len(found)} .npz files ({_some([p.name for p in found])}), "
            f"and data=npz reads one: set data.root to the file you mean, for example data.root={found[0]}."
        )
    return found[0]


def _npz_present(settings: DataSettings) -> str | None:
    try:
        return str(_npz_file(settings))
    except (UserError, OSError):
        return None


@dataset("npz", "your own .npz file of training and test images and labels (data.root)", present=_npz_present)
def npz(settings: DataSettings, seed: int) -> Dataset:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), or vectors (N, features), from one file.

    uint8 is taken for pixels (mean and std 0.5, as in the papers), anything else for numbers that are
    ready to use. Whole-number labels make classes, other labels a regression. MedMNIST's validation
    images, where there are any, join the test images, as in the papers. Pickled content is refused:
    reading a file never runs code.
    """
    path = _npz_file(settings)
    parts = _read_npz(path)
    x_train, x_test = (
        _npz_join(path, [_npz_samples(path, x) for x in parts[k]]) for k in ("x_train", "x_test")
    )
    y_train, y_test = (
        _npz_join(path, [_npz_labels(path, y) for y in parts[k]]) for k in ("y_train", "y_test")
    )
    classes = None
    if y_train.dtype == np.int64 and y_test.dtype == np.int64:
        low, high = (int(pick([pick(y, initial=0) for y in (y_train, y_test)])) for pick in (np.min, np.max))
        if low < 0 or high >= max(len(y_train), 2):
            raise UserError(
                f"{path}: labels must be class numbers 0, 1, 2, ... below the number of samples, but lie in "
                f"{low}..{high}; number the classes from 0."
            )
        classes = high + 1
    else:
        y_train, y_test = y_train.astype(np.float32), y_test.astype(np.float32)
    centre, scale = (0.5, 0.5) if x_train.dtype == np.uint8 else (0.0, 1.0)
    channels = x_train.shape[1] if x_train.ndim == 4 else 1
    return Dataset(
        path.stem, x_train, y_train, x_test, y_test, classes, (centre,) * channels, (scale,) * channels
    )


def _read_npz(path: Path) -> dict[str, list[Array]]:
    """The file's arrays under our names; the test arrays in one or two pieces."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with archive:
            there = set(archive.files)
            names = {ours: ours if ours in there else theirs for ours, theirs in _NPZ_NAMES.items()}
            if set(names.values()) <= there:
                parts = {ours: [archive[name]] for ours, name in names.items()}
                if {"val_images", "val_labels"} <= there:
                    parts["x_test"].insert(0, archive["val_images"])
                    parts["y_test"].insert(0, archive["val_labels"])
                return parts
    # Whatever a damaged archive makes zipfile, zlib or NumPy raise means the same to the user.
    except Exception as error:
        why = str(error).rstrip(".") or type(error).__name__
        raise UserError(
            f"{path} cannot be read as an .npz archive of plain arrays ({why}): it is damaged, or another "
            f"kind of file. {_NPZ_INSTEAD}"
        ) from error
    holds = f"holds only {_some(sorted(there))}" if there else "is an empty archive"
    raise UserError(f"{_NPZ_WANTED}, but {path} {holds}. {_NPZ_INSTEAD}")


def _npz_samples(path: Path, x: Array) -> Array:
    if x.dtype.kind not in "uifb":
        raise UserError(f"{path}: samples must be numbers, but are of type {x.dtype}.")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is refused below
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(f"{path}: samples must be finite float32 numbers, but some are NaN or infinite.")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4:
        colours = (1, 3, 4)
        if x.shape[1] in colours and x.shape[3] not in colours:
            return x
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 2:
        return x
    raise UserError(
        f"{path}: expected images (N, H, W), (N, H, W, C) or (N, C, H, W), or vectors (N, features), but got "
        f"{_kind(x)}."
    )


def _npz_labels(path: Path, y: Array) -> Array:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "uifb":
        raise UserError(f"{path}: expected one number as the label of each sample, but got {_kind(y)}.")
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    with np.errstate(over="ignore"):
        y = y.astype(np.float32)
    if not np.isfinite(y).all():
        raise UserError(f"{path}: labels must be finite numbers, but some are NaN or infinite.")
    return y


def _npz_join(path: Path, parts: list[Array]) -> Array:
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise UserError(
            f"{path}: validation and test part must have one shape and type, but are "
            f"{' and '.join(_kind(part) for part in parts)}."
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _kind(array: Array) -> str:
    return f"{array.dtype} of shape {tuple(array.shape)}"


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
