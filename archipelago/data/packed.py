"""Image sets packed into few files: contact sheets in lossless WebP, and JPEGs inside one .npz file.

`data=cifar10` reads sheets of all of CIFAR-10; the others are subsets under names of their own, so that
nobody takes one for the whole.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import NoOptions
from archipelago.core.settings import DataSettings
from archipelago.data.datasets import Array, Dataset, dataset, hold_out
from archipelago.data.files import Damaged, md5_of, missing, root_of
from archipelago.data.mapped import Recipe, in_chunks, stored

CIFAR10_SHEETS = (
    *(f"cifar10_lossless_train{i}.webp" for i in range(1, 6)),
    "cifar10_lossless_test.webp",
    "cifar10_labels.npz",
)
PER_SHEET = 10_000  # images of a CIFAR-10 sheet, 100 in a row
# SHA-256 of CIFAR-10's 60,000 images (channels first) and labels (as bytes), training part first, whatever the
# container.
CIFAR10_CONTENT = "14a2bd144501de0a338b4c67a69c1d3c335f24e5f4e22c78ea4775ad4d3c9e6a"

_PATH_PARTS = (("train", 120), ("val", 40), ("test", 85))  # images in a row of each sheet
_PATH_FILES = (*(f"pathmnist_sub_{part}.webp" for part, _ in _PATH_PARTS), "pathmnist_sub_labels.npz")
_BRING = "Bring these files there, or set data.root to the folder that has them."


def read_sheet(name: str, path: Path, count: int, side: int, columns: int) -> NDArray[np.uint8]:
    """The first `count` images of a contact sheet of square images, row by row: (count, 3, side, side)."""
    try:
        with Image.open(path) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise Damaged(name, path, f"{' '.join(str(error).split())}, MD5 {md5_of(path)}") from error
    rows = pixels.shape[0] // side
    if pixels.shape != (rows * side, columns * side, 3) or rows * columns < count:
        size = f"{pixels.shape[1]}x{pixels.shape[0]} pixels"
        raise Damaged(name, path, f"{size} do not hold {count} images of {side}x{side} in rows of {columns}")
    tiles = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, side, side)[:count]


def read_npz(name: str, path: Path) -> dict[str, Array]:
    """The arrays of an .npz file; nothing pickled is read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    # Whatever a damaged archive makes zipfile, zlib or NumPy raise means the same to the user.
    except Exception as error:
        raise Damaged(name, path, f"{' '.join(str(error).split())}, MD5 {md5_of(path)}") from error


def cifar10_from_sheets(name: str, settings: DataSettings, files: list[Path]) -> Dataset:
    """CIFAR-10 from lossless sheets; decoding takes seconds, so it is done once (`mapped.py`)."""

    def recipe() -> Recipe:
        labels = read_npz(name, files[-1])
        train, test = (labels[f"{part}_labels"].reshape(-1).astype(np.int64) for part in ("train", "test"))
        y = np.concatenate([train, test])
        return Recipe((len(y), 3, 32, 32), lambda: _checked_sheets(name, files, y), y, len(train))

    made = stored(settings, name, files, [CIFAR10_CONTENT], recipe)
    return Dataset(name=name, classes=10, mean=(0.5,), std=(0.5,), **made.parts())


def _checked_sheets(name: str, files: list[Path], y: NDArray[np.int64]) -> Iterator[Array]:
    digest = hashlib.sha256()
    for path in files[:-1]:
        images = read_sheet(name, path, PER_SHEET, 32, 100)
        digest.update(np.ascontiguousarray(images).data)
        yield images
    digest.update(y.astype(np.uint8).tobytes())
    if digest.hexdigest() != CIFAR10_CONTENT:
        why = f"images and labels have SHA-256 {digest.hexdigest()}, expected {CIFAR10_CONTENT}"
        raise Damaged(name, files[0].with_name("cifar10_lossless_*.webp"), why)


def _files(names: tuple[str, ...], settings: DataSettings) -> list[Path]:
    found = [root_of(settings) / name for name in names]
    return found if all(path.is_file() for path in found) else []


def _required(name: str, names: tuple[str, ...], settings: DataSettings) -> list[Path]:
    found = _files(names, settings)
    if not found:
        raise missing(name, [root_of(settings) / each for each in names], _BRING)
    return found


def _folder(names: tuple[str, ...]) -> Any:
    """How `present` is asked of a set of these files."""
    return lambda settings: next((str(path.parent) for path in _files(names, settings)), None)


@dataset(
    "pathmnist_subset",
    "PathMNIST, 23,180 of its 107,180 images as lossless WebP sheets, 28x28, 9 classes",
    present=_folder(_PATH_FILES),
    files=lambda settings: _files(_PATH_FILES, settings),
    seeded=False,
)
def pathmnist_subset(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """Train = the subset's training part, test = its validation and test parts (as in the papers)."""
    files = _required("pathmnist_subset", _PATH_FILES, settings)
    labels = read_npz("pathmnist_subset", files[-1])
    ys = [labels[f"{part}_labels"].reshape(-1).astype(np.int64) for part, _ in _PATH_PARTS]
    xs = [
        read_sheet("pathmnist_subset", path, len(y), 28, columns)
        for path, y, (_, columns) in zip(files, ys, _PATH_PARTS, strict=False)
    ]
    x_test, y_test = np.concatenate(xs[1:]), np.concatenate(ys[1:])
    return Dataset(
        "pathmnist_subset",
        *(np.ascontiguousarray(xs[0]), ys[0], x_test, y_test),
        classes=9,
        mean=(0.5,),
        std=(0.5,),
    )


_TINY = ("tinyimagenet10_jpeg.npz",)


@dataset(
    "tiny_imagenet10",
    "Tiny ImageNet, 10 of its 200 classes, 5,500 colour images 64x64, as JPEGs in one .npz file",
    present=_folder(_TINY),
    files=lambda settings: _files(_TINY, settings),
    seeded=False,
    reads=("mapped", "cache"),
)
def tiny_imagenet10(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """Train = the training part, test = the validation part (the official test part has no labels)."""
    (path,) = _required("tiny_imagenet10", _TINY, settings)

    def recipe() -> Recipe:
        content = read_npz("tiny_imagenet10", path)
        order = np.argsort(content["is_val"], kind="stable")
        y = content["labels"].reshape(-1).astype(np.int64)[order]
        shape = (len(order), 3, 64, 64)
        cut = int((content["is_val"] == 0).sum())
        return Recipe(shape, lambda: in_chunks(_jpeg_reader(path, content), order), y, cut)

    made = stored(settings, "tiny_imagenet10", [path], [], recipe)
    mean, std = (0.4802, 0.4481, 0.3975), (0.2302, 0.2265, 0.2262)  # FeMAM's
    return Dataset(name="tiny_imagenet10", classes=10, mean=mean, std=std, **made.parts())


def _jpeg_reader(path: Path, content: dict[str, Array]) -> Callable[[int], Array]:
    """Decodes image i; the headers that all files share are stored once and put back."""
    headers = [content["header0"].tobytes(), content["header1"].tobytes()]
    payload, ends = content["payload"].tobytes(), content["offsets"]

    def read(i: int) -> Array:
        try:
            jpeg = headers[content["header_id"][i]] + payload[ends[i] : ends[i + 1]]
            with Image.open(io.BytesIO(jpeg)) as image:
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except (OSError, UnidentifiedImageError, IndexError) as error:
            raise Damaged("tiny_imagenet10", path, f"image {i}: {error}, MD5 {md5_of(path)}") from error

    return read


_DIGITS = ("femnist_digits_subset.npz",)


@dataset(
    "femnist_digits",
    "FEMNIST's digits, 5,997 grey images 28x28 of 12 clients, 10 classes, in one .npz file",
    present=_folder(_DIGITS),
    files=lambda settings: _files(_DIGITS, settings),
    seeded=False,
    owners=True,
    reads=("test_fraction",),
)
def femnist_digits(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """`data.test_fraction` of each client's images of each digit is held out; owners are the clients."""
    (path,) = _required("femnist_digits", _DIGITS, settings)
    content = read_npz("femnist_digits", path)
    missed = {"images", "labels", "client"} - set(content)
    if missed:
        raise UserError(
            f"{path}: expected arrays images, labels and client, but it lacks {', '.join(missed)}.",
            code="incomplete", path=path, lacks=missed,
        )  # fmt: skip
    x = content["images"][:, None]
    y, owners = (content[key].reshape(-1).astype(np.int64) for key in ("labels", "client"))
    train, test = hold_out(owners * 10 + y, settings.test_fraction, generator(0, "split of femnist_digits"))
    return Dataset(
        "femnist_digits",
        *(x[train], y[train], x[test], y[test]),
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        owners_train=owners[train],
        owners_test=owners[test],
    )
