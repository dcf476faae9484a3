"""One file per image, read: decoded, cut to a square, refused where it is no image or too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from archipelago.core.errors import UserError
from archipelago.data.apportion import Integers
from archipelago.data.datasets import Array
from archipelago.data.files import Damaged, md5_of
from archipelago.data.mapped import Recipe, in_chunks

MOST_PIXELS = 1 << 26  # of one image: 0.2 GB while it is decoded


def read_image(name: str, path: Path, side: int, mode: str = "RGB") -> Array:
    """One image as uint8 (channels, side, side), resized (bicubic) where it has another size."""
    try:
        refuse_pipe(path)
        with Image.open(path) as image:
            refuse_size(name, path, image.size)
            pixels = image.convert(mode)
            if pixels.size != (side, side):
                pixels = pixels.resize((side, side), Image.Resampling.BICUBIC)
            values = np.asarray(pixels)
    except Image.DecompressionBombError as error:
        raise too_large(name, path, error) from error
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        why = f"{' '.join(str(error).split())}, {path.stat().st_size} bytes, MD5 {md5_of(path)}"
        raise Damaged(name, path, why) from error
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


def refuse_pipe(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UserError(
            f"Expected images to be files, got {path}, a pipe or a device: take it out of the folder.",
            code="not-a-file", path=path,
        )  # fmt: skip


def refuse_size(name: str, path: Path, size: tuple[int, int]) -> None:
    """By its header alone. (Pillow refuses images of more than twice the number that it warns of, 89 million.)"""
    if size[0] * size[1] > MOST_PIXELS:
        count = f"{size[0]:,} x {size[1]:,} pixels, and {MOST_PIXELS:,} are the most"
        raise too_large(name, path, ValueError(count))


def too_large(name: str, path: Path, error: Exception) -> UserError:
    """What would take gigabytes to decode, whatever the size of its file."""
    return UserError(
        f"Data set '{name}': {path} is too large to be decoded ({' '.join(str(error).split()).rstrip('.')}): make it "
        "smaller, or take it out.",
        code="too-large", path=path,
    )  # fmt: skip


def reader_of(name: str, paths: list[Path], side: int, mode: str = "RGB") -> Callable[[int], Array]:
    return lambda i: read_image(name, paths[i], side, mode)


def recipe_of(
    paths: list[Path],
    y: Integers,
    cut: int,
    read: Callable[[int], Array],
    shape: tuple[int, ...],
    owners: Integers | None = None,
) -> Recipe:
    order = np.arange(len(paths), dtype=np.int64)
    return Recipe((len(paths), *shape), lambda: in_chunks(read, order), y, cut, owners)
