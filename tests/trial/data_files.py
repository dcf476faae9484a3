"""Bad inputs of the trial: files of samples."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.trial.case import TINY, Case, Make

_X, _Y = np.zeros((80, 8, 8), np.uint8), np.arange(80) % 4


def _npz(**arrays: Any) -> Make:
    """data.npz with these arrays in place of good ones; None leaves one out."""
    good: dict[str, Any] = {"x_train": _X, "y_train": _Y, "x_test": _X[:20], "y_test": _Y[:20]}
    chosen = {name: array for name, array in {**good, **arrays}.items() if array is not None}

    def make(folder: Path, runs: Path) -> None:
        np.savez(folder / "data.npz", **chosen)

    return make


def _bytes(change: Callable[[bytes], bytes]) -> Make:
    """data.npz as this function changes its bytes."""

    def make(folder: Path, runs: Path) -> None:
        _npz()(folder, runs)
        (folder / "data.npz").write_bytes(change((folder / "data.npz").read_bytes()))

    return make


def _zip(**files: bytes) -> Make:
    def make(folder: Path, runs: Path) -> None:
        with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(f"{name}.npy", content)

    return make


def _npy(header: str) -> bytes:
    """A .npy file that says this of itself, and holds nothing."""
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _claims(shape: str) -> Make:
    huge = _npy("{'descr': '|u1', 'fortran_order': False, 'shape': " + shape + ", }")
    return _zip(x_train=huge, y_train=huge, x_test=huge, y_test=huge)


def _bomb(folder: Path, runs: Path) -> None:
    """4 GB of zeros in a file of 4 MB."""
    with (
        zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        archive.open("x_train.npy", "w", force_zip64=True) as file,
    ):
        file.write(_npy("{'descr': '|u1', 'fortran_order': False, 'shape': (67108864, 8, 8), }"))
        for _ in range(4096):
            file.write(bytes(1 << 20))
    with zipfile.ZipFile(folder / "data.npz", "a") as archive:
        for name, array in (("y_train", np.zeros(67108864, np.uint8)), ("x_test", _X), ("y_test", _Y)):
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue(), zipfile.ZIP_DEFLATED)


def _png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file whose header says this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def _images(**odd: bytes) -> Make:
    """A folder of two classes with six images each, and odd files among them: {class__name: content}."""

    def make(folder: Path, runs: Path) -> None:
        from PIL import Image

        for name in ("cat", "dog"):
            (folder / "images" / name).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "images" / name / f"{number}.png")
        for name, content in odd.items():
            path = folder / "images" / name.replace("__", "/").replace("_png", ".png").replace("_jpg", ".jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return make


def _linked_images(target: str) -> Make:
    def make(folder: Path, runs: Path) -> None:
        _images()(folder, runs)
        (folder / "images" / "cat" / "again").symlink_to(target)

    return make


def _fifo_image(folder: Path, runs: Path) -> None:
    _images()(folder, runs)
    os.mkfifo(folder / "images" / "cat" / "pipe.png")


def _fifo_npz(folder: Path, runs: Path) -> None:
    os.mkfifo(folder / "data.npz")


def _two(folder: Path, runs: Path) -> None:
    _npz()(folder, runs)
    (folder / "more.npz").write_bytes((folder / "data.npz").read_bytes())


def _leaf(text: str) -> Make:
    def make(folder: Path, runs: Path) -> None:
        for part in ("train", "test"):
            (folder / "femnist" / part).mkdir(parents=True)
            (folder / "femnist" / part / "all.json").write_text(text)

    return make


_NAN = np.full((80, 4), np.nan, np.float32)
_ROWS = np.zeros((80, 4), np.float32)

# {name: (what makes data.npz, part of the sentence)}
NPZ: dict[str, tuple[Make, str]] = {
    "no x_train": (_npz(x_train=None), "Expected one .npz file with arrays x_train, y_train, x_test, y_test"),
    "no labels": (_npz(y_train=None, y_test=None), "Expected one .npz file with arrays x_train, y_train, x_test, y_test"),
    "labels fewer than samples": (_npz(y_train=_Y[:79]), "Data set 'data', train part: expected one label for each of 80"),
    "no samples": (_npz(x_train=_X[:0], y_train=_Y[:0]), "/data.npz: labels must be class numbers 0, 1, 2, ... below the number"),
    "no test samples": (_npz(x_test=_X[:0], y_test=_Y[:0]), "Data set 'data', test part: it holds no samples"),
    "one number for an array": (_npz(x_train=np.uint8(3)), "/data.npz: expected images (N, H, W), (N, H, W, C) or (N, C, H, W),"),
    "images of five dimensions": (_npz(x_train=np.zeros((80, 2, 3, 8, 8), np.uint8)), "/data.npz: expected images (N, H, W), (N, H, W, C) or (N, C, H, W),"),
    "images of no pixels": (_npz(x_train=np.zeros((80, 0, 8), np.uint8), x_test=np.zeros((20, 0, 8), np.uint8)), "Data set 'data', train part: it holds no samples"),
    "test images of another size": (_npz(x_test=np.zeros((20, 9, 9), np.uint8)), "Data set 'data': training and test samples must have one shape and"),
    "test images of another type": (_npz(x_test=np.zeros((20, 8, 8), np.float32)), "Data set 'data': training and test samples must have one shape and"),
    "NaN": (_npz(x_train=_NAN, x_test=_NAN[:20]), "/data.npz: samples must be finite float32 numbers, but some are NaN"),
    "infinite": (_npz(x_train=_NAN * 0 + np.inf, x_test=_NAN[:20]), "/data.npz: samples must be finite float32 numbers, but some are NaN"),
    "too large for float32": (_npz(x_train=np.full((80, 4), 1e300), x_test=np.zeros((20, 4))), "/data.npz: samples must be finite float32 numbers, but some are NaN"),
    "texts as samples": (_npz(x_train=np.array(["a"] * 80)), "/data.npz: samples must be numbers, but are of type <U1"),
    "texts as labels": (_npz(y_train=np.array(["a"] * 80)), "/data.npz: expected one number as the label of each sample, but got"),
    "dates as labels": (_npz(y_train=np.array(["2026-01-01"] * 80, "datetime64[D]")), "/data.npz: expected one number as the label of each sample, but got"),
    "complex samples": (_npz(x_train=np.zeros((80, 4), complex)), "/data.npz: samples must be numbers, but are of type complex128"),
    "objects, pickled": (_npz(x_train=np.array([{}] * 80, object)), "/data.npz cannot be read as an .npz archive of plain arrays (Object"),
    "records": (_npz(x_train=np.zeros(80, [("a", "f4")])), "/data.npz: samples must be numbers, but are of type [('a', '<f4')]"),
    "negative labels": (_npz(y_train=_Y - 1), "/data.npz: labels must be class numbers 0, 1, 2, ... below the number"),
    "labels with a gap": (_npz(y_train=_Y * 1000), "/data.npz: labels must be class numbers 0, 1, 2, ... below the number"),
    "labels of 2^63": (_npz(y_train=np.full(80, 2**63, np.uint64)), "/data.npz: labels must be class numbers 0, 1, 2, ... below the number"),
    "labels as whole floats": (_npz(y_train=_Y.astype(float), y_test=_Y[:20].astype(float)), "/data.npz: expected labels that say what they are, got float64 labels"),
    "labels NaN": (_npz(y_train=np.full(80, np.nan), y_test=np.full(20, np.nan)), "/data.npz: labels must be finite numbers, but some are NaN or infinite"),
    "labels of two columns": (_npz(y_train=np.zeros((80, 2), int)), "/data.npz: expected one number as the label of each sample, but got"),
    "test labels of an unknown class": (_npz(y_test=_Y[:20] + 50), "4 of 4 clients (client 0 first) would have no test sample of any"),
    "true and false as samples": (_npz(x_train=np.zeros((80, 4), bool)), "Data set 'data': training and test samples must have one shape and"),
    "cut short": (_bytes(lambda data: data[: len(data) // 2]), "/data.npz cannot be read as an .npz archive of plain arrays (File is"),
    "a flipped bit": (_bytes(lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:]), "/data.npz cannot be read as an .npz archive of plain arrays (Bad"),
    "empty file": (_bytes(lambda data: b""), "/data.npz cannot be read as an .npz archive of plain arrays (No data"),
    "a text": (_bytes(lambda data: b"x,y\n1,2\n"), "/data.npz cannot be read as an .npz archive of plain arrays (This"),
    "a pickle": (_bytes(lambda data: b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR."), "/data.npz cannot be read as an .npz archive of plain arrays (This"),
    "a single array": (_bytes(lambda data: _npy("{'descr': '|u1', 'fortran_order': False, 'shape': (0,), }")), "/data.npz cannot be read as an .npz archive of plain arrays (it is a"),
    "an empty archive": (_zip(), "Expected one .npz file with arrays x_train, y_train, x_test, y_test"),
    "arrays that claim exabytes": (_claims("(1000000000, 1000000000)"), "(x_test says that it has 1,000,000,000,000,000,000 bytes, and the file holds 0 of it, "),
    "arrays that claim 50 GB": (_claims("(50000, 1000, 1000)"), "(x_test says that it has 50,000,000,000 bytes, and the file holds 0 of it, "),
    "arrays of a negative size": (_claims("(-80, 8, 8)"), "/data.npz cannot be read as an .npz archive of plain arrays (x_test has a negative size"),
    "a header that is code": (_zip(x_train=_npy("__import__('os').system('touch hacked')"), y_train=b"", x_test=b"", y_test=b""), "/data.npz cannot be read as an .npz archive of plain arrays"),
    "4 GB in 4 MB": (_bomb, "Expected arrays that fit into memory, got {folder}/data.npz (4.2 MB), which takes 4.36 GB to read"),
    "a FIFO": (_fifo_npz, "Expected one .npz file with arrays x_train, y_train, x_test, y_test"),
}  # fmt: skip

# {name: (what makes images/, part of the sentence)}
IMAGES: dict[str, tuple[Make, str]] = {
    "an image that is none": (_images(cat__bad_png=b"no image"), "/images/cat/bad.png is damaged (cannot identify image file"),
    "an image cut short": (_images(cat__bad_png=_png(8, 8)[:40]), "/images/cat/bad.png is damaged (cannot identify image file"),
    "an empty image": (_images(cat__bad_png=b""), "/images/cat/bad.png is damaged (cannot identify image file"),
    "an image of 30,000 x 30,000": (_images(cat__bad_png=_png(30_000, 30_000)), "/images/cat/bad.png is too large to be decoded (Image size (900000000"),
    "a real image of 30,000 x 30,000": (_images(cat__bad_png=_png(30_000, 30_000, bytes(1 << 26))), "/images/cat/bad.png is too large to be decoded (Image size (900000000"),
    "an image of 8,193 x 8,193": (_images(cat__bad_png=_png(8193, 8193)), "/images/cat/bad.png is too large to be decoded (8,193 x 8,193 pixels"),
    "an image of 2^31 x 2^31": (_images(cat__bad_png=_png(2**31 - 1, 2**31 - 1)), "/images/cat/bad.png is too large to be decoded (Image size"),
    "an image of 0 x 0": (_images(cat__bad_png=_png(0, 0)), "/images/cat/bad.png is damaged (cannot identify image file"),
    "images of 30,000 x 30,000 alone": (_images(**{f"{name}__{i}_png": _png(30_000, 30_000) for name in ("cat", "dog") for i in range(6)}), "/images/cat/0.png is too large to be decoded (Image size (900000000"),
    "a link to the folder above": (_linked_images(".."), "Expected every folder of images once, but"),
    "a FIFO": (_fifo_image, "Expected images to be files, got"),
}  # fmt: skip

_NPZ_WORDS = f"{TINY} data=npz data.root={{folder}}/data.npz"
_IMAGE_WORDS = f"{TINY} data=image_folder data.root={{folder}}/images data.cache={{folder}}/cache"
_LEAF_WORDS = f"{TINY} data=femnist partition=natural data.root={{folder}} data.cache={{folder}}/cache"

# {name: (settings, what makes the files, part of the sentence)}
_OTHERS: dict[str, tuple[str, Make, str]] = {
    "image folder that is a file": (_IMAGE_WORDS.replace("/images", "/data.npz"), _npz(), "Expected data.root to be a folder with train/CLASS/*.png and"),
    "image folder without classes": (_IMAGE_WORDS.replace("/images", "/images/cat"), _images(), "Expected data.root to be a folder with train/CLASS/*.png and"),
    "images resized to 0": (f"{_IMAGE_WORDS} data.image_size=0", _images(), "Expected data.image_size >= 1, got 0 (sets of resized images: side in"),
    "images resized to 100,000": (f"{_IMAGE_WORDS} data.image_size=100000", _images(), "Expected data.image_size <= 4096, got 100000 (sets of resized images:"),
    "two .npz files": (f"{TINY} data=npz data.root={{folder}}", _two, "holds 2 .npz files (data.npz, more.npz), and data=npz reads one: set"),
    "more clients than samples": (f"{_NPZ_WORDS.replace('clients=4', 'clients=81')}", _npz(), "clients=81 with partition.min_size=4 need 324 training samples, but"),
    "LEAF: no JSON": (_LEAF_WORDS, _leaf("{"), "/femnist/train/all.json is damaged (Expecting property name enclosed"),
    "LEAF: a list": (_LEAF_WORDS, _leaf("[]"), "/femnist/train/all.json is damaged (list indices must be integers or"),
    "LEAF: nobody": (_LEAF_WORDS, _leaf('{"users": [], "user_data": {}}'), "/femnist/train/all.json is damaged (no file holds an image): bring it"),
    "LEAF: a user without data": (_LEAF_WORDS, _leaf('{"users": ["a"], "user_data": {}}'), "209cd34d1b52e14a0261020753acb08a): bring it again, whole"),
    "LEAF: images of another size": (_LEAF_WORDS, _leaf('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0, 1]], "y": [3]}}}'), "/femnist/train/all.json is damaged (cannot reshape array of size 2"),
    "LEAF: labels out of range": (_LEAF_WORDS, _leaf('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [' + str([0.0] * 784) + '], "y": [99]}}}'), "Data set 'femnist', train part: labels must lie in 0..61, but lie in"),
    "LEAF: deeply nested": (_LEAF_WORDS, _leaf("[" * 100_000), "/femnist/train/all.json is damaged (maximum recursion depth exceeded"),
    "CIFAR-10 that is not there": (f"{TINY} data=cifar10 data.root={{folder}}", _npz(), "Data set 'cifar10' is not here: expected it in"),
    "MedMNIST that is not there": (f"{TINY} data=pathmnist data.root={{folder}}", _npz(), "Data set 'pathmnist' is not here: expected it in"),
    "mean of too many channels": (f"{_NPZ_WORDS} 'data.mean=[0.1,0.2,0.3]' 'data.std=[1,1,1]'", _npz(), "Data set 'data': mean and std need one number, or one per channel"),
    "deviation of zero": (f"{_NPZ_WORDS} 'data.std=[0]'", _npz(), "Expected every number of data.std > 0, got [0] (normalise by this"),
    "mean of NaN": (f"{_NPZ_WORDS} 'data.mean=[.nan]'", _npz(), "Expected data.mean to be a finite number, got [nan] (normalise by"),
    "rotations of vectors": (f"{_NPZ_WORDS} data.rotations=4", _npz(x_train=_ROWS, x_test=_ROWS[:20]), "data.rotations=4 turns square images by 90 degrees, but 'data' holds"),
    "rotations of images that are not square": (f"{_NPZ_WORDS} data.rotations=4", _npz(x_train=np.zeros((80, 8, 9), np.uint8), x_test=np.zeros((20, 8, 9), np.uint8)), "data.rotations=4 turns square images by 90 degrees, but 'data' holds"),
}  # fmt: skip


def _stored(name: str, words: str, says: str, make: Make) -> Case:
    """Samples of these kinds are stored in a cache, once, and a line says so."""
    cached = "data.cache" in words
    return Case(name, words, says, make=make, leaves=("cache",) if cached else (), begins=cached)


CASES = [
    *(Case(f"npz: {name}", _NPZ_WORDS, says, make=make) for name, (make, says) in NPZ.items()),
    *(_stored(f"images: {name}", _IMAGE_WORDS, says, make) for name, (make, says) in IMAGES.items()),
    *(_stored(f"data: {name}", words, says, make) for name, (words, make, says) in _OTHERS.items()),
]
