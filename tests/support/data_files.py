"""Tiny data sets in the on-disk formats of the real ones, and a web server to fetch them from.

Published checksums cannot fit made-up files: tests point the checksum tables of torchvision and medmnist at
these files (`monkeypatch`), so that the product's checking is exercised and never switched off.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """The IDX format of the MNIST family: type and number of dimensions, sizes, values."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def fashion_mnist(folder: Path, *, packed: bool) -> dict[str, Any]:
    """The four files, plain or .gz; returns {"md5": of the contents, "gz_md5": of the files, "arrays": ...}."""
    arrays = {
        "train-images-idx3-ubyte": pixels(20, 28, 28, seed=1),
        "train-labels-idx1-ubyte": np.arange(20) % 10,
        "t10k-images-idx3-ubyte": pixels(10, 28, 28, seed=2),
        "t10k-labels-idx1-ubyte": np.arange(10) % 10,
    }
    folder.mkdir(parents=True, exist_ok=True)
    sums, gz_sums = {}, {}
    for name, array in arrays.items():
        content = idx(array)
        sums[name] = md5(content)
        compressed = gzip.compress(content, mtime=0)
        gz_sums[f"{name}.gz"] = md5(compressed)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(compressed if packed else content)
    return {"md5": sums, "gz_md5": gz_sums, "arrays": arrays}


def cifar(folder: Path, name: str) -> dict[str, Any]:
    """CIFAR's Python pickles: {file: md5} and the arrays, under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    hundred = name == "cifar100"
    files = (
        {"train": 10, "test": 5}
        if hundred
        else {**{f"data_batch_{i}": 4 for i in range(1, 6)}, "test_batch": 5}
    )
    sums, arrays = {}, {}
    for number, (file, count) in enumerate(files.items()):
        data = pixels(count, 3072, seed=number)
        labels = [(7 * number + i) % (100 if hundred else 10) for i in range(count)]
        entry = {"data": data, "fine_labels" if hundred else "labels": labels, "batch_label": file}
        arrays[file] = (data.reshape(-1, 3, 32, 32), labels)
        sums[file] = _write(folder / file, pickle.dumps(entry, protocol=2))
    meta = "meta" if hundred else "batches.meta"
    classes = [f"class {i}" for i in range(100 if hundred else 10)]
    key = "fine_label_names" if hundred else "label_names"
    sums[meta] = _write(folder / meta, pickle.dumps({key: classes}, protocol=2))
    return {"md5": sums, "arrays": arrays, "meta": meta}


def point_cifar_at(monkeypatch: Any, name: str, made: dict[str, Any]) -> None:
    """torchvision's own table of checksums, for these files."""
    import torchvision.datasets

    source, sums = getattr(torchvision.datasets, name.upper()), made["md5"]
    tests = [file for file in sums if file.startswith("test")]
    trains = [file for file in sums if file not in (*tests, made["meta"])]
    monkeypatch.setattr(source, "train_list", [[file, sums[file]] for file in trains])
    monkeypatch.setattr(source, "test_list", [[file, sums[file]] for file in tests])
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": sums[made["meta"]]})


def publish_cifar(site: Path, address: str, monkeypatch: Any) -> Path:
    """CIFAR-10's archive on a site, and torchvision's tables pointed at it."""
    import torchvision.datasets

    made = cifar(site / "cifar-10-batches-py", "cifar10")
    point_cifar_at(monkeypatch, "cifar10", made)
    archive = site / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(site / "cifar-10-batches-py", "cifar-10-batches-py")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", f"{address}{archive.name}")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", md5(archive.read_bytes()))
    return archive


def emnist(folder: Path, split: str, labels: list[int]) -> dict[str, np.ndarray]:
    """IDX files of one split, every image lying on its side, as the real ones do."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, seed in (("train", 3), ("test", 4)):
        images = pixels(len(labels), 28, 28, seed=seed)
        arrays[part] = images
        (folder / f"emnist-{split}-{part}-images-idx3-ubyte").write_bytes(idx(images.transpose(0, 2, 1)))
        (folder / f"emnist-{split}-{part}-labels-idx1-ubyte").write_bytes(idx(np.array(labels)))
    return arrays


def medmnist(path: Path, *, colours: bool, labels: np.ndarray) -> dict[str, np.ndarray]:
    """One .npz file with the official names; every part gets `labels`."""
    content = {}
    for seed, part in enumerate(("train", "val", "test")):
        shape = (28, 28, 3) if colours else (28, 28)
        content[f"{part}_images"] = pixels(len(labels), *shape, seed=seed)
        content[f"{part}_labels"] = labels.astype(np.uint8)
    np.savez_compressed(path, **content)
    return content


def leaf(folder: Path, writers: dict[str, int], *, first: int = 0) -> dict[str, np.ndarray]:
    """One JSON file as LEAF writes it: so many images per writer, white background (1.0)."""
    folder.mkdir(parents=True, exist_ok=True)
    data, held = {}, {}
    for number, (writer, count) in enumerate(writers.items()):
        images = pixels(count, 28, 28, seed=first + number)
        held[writer] = images
        data[writer] = {
            "x": (images.reshape(count, 784) / 255).tolist(),
            "y": [(first + number + i) % 62 for i in range(count)],
        }
    content = {"users": list(writers), "num_samples": list(writers.values()), "user_data": data}
    (folder / f"all_data_{first}_niid_0_keep_0_{folder.name}_9.json").write_text(json.dumps(content))
    return held


def jpeg(image: np.ndarray, quality: int = 95) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "JPEG", quality=quality)
    return content.getvalue()


def smooth(side: int, seed: int, height: int | None = None) -> np.ndarray:
    """A colour image without sharp edges, which JPEG keeps to a few grey levels."""
    corners = pixels(2, 2, 3, seed=seed)
    return np.asarray(Image.fromarray(corners).resize((side, height or side), Image.Resampling.BILINEAR))


def celeba(folder: Path, people: list[int]) -> dict[str, Any]:
    """CelebA's texts and 178x218 JPEGs, one per entry of `people`; smiling where the index is even."""
    images = folder / "img_align_celeba"
    images.mkdir(parents=True)
    names = [f"{i + 1:06d}.jpg" for i in range(len(people))]
    faces = [smooth(178, seed, height=218) for seed in range(len(people))]
    for name, face in zip(names, faces, strict=True):
        (images / name).write_bytes(jpeg(face))
    smiling = [1 if i % 2 == 0 else -1 for i in range(len(people))]
    count, points = str(len(people)), ["lefteye", "righteye", "nose", "leftmouth", "rightmouth"]
    landmarks = " ".join(f"{point}_{axis}" for point in points for axis in "xy")
    texts = {
        # The real header of the attributes ends in a space too.
        "list_attr_celeba.txt": [count, "Male Smiling Young "]
        + [f"{n}  1 {s:2d} -1" for n, s in zip(names, smiling, strict=True)],
        "identity_CelebA.txt": [f"{n} {person}" for n, person in zip(names, people, strict=True)],
        "list_bbox_celeba.txt": [count, "image_id x_1 y_1 width height"]
        + [f"{n}    95  71 226 313" for n in names],
        "list_landmarks_align_celeba.txt": [count, landmarks]
        + [f"{n} 69 109 106 113 77 142 73 152 108 154" for n in names],
        "list_eval_partition.txt": [f"{n} {i % 3}" for i, n in enumerate(names)],
    }
    sums = {name: _write(folder / name, "\n".join(lines).encode() + b"\n") for name, lines in texts.items()}
    return {"md5": sums, "faces": faces, "smiling": [s > 0 for s in smiling]}


def point_celeba_at(monkeypatch: Any, made: dict[str, Any]) -> None:
    from torchvision.datasets import CelebA

    table = [(ident, made["md5"].get(name, sum_), name) for ident, sum_, name in CelebA.file_list]
    monkeypatch.setattr(CelebA, "file_list", table)


def tiny_imagenet(folder: Path, classes: int, train: int, val: int) -> dict[str, Any]:
    """The folder layout of tiny-imagenet-200, with JPEGs of 64x64, one of them grey."""
    wnids = [f"n{1000 + i:08d}" for i in range(classes)][::-1]  # wnids.txt is not sorted
    images: dict[str, np.ndarray] = {}
    for label, wnid in enumerate(wnids):
        place = folder / "train" / wnid / "images"
        place.mkdir(parents=True)
        for i in range(train):
            picture = smooth(64, seed=100 * label + i)
            images[f"{wnid}_{i}"] = picture
            (place / f"{wnid}_{i}.JPEG").write_bytes(
                jpeg(picture[..., 0] if (label, i) == (0, 0) else picture)
            )
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for i in range(val):
        wnid = wnids[i % classes]
        (folder / "val" / "images" / f"val_{i}.JPEG").write_bytes(jpeg(smooth(64, seed=5000 + i)))
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    return {"wnids": wnids, "images": images}


def sheet(path: Path, images: np.ndarray, columns: int) -> None:
    """A lossless WebP contact sheet of (N, side, side, 3) images, row by row; unused cells are black."""
    count, side = images.shape[:2]
    rows = -(-count // columns)
    cells = np.zeros((rows * columns, side, side, 3), np.uint8)
    cells[:count] = images
    grid = cells.reshape(rows, columns, side, side, 3).transpose(0, 2, 1, 3, 4)
    Image.fromarray(grid.reshape(rows * side, columns * side, 3)).save(path, "WEBP", lossless=True)


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return md5(content)


class _Quiet(SimpleHTTPRequestHandler):
    """Serves a folder; a file whose name ends in .cut is promised whole and sent by half."""

    def log_message(self, *arguments: Any) -> None:
        return

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        cut = path.with_name(f"{path.name}.cut")
        if not cut.exists():
            return super().do_GET()
        content = cut.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True
        return None


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server on this machine that serves `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
