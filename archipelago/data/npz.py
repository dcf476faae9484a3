"""`data=npz`: a user's own .npz file of training and test samples."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from archipelago.core.errors import UserError
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
        raise UserError(f"{_NPZ_WANTED}, but data.root={settings.root} does not exist. {_NPZ_INSTEAD}")
    found = sorted(path for path in root.glob("*.npz") if path.is_file())
    if not found:
        there = sorted(path.name for path in root.iterdir())
        holds = f"holds only {some(there)}" if there else "is an empty folder"
        raise UserError(f"{_NPZ_WANTED}, but data.root={settings.root} {holds}. {_NPZ_INSTEAD}")
    if len(found) > 1:
        raise UserError(
            f"data.root={settings.root} holds {len(found)} .npz files ({some([p.name for p in found])}), "
            f"and data=npz reads one: set data.root to the file you mean, for example data.root={found[0]}."
        )
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
                parts = {ours: [archive[name]] for ours, name in names.items()}
                if {"val_images", "val_labels"} <= there:
                    parts["x_test"].insert(0, archive["val_images"])
                    parts["y_test"].insert(0, archive["val_labels"])
                return parts
    # Whatever a damaged archive makes zipfile, zlib or NumPy raise means the same to the user.
    except Exception as error:
        why = str(error).rstrip(".") or type(error).__name__
        with suppress(OSError):
            why += f", {path.stat().st_size} bytes, MD5 {md5_of(path)}"
        raise UserError(
            f"{path} cannot be read as an .npz archive of plain arrays ({why}): it is damaged, or another "
            f"kind of file. {_NPZ_INSTEAD}"
        ) from error
    holds = f"holds only {some(sorted(there))}" if there else "is an empty archive"
    raise UserError(f"{_NPZ_WANTED}, but {path} {holds}. {_NPZ_INSTEAD}")
