"""`data=npz`: a user's own .npz file of training and test samples."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.memory import available, in_words
from archipelago.core.settings import DataSettings
from archipelago.data.arrays import from_arrays
from archipelago.data.datasets import Array, Dataset, dataset, some
from archipelago.data.files import NO_FILES, md5_of
from archipelago.data.options import TargetOptions

_NPZ_WANTED = (
    "Expected one .npz file with arrays x_train, y_train, x_test, y_test (or train_images, train_labels, "
    "test_images, test_labels, as MedMNIST names them)"
)
_NPZ_INSTEAD = f"Set data.root to such a file or its folder, or use data={NO_FILES}, which needs no files."
_NPZ_NAMES = {
    "x_train": "train_images",
    "y_train": "train_labels",
    "x_test": "test_images",
    "y_test": "test_labels",
}


def npz_file(settings: DataSettings) -> Path:
    """The one .npz file that `data.root` is or holds."""
    root = Path(settings.root).expanduser()
    if root.is_file():
        return root
    if not root.is_dir():
        raise UserError(
            f"{_NPZ_WANTED}, but data.root={settings.root} does not exist. {_NPZ_INSTEAD}",
            code="wrong-file", path=settings.root,
        )  # fmt: skip
    found = sorted(path for path in root.glob("*.npz") if path.is_file())
    if not found:
        there = sorted(path.name for path in root.iterdir())
        holds = f"holds only {some(there)}" if there else "is an empty folder"
        raise UserError(
            f"{_NPZ_WANTED}, but data.root={settings.root} {holds}. {_NPZ_INSTEAD}",
            code="wrong-file", path=settings.root,
        )  # fmt: skip
    if len(found) > 1:
        raise UserError(
            f"data.root={settings.root} holds {len(found)} .npz files ({some([p.name for p in found])}), "
            f"and data=npz reads one: set data.root to the file you mean, for example data.root={found[0]}.",
            code="ambiguous", setting="data.root", choices=found,
        )  # fmt: skip
    return found[0]


def _npz_files(settings: DataSettings) -> list[Path]:
    try:
        return [npz_file(settings)]
    except (UserError, OSError):
        return []


@dataset(
    "npz",
    "your own .npz file of training and test images and labels (data.root)",
    present=lambda settings: next(map(str, _npz_files(settings)), None),
    files=_npz_files,
    seeded=False,
)
def npz(settings: DataSettings, options: TargetOptions, seed: int) -> Dataset:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), or vectors (N, features), from one file.

    uint8 is taken for pixels (mean and std 0.5, as in the papers), anything else for numbers that are
    ready to use. Whole-number labels make classes, other labels a regression. MedMNIST's validation
    images, where there are any, join the test images, as in the papers. Pickled content is refused:
    reading a file never runs code.
    """
    path = npz_file(settings)
    return from_arrays(path.stem, _read_npz(path), where=str(path), targets=options.targets)


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
                more = {"val_images", "val_labels"} & there
                _check_sizes(path, {*names.values(), *more})
                parts = {ours: [archive[name]] for ours, name in names.items()}
                if {"val_images", "val_labels"} <= there:
                    parts["x_test"].insert(0, archive["val_images"])
                    parts["y_test"].insert(0, archive["val_labels"])
                return parts
    except UserError:
        raise
    # Whatever a damaged archive makes zipfile, zlib or NumPy raise means the same to the user.
    except Exception as error:
        why = str(error).rstrip(".") or type(error).__name__
        with suppress(OSError):
            why += f", {path.stat().st_size} bytes, MD5 {md5_of(path)}"
        raise UserError(
            f"{path} cannot be read as an .npz archive of plain arrays ({why}): it is damaged, or another "
            f"kind of file. {_NPZ_INSTEAD}",
            code="damaged", file=path,
        ) from error  # fmt: skip
    holds = f"holds only {some(sorted(there))}" if there else "is an empty archive"
    raise UserError(f"{_NPZ_WANTED}, but {path} {holds}. {_NPZ_INSTEAD}", code="wrong-file", path=path)


def _check_sizes(path: Path, names: Iterable[str]) -> None:
    """Refuse, by the headers alone, arrays that their file does not hold, or that this process cannot hold."""
    needed = 0
    with zipfile.ZipFile(path) as archive:
        for name in sorted(names):
            member = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name)
            with archive.open(member) as file:
                shape, dtype = _header(file)
                held = member.file_size - file.tell()
            if any(size < 0 for size in shape):
                raise ValueError(f"{name} has a negative size, {shape}")
            size = math.prod(shape) * dtype.itemsize
            if not dtype.hasobject and size != held:  # objects are refused as such when they are read
                raise ValueError(f"{name} says that it has {size:,} bytes, and the file holds {held:,} of it")
            needed += _as_read(size, dtype)
    here = available()
    if needed > here:
        raise UserError(
            f"Expected arrays that fit into memory, got {path} ({in_words(path.stat().st_size)}), which takes "
            f"{in_words(needed)} to read, and {in_words(here)} are free: use fewer samples, or images as files "
            "(data=image_folder), which are mapped from disk.",
            code="too-large", path=path,
        )  # fmt: skip


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type that a .npy file says it has."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return tuple(shape), dtype


def _as_read(size: int, dtype: np.dtype[Any]) -> int:
    """Bytes that an array takes while it is made samples: as it is, and once more as 32-bit numbers where it is not."""
    return size if dtype == np.uint8 else size + size // max(dtype.itemsize, 1) * 4
