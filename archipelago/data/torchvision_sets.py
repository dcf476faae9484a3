"""Fashion-MNIST, CIFAR-10, CIFAR-100 and EMNIST, read and fetched by `torchvision.datasets`.

Published checksums are compared before anything is read: CIFAR's files are pickles, and torchvision too opens
them only if their MD5 is the published one.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions
from archipelago.core.settings import DataSettings
from archipelago.data.apportion import Integers
from archipelago.data.datasets import Array, Dataset, dataset
from archipelago.data.files import Damaged, check_md5, fetch, fetch_hint, md5_of, missing, root_of
from archipelago.data.packed import CIFAR10_SHEETS, cifar10_from_sheets


def _torchvision() -> Any:
    """torchvision.datasets; imported when it is needed, since it takes seconds."""
    import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision)

    # isort: split
    import torchvision.datasets

    return torchvision.datasets


# Fashion-MNIST --------------------------------------------------------------------------------------------

# Where Debian's package dataset-fashion-mnist puts the files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")

# MD5 of the four files' content: torchvision publishes those of its .gz files only, and packages compress anew.
FASHION_FILES = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def _fashion_folders(settings: DataSettings) -> list[Path]:
    root = root_of(settings)
    return [root / "FashionMNIST" / "raw", root / "fashion-mnist", DEBIAN]


def _fashion_files(settings: DataSettings) -> list[Path]:
    """The four files, plain or compressed, in the first folder that has all of them."""
    for folder in _fashion_folders(settings):
        found = [_plain_or_gz(folder / name) for name in FASHION_FILES]
        if all(found):
            return [path for path in found if path is not None]
    return []


def _plain_or_gz(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() else packed if packed.is_file() else None


def _fashion_present(settings: DataSettings) -> str | None:
    found = _fashion_files(settings)
    return str(found[0].parent) if found else None


def _fashion_fetch(settings: DataSettings) -> Path:
    source = _torchvision().FashionMNIST
    return fetch(
        "fashion_mnist",
        settings,
        source.mirrors[0],
        ["FashionMNIST"],
        lambda folder: source(folder, download=True),
        source.resources,
    )


@dataset(
    "fashion_mnist",
    "Fashion-MNIST: 70,000 grey images 28x28 of clothing, 10 classes",
    present=_fashion_present,
    files=_fashion_files,
    fetch=_fashion_fetch,
    seeded=False,
)
def fashion_mnist(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """The official split. Found in torchvision's layout, and as Debian's dataset-fashion-mnist installs it."""
    files = _fashion_files(settings)
    source = _torchvision().FashionMNIST
    if not files:
        how = fetch_hint("fashion_mnist", settings, source.mirrors[0])
        raise missing(
            "fashion_mnist", _fashion_folders(settings), f"{how} Debian: install dataset-fashion-mnist."
        )
    with tempfile.TemporaryDirectory() as temporary:
        raw = Path(temporary) / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for path, (name, expected) in zip(files, FASHION_FILES.items(), strict=True):
            _unpacked("fashion_mnist", path, raw / name)
            found = md5_of(raw / name)
            if found != expected:
                raise Damaged(
                    "fashion_mnist", path, f"the MD5 of its content is {found}, expected {expected}"
                )
        parts = [source(temporary, train=train) for train in (True, False)]
    return _images("fashion_mnist", _grey(parts[0]), _grey(parts[1]), classes=10)


def _unpacked(name: str, path: Path, place: Path) -> None:
    """Make `place` the content of `path`: a link, or unpacked from .gz."""
    if path.suffix != ".gz":
        place.symlink_to(path.resolve())
        return
    try:
        with gzip.open(path) as packed, place.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except (OSError, EOFError, zlib.error) as error:
        raise Damaged(name, path, f"{error}, MD5 {md5_of(path)}") from error


def _grey(part: Any) -> tuple[Array, Integers]:
    return part.data.numpy()[:, None], part.targets.numpy().astype(np.int64)


def _images(
    name: str,
    train: tuple[Array, Integers],
    test: tuple[Array, Integers],
    *,
    classes: int,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[float, ...] = (0.5,),
    **more: Any,
) -> Dataset:
    return Dataset(name, *train, *test, classes, mean, std, **more)


# CIFAR ----------------------------------------------------------------------------------------------------


def _cifar_files(name: str, settings: DataSettings) -> list[Path]:
    """All files of torchvision's layout, or none."""
    folder = root_of(settings) / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    wanted = {
        "cifar10": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"],
        "cifar100": ["train", "test", "meta"],
    }[name]
    found = [folder / each for each in wanted]
    return found if all(path.is_file() for path in found) else []


def _sheets(settings: DataSettings) -> list[Path]:
    found = [root_of(settings) / name for name in CIFAR10_SHEETS]
    return found if all(path.is_file() for path in found) else []


def _cifar10_files(settings: DataSettings) -> list[Path]:
    return _cifar_files("cifar10", settings) or _sheets(settings)


def _cifar100_files(settings: DataSettings) -> list[Path]:
    return _cifar_files("cifar100", settings)


def _cifar_fetch(name: str, settings: DataSettings) -> Path:
    source = getattr(_torchvision(), name.upper())
    archive = [(source.filename, source.tgz_md5)]
    return fetch(
        name,
        settings,
        source.url,
        [source.base_folder],
        lambda folder: source(folder, download=True),
        archive,
    )


def _cifar(name: str, settings: DataSettings, **normalisation: Any) -> Dataset:
    source = getattr(_torchvision(), name.upper())
    files = _cifar_files(name, settings)
    if not files:
        how = fetch_hint(name, settings, source.url)
        places = [root_of(settings) / source.base_folder]
        places += [root_of(settings) / "cifar10_lossless_*.webp"] if name == "cifar10" else []
        raise missing(name, places, how)
    published = [*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])]
    check_md5(name, [(files[0].parent / file, md5) for file, md5 in published])
    parts = [source(root_of(settings), train=train) for train in (True, False)]
    first, second = (
        (np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)), np.asarray(part.targets, np.int64))
        for part in parts
    )
    return _images(name, first, second, classes=len(parts[0].classes), **normalisation)


@dataset(
    "cifar10",
    "CIFAR-10: 60,000 colour images 32x32, 10 classes; torchvision's files or lossless WebP sheets",
    present=lambda settings: _folder_of(_cifar10_files(settings)),
    files=_cifar10_files,
    fetch=lambda settings: _cifar_fetch("cifar10", settings),
    seeded=False,
    reads=("mapped", "cache"),
)
def cifar10(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """The official split, from torchvision's files if they are there, else from sheets (`packed.py`)."""
    sheets = _sheets(settings)
    if sheets and not _cifar_files("cifar10", settings):
        return cifar10_from_sheets("cifar10", settings, sheets)
    return _cifar("cifar10", settings)


@dataset(
    "cifar100",
    "CIFAR-100: 60,000 colour images 32x32, 100 classes",
    present=lambda settings: _folder_of(_cifar100_files(settings)),
    files=_cifar100_files,
    fetch=lambda settings: _cifar_fetch("cifar100", settings),
    seeded=False,
)
def cifar100(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """The official split, normalised as FeMAM does."""
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    return _cifar("cifar100", settings, mean=mean, std=std)


def _folder_of(files: list[Path]) -> str | None:
    return str(files[0].parent) if files else None


# EMNIST ---------------------------------------------------------------------------------------------------

# Only the archive's checksum is published: those of the files are taken when they come out of it (as md5sum does).
_EMNIST_SUMS = "MD5SUMS"


def _emnist_files(split: str, settings: DataSettings) -> list[Path]:
    raw = root_of(settings) / "EMNIST" / "raw"
    found = [
        raw / f"emnist-{split}-{part}-{kind}-ubyte"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    return found if all(path.is_file() for path in found) else []


def _emnist_fetch(name: str, settings: DataSettings) -> Path:
    """One archive has all splits; torchvision unpacks them all."""
    source = _torchvision().EMNIST

    def download(folder: Path) -> None:
        source(folder, split="letters", download=True)
        raw = folder / "EMNIST" / "raw"
        for archive in raw.glob("*.zip"):
            archive.unlink()
        sums = [f"{md5_of(path)}  {path.name}\n" for path in sorted(raw.glob("*-ubyte"))]
        (raw / _EMNIST_SUMS).write_text("".join(sums))

    return fetch(name, settings, source.url, ["EMNIST"], download, [(Path(source.url).name, source.md5)])


def _check_idx(name: str, files: list[Path]) -> None:
    """Their size must be the one that their header gives, their MD5 the one they were fetched with, if it is known."""
    for path in files:
        with path.open("rb") as file:
            magic = file.read(4)
            sizes = [int.from_bytes(file.read(4), "big") for _ in range(magic[3] if len(magic) == 4 else 0)]
        size, expected = path.stat().st_size, 4 + 4 * len(sizes) + int(np.prod(sizes or [0]))
        if not sizes or magic[:3] != b"\0\0\x08" or size != expected:
            why = f"{size} bytes where its header says {expected}, MD5 {md5_of(path)}"
            raise Damaged(name, path, why)
    sums = files[0].with_name(_EMNIST_SUMS)
    if sums.is_file():
        known = {file: md5 for md5, file in (line.split() for line in sums.read_text().splitlines() if line)}
        check_md5(name, [(path, known[path.name]) for path in files if path.name in known])


def _emnist(name: str, split: str, settings: DataSettings) -> list[tuple[Array, Integers]]:
    """Images and labels of the training and of the test part; images upright (the files hold them on a side)."""
    source = _torchvision().EMNIST
    files = _emnist_files(split, settings)
    if not files:
        raise missing(name, [root_of(settings) / "EMNIST" / "raw"], fetch_hint(name, settings, source.url))
    _check_idx(name, files)
    parts = [_grey(source(root_of(settings), split=split, train=train)) for train in (True, False)]
    return [(np.ascontiguousarray(x.transpose(0, 1, 3, 2)), y) for x, y in parts]


def _emnist_source(name: str, split: str) -> dict[str, Any]:
    """Where the files of a data set made of EMNIST are, and how they come there."""
    return {
        "present": lambda settings: _folder_of(_emnist_files(split, settings)),
        "files": lambda settings: _emnist_files(split, settings),
        "fetch": lambda settings: _emnist_fetch(name, settings),
        "seeded": False,
    }


@dataset(
    "emnist_letters",
    "EMNIST letters: 145,600 grey images 28x28, 26 classes, both cases of a letter in one",
    **_emnist_source("emnist_letters", "letters"),
)
def emnist_letters(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """The official split; labels 1..26 become 0..25. Pixels in [0, 1]."""
    train, test = ((x, y - 1) for x, y in _emnist("emnist_letters", "letters", settings))
    return _images("emnist_letters", train, test, classes=26, mean=(0.0,), std=(1.0,))


@dataset(
    "emnist_byclass",
    "EMNIST by class: 814,255 grey images 28x28 of digits and letters, 62 classes",
    **_emnist_source("emnist_byclass", "byclass"),
)
def emnist_byclass(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """The official split; digits 0..9, upper case 10..35, lower case 36..61. Pixels in [0, 1]."""
    train, test = _emnist("emnist_byclass", "byclass", settings)
    return _images("emnist_byclass", train, test, classes=62, mean=(0.0,), std=(1.0,))


@dataset(
    "emnist_cases",
    "letters of EMNIST by class, 26 classes, from two sources: lower case (0) and upper case (1)",
    **_emnist_source("emnist_cases", "byclass"),
    sources=True,
)
def emnist_cases(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """FedSoft's letters: labels 36..61 (lower) and 10..35 (upper) become 0..25. Pixels in [0, 1]."""
    parts: list[tuple[Array, Integers]] = []
    sources: dict[str, Any] = {}
    for part, (x, y) in zip(("train", "test"), _emnist("emnist_cases", "byclass", settings), strict=True):
        letters = y >= 10
        if not letters.any():
            raise UserError(
                f"Data set 'emnist_cases': the {part} part of {settings.root} holds no letters.",
                code="no-samples", part=part, root=settings.root,
            )  # fmt: skip
        upper = y[letters] < 36
        parts.append((x[letters], np.where(upper, y[letters] - 10, y[letters] - 36)))
        sources[f"sources_{part}"] = upper.astype(np.int64)
    train, test = parts
    return _images("emnist_cases", train, test, classes=26, mean=(0.0,), std=(1.0,), **sources)
