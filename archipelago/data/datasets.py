"""Data sets: what they hold, where they are found, and the registry that new ones plug into.

A data set of your own is one file, here `my_data.py`:

    from dataclasses import dataclass

    import numpy as np

    from archipelago.core.randomness import generator
    from archipelago.core.settings import DataSettings, setting
    from archipelago.data import Dataset, dataset

    @dataclass
    class BlobOptions:
        spread: float = setting(1.0, "blobs: standard deviation around the centres", above=0)

    @dataset("blobs", "three clouds of points, one for each class", label="Blobs")
    def blobs(settings: DataSettings, options: BlobOptions, seed: int) -> Dataset:
        rng = generator(seed, "blobs")
        y = np.arange(1000) % 3
        x = rng.normal(y[:, None], options.spread, size=(1000, 2)).astype(np.float32)
        return Dataset("blobs", x[:800], y[:800], x[800:], y[800:], classes=3, mean=(0.0,), std=(1.0,))

`data=my_data.blobs data.spread=0.5` runs it, in this process, on Ray, in a sweep and after `resume`; so do
`plugins=[my_data] data=blobs`. `settings` has what concerns all data sets (`data.root`, ...), `options` what this one
declares, as the type of that parameter (leave the type out where there are none). Without the decorator the import
path works too. The decorator adds a name, a label and what the platform should know: see `dataset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.plugins import is_ours
from archipelago.core.registry import Entry, NoOptions, Registry, read_options
from archipelago.core.settings import DataSettings
from archipelago.data.apportion import Integers, apportion
from archipelago.data.files import Damaged
from archipelago.data.options import options_of

Array = NDArray[Any]
Loader = Callable[[DataSettings, Any, int], "Dataset"]
_SIGNATURE = ("settings", "options", "seed")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels with their official split.

    `x`: (N, C, H, W) images or (N, features) vectors, uint8 or float32. `y`: (N,), int64 labels
    0..classes-1, or float32 targets where `classes` is None (regression). `mean` and `std` hold one number
    per channel, or one for all, and normalise x / 255 where x is uint8, x itself otherwise (`normalised`).
    `sources_*`: which ground-truth distribution each sample was drawn from, where that is known. `owners_*`:
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
    stored: Array | None = (
        None  # both parts in one array that is shared (memory-mapped, say), training samples first
    )

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            self._check(part, x, y)
        if self.x_train.shape[1:] != self.x_test.shape[1:] or self.x_train.dtype != self.x_test.dtype:
            raise UserError(
                f"Data set '{self.name}': training and test samples must have one shape and type, but are "
                f"{kind(self.x_train)} and {kind(self.x_test)}.",
                code="unequal-shapes", name=self.name,
            )  # fmt: skip
        for what in ("sources", "owners"):
            if (getattr(self, f"{what}_train") is None) != (getattr(self, f"{what}_test") is None):
                raise UserError(
                    f"Data set '{self.name}': give the {what} of both parts, or of none.",
                    code="incomplete", lacks=what,
                )  # fmt: skip
        channels = self.x_train.shape[1]
        if not all(len(numbers) in (1, channels) for numbers in (self.mean, self.std)):
            raise UserError(
                f"Data set '{self.name}': mean and std need one number, or one per channel ({channels}), "
                f"but have {len(self.mean)} and {len(self.std)}.",
                code="unequal-lengths", name=self.name, channels=channels,
            )  # fmt: skip

    def joined(self) -> tuple[Array, Array]:
        """All samples and labels, first those to train on; shared samples are not copied."""
        x = self.stored if self.stored is not None else np.concatenate([self.x_train, self.x_test])
        return x, np.concatenate([self.y_train, self.y_test])

    def _check(self, part: str, x: Array, y: Array) -> None:
        where = f"Data set '{self.name}', {part} part: "
        if x.ndim not in (2, 4) or x.dtype not in (np.uint8, np.float32):
            raise UserError(
                f"{where}expected images (N, channels, height, width) or vectors (N, features) of uint8 or "
                f"float32, but got {kind(x)}.",
                code="wrong-shape", given=kind(x),
            )  # fmt: skip
        if y.shape != (len(x),):
            raise UserError(
                f"{where}expected one label for each of {len(x)} samples, but got {kind(y)}.",
                code="unequal-lengths",
            )
        if x.size == 0:
            raise UserError(f"{where}it holds no samples.", code="no-samples")
        wanted = np.dtype(np.float32 if self.classes is None else np.int64)
        if y.dtype != wanted:
            raise UserError(
                f"{where}expected labels of type {wanted}, but got {y.dtype}.",
                code="wrong-dtype", dtype=y.dtype,
            )  # fmt: skip
        if self.classes is not None and not (y.min() >= 0 and y.max() < self.classes):
            raise UserError(
                f"{where}labels must lie in 0..{self.classes - 1}, but lie in {y.min()}..{y.max()}.",
                code="wrong-labels", low=y.min(), high=y.max(),
            )  # fmt: skip
        for what in ("source", "owner"):
            given = getattr(self, f"{what}s_{part}")
            if given is not None and given.shape != y.shape:
                raise UserError(
                    f"{where}expected one {what} for each sample, but got {kind(given)}.",
                    code="unequal-lengths",
                )


@dataclass(frozen=True)
class DataSource:
    """A registered data set: `load` it, ask where it is `present` (None: not here), `fetch` it.

    `options` is the dataclass that `load` is given besides the settings of all data sets. The rest: see `dataset`;
    `content` is a hash of what would be loaded, for sets that can change while a process lives.
    """

    load: Loader
    present: Callable[[DataSettings], str | None]
    files: Callable[[DataSettings], list[Path]] | None = None
    fetch: Callable[[DataSettings], Path] | None = None
    seeded: bool = True
    sources: bool = False
    owners: bool = False
    content: Callable[[], str] | None = None
    options: type = NoOptions
    reads: tuple[str, ...] | None = None

    def may_read(self, setting: str) -> bool:
        """Whether `load` reads a setting of `data` that not every set reads; of a third party's set nobody knows."""
        if setting == "download" and self.fetch is not None:
            return True
        return not is_ours(self.load.__module__) if self.reads is None else setting in self.reads

    @property
    def origin(self) -> Loader:
        """The function that was registered, by which its import path is recognised."""
        return self.load

    def __call__(self, settings: DataSettings, seed: int) -> Dataset:
        try:
            made = self.load(settings, read_options(self.options, settings), seed)
        except Damaged as error:
            raise error.advised(settings, fetched=self.fetch is not None) from error
        if not isinstance(made, Dataset):
            raise UserError(
                f"Expected data set '{settings.name}' to return an archipelago.data.Dataset, got "
                f"{type(made).__name__}: return one.",
                code="wrong-result", name=settings.name,
            )  # fmt: skip
        return made


class DataSets(Registry[DataSource]):
    """All data sets; arrays that another process gave a name are found when they are asked for."""

    def entry(self, name: str) -> Entry[DataSource]:
        if name not in self:
            from archipelago.data.arrays import find_kept

            find_kept(name)
        return super().entry(name)

    def adopt(self, path: str, about: str, found: Any) -> None:
        if isinstance(found, type):
            taken = [name for name, entry in self.items() if hasattr(entry.options, "target")]
            raise UserError(
                f"Expected data set '{path}' to be a function ({', '.join(_SIGNATURE)}), got a class: write "
                f"data={' or '.join(taken)} data.target={path} for a LightningDataModule.",
                code="wrong-kind", kind="data set", name=path,
            )  # fmt: skip
        dataset(path, about)(found)


DATASETS = DataSets("data set", section="data")


def dataset(
    name: str,
    about: str,
    *,
    label: str = "",
    present: Callable[[DataSettings], str | None] | None = None,
    files: Callable[[DataSettings], list[Path]] | None = None,
    fetch: Callable[[DataSettings], Path] | None = None,
    seeded: bool = True,
    sources: bool = False,
    owners: bool = False,
    reads: tuple[str, ...] | None = None,
) -> Callable[[Loader], Loader]:
    """Decorator: register a loader `(settings, options, seed)`, with one line about it.

    `present` says where it is (None: not here), `files` what it is read from there, `fetch` downloads it to
    `data.root`; a set without `fetch` says in an error how to get it. `seeded`: every seed may give other samples; a
    set that says no is loaded once for all seeds of a sweep. `sources`, `owners`: its samples come from known
    ground-truth sources, or belong to somebody. `label` is what tables call it. `reads`: which settings of all data
    sets it reads, of those that not every set does ("mapped", "cache", "test_fraction"); others are refused beside it.
    """

    def add(load: Loader) -> Loader:
        options = options_of(f"data set '{name}'", load, _SIGNATURE)
        where = present or (lambda settings: f"made by {load.__module__}")
        source = DataSource(load, where, files, fetch, seeded, sources, owners, options=options, reads=reads)
        DATASETS.register(name, about, label=label, options=options)(source)
        return load

    return add


def sets_with(capability: str) -> list[str]:
    """The names of the data sets that declare `sources` or `owners`."""
    return [name for name, entry in DATASETS.items() if getattr(entry.value, capability)]


def load_dataset(settings: DataSettings, seed: int) -> Dataset:
    """The data set that the settings name, fetched first where that is asked for and needed."""
    source = DATASETS.find(settings.name)
    if settings.download and source.fetch is not None and source.present(settings) is None:
        source.fetch(settings)
    data = source(settings, seed)
    given: dict[str, Any] = {
        key: tuple(getattr(settings, key)) for key in ("mean", "std") if getattr(settings, key)
    }
    return replace(data, **given) if given else data


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


def kind(array: Array) -> str:
    """Type and shape, as a sentence names them."""
    return f"{array.dtype} of shape {tuple(array.shape)}"


def some(names: list[str], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
