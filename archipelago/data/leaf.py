"""FEMNIST as LEAF's scripts write it: JSON files of users (writers) with their images as numbers in [0, 1]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.randomness import generator
from archipelago.core.registry import NoOptions
from archipelago.core.settings import DataSettings
from archipelago.data.apportion import Integers
from archipelago.data.datasets import Dataset, dataset, hold_out
from archipelago.data.files import Damaged, md5_of, missing, root_of
from archipelago.data.mapped import Recipe, stored

_SIDE = 28
_HOW = (
    "Make it with LEAF (https://github.com/TalwalkarLab/leaf): run `./preprocess.sh -s niid --sf 1.0 -k 0 -t sample` "
    "in its data/femnist, and copy the folders data/train and data/test there."
)


def _places(settings: DataSettings) -> list[Path]:
    """Where LEAF's `train` and `test` folders may be: copied, or in LEAF's own tree."""
    root = root_of(settings)
    return [root / "femnist", root / "femnist" / "data", root / "leaf" / "data" / "femnist" / "data"]


def _files(settings: DataSettings) -> list[Path]:
    """All JSON files: of `train` and `test`, or of `all_data` where LEAF did not split."""
    for place in _places(settings):
        train, test, every = (sorted((place / part).glob("*.json")) for part in ("train", "test", "all_data"))
        if train and test:
            return [*train, *test]
        if every:
            return every
    return []


@dataset(
    "femnist",
    "FEMNIST (LEAF's JSON): 805,263 grey images 28x28 of digits and letters by 3,550 writers, 62 classes",
    present=lambda settings: next((str(path.parents[1]) for path in _files(settings)), None),
    files=_files,
    seeded=False,
    owners=True,
    reads=("mapped", "cache", "test_fraction"),
)
def femnist(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """Owners are the writers. LEAF's split is kept where it splits every writer's images (`-t sample`).

    Where it puts whole writers aside (`-t user`) or does not split, `data.test_fraction` of each writer's
    images is held out, as FeSEM does (80/20 per device). The JSON is read once (`mapped.py`).
    """
    files = _files(settings)
    if not files:
        raise missing("femnist", _places(settings), _HOW)

    def recipe() -> Recipe:
        x, y, owners, tested = _read_all(files)
        if not set(owners[tested]) <= set(owners[~tested]) or not tested.any():
            train, test = hold_out(owners, settings.test_fraction, generator(0, "split of femnist"))
        else:
            train, test = np.flatnonzero(~tested), np.flatnonzero(tested)
        order = np.concatenate([train, test])
        return Recipe(x.shape, lambda: [x[order]], y[order], len(train), owners[order])

    made = stored(settings, "femnist", files, [settings.test_fraction], recipe)
    return Dataset(name="femnist", classes=62, mean=(0.1307,), std=(0.3081,), **made.parts())


def _read_all(files: list[Path]) -> tuple[NDArray[np.uint8], Integers, Integers, NDArray[np.bool_]]:
    """Images, labels, the writer of each, and whether it came from a file of the `test` folder."""
    xs, ys, owners, tested = [], [], [], []
    writers: dict[str, int] = {}
    for path in files:
        for user, x, y in _read(path):
            xs.append(x)
            ys.append(y)
            owners.append(np.full(len(y), writers.setdefault(user, len(writers)), dtype=np.int64))
            tested.append(np.full(len(y), path.parent.name == "test"))
    if not xs:
        raise Damaged("femnist", files[0], "no file holds an image")
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(owners), np.concatenate(tested)


def _read(path: Path) -> list[tuple[str, NDArray[np.uint8], Integers]]:
    """(writer, images, labels) of one file. LEAF wrote grey levels / 255: as uint8 nothing is lost."""
    try:
        with path.open("rb") as file:
            content: dict[str, Any] = json.load(file)
        found = []
        for user in content["users"]:
            held = content["user_data"][user]
            if not held["y"]:
                continue
            x = np.asarray(held["x"], dtype=np.float32).reshape(-1, 1, _SIDE, _SIDE)
            y = np.asarray(held["y"], dtype=np.int64)
            if len(x) != len(y) or x.min() < 0 or x.max() > 1:
                raise ValueError(f"the images of {user} do not fit their labels, or do not lie in [0, 1]")
            found.append((str(user), np.rint(x * 255).astype(np.uint8), y))
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("femnist", path, f"{error}, {path.stat().st_size} bytes, MD5 {md5_of(path)}") from error
