"""Contact sheets, JPEGs in one file and the real sets in these forms, where they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from archipelago.core.settings import DataSettings
from archipelago.data import DATASETS, Dataset, load_dataset, packed
from tests.support import data_files
from tests.support.errors import refused


def load(name: str, root: Path, **more: object) -> Dataset:
    return load_dataset(DataSettings(name=name, root=str(root), **more), seed=0)


def content_of(images: np.ndarray, labels: np.ndarray) -> str:
    content = hashlib.sha256(np.ascontiguousarray(images.transpose(0, 3, 1, 2)).tobytes())
    content.update(labels.astype(np.uint8).tobytes())
    return content.hexdigest()


class TestCifarSheets:
    images = data_files.pixels(1200, 32, 32, 3)
    labels = np.arange(1200) % 10

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for number, name in enumerate(packed.CIFAR10_SHEETS[:-1]):
            data_files.sheet(tmp_path / name, self.images[200 * number : 200 * (number + 1)], columns=100)
        np.savez(
            tmp_path / packed.CIFAR10_SHEETS[-1],
            train_labels=self.labels[:1000],
            test_labels=self.labels[1000:],
        )
        monkeypatch.setattr(packed, "PER_SHEET", 200)
        monkeypatch.setattr(packed, "CIFAR10_CONTENT", content_of(self.images, self.labels))
        return tmp_path

    def test_read_by_name_and_bit_by_bit(self, root: Path) -> None:
        for _ in range(2):  # decoded, then from the stored copy
            data = load("cifar10", root)
            assert (data.x_train.transpose(0, 2, 3, 1) == self.images[:1000]).all()
            assert (data.x_test.transpose(0, 2, 3, 1) == self.images[1000:]).all()
            assert data.y_test.tolist() == self.labels[1000:].tolist()

    def test_damage_is_named_with_a_checksum(self, root: Path) -> None:
        path = root / packed.CIFAR10_SHEETS[2]
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with refused("damaged", path=path, says=data_files.md5(path.read_bytes())):
            load("cifar10", root)
        data_files.sheet(path, 255 - self.images[:200], columns=100)
        with refused("damaged", name="cifar10", says=("SHA-256", packed.CIFAR10_CONTENT)):
            load("cifar10", root)
        data_files.sheet(path, self.images[:200], columns=50)
        with refused("damaged", name="cifar10", says=("1600x128", "200", "32x32", "100")):
            load("cifar10", root)


def test_pathmnist_subset(tmp_path: Path) -> None:
    labels = {}
    images = {}
    for seed, (part, columns) in enumerate((("train", 120), ("val", 40), ("test", 85))):
        images[part] = data_files.pixels(130, 28, 28, 3, seed=seed)
        labels[f"{part}_labels"] = (np.arange(130)[:, None] + seed) % 9
        data_files.sheet(tmp_path / f"pathmnist_sub_{part}.webp", images[part], columns)
    np.savez(tmp_path / "pathmnist_sub_labels.npz", **labels)
    data = load("pathmnist_subset", tmp_path)
    assert (data.x_train.transpose(0, 2, 3, 1) == images["train"]).all()
    assert (data.x_test[130:].transpose(0, 2, 3, 1) == images["test"]).all()
    assert data.y_test[:2].tolist() == [1, 2] and data.classes == 9


def test_jpegs_in_one_file(tmp_path: Path) -> None:
    pictures = [data_files.smooth(64, seed) for seed in range(6)]
    # Two kinds of headers, of different lengths, put back before each image's own bytes.
    whole = [data_files.jpeg(picture if i % 2 else picture[..., 0]) for i, picture in enumerate(pictures)]
    shared = [
        next(i for i, values in enumerate(zip(*whole[kind::2], strict=False)) if len(set(values)) > 1)
        for kind in (0, 1)
    ]
    cuts = [whole[kind][: shared[kind]] for kind in (0, 1)]
    tails = [jpeg[len(cuts[i % 2]) :] for i, jpeg in enumerate(whole)]
    is_val = np.array([0, 1, 0, 0, 1, 0], np.uint8)
    np.savez(
        tmp_path / "tinyimagenet10_jpeg.npz",
        header0=np.frombuffer(cuts[0], np.uint8),
        header1=np.frombuffer(cuts[1], np.uint8),
        header_id=np.arange(6, dtype=np.uint8) % 2,
        payload=np.frombuffer(b"".join(tails), np.uint8),
        offsets=np.cumsum([0, *(len(tail) for tail in tails)]),
        labels=np.arange(6, dtype=np.uint8),
        is_val=is_val,
    )
    data = load("tiny_imagenet10", tmp_path)
    assert data.y_train.tolist() == [0, 2, 3, 5] and data.y_test.tolist() == [1, 4]
    assert np.abs(data.x_train[2].transpose(1, 2, 0).astype(int) - pictures[3]).max() < 12  # JPEG


def test_femnist_digits_by_client(tmp_path: Path) -> None:
    images = data_files.pixels(40, 28, 28)
    labels, clients = np.arange(40) % 2, np.arange(40) // 20
    np.savez(tmp_path / "femnist_digits_subset.npz", images=images, labels=labels, client=clients)
    data = load("femnist_digits", tmp_path, test_fraction=0.2)
    assert np.bincount(data.owners_test * 2 + data.y_test).tolist() == [2, 2, 2, 2]
    assert np.bincount(data.owners_train).tolist() == [16, 16]
    np.savez(tmp_path / "femnist_digits_subset.npz", images=images, labels=labels)
    with refused("incomplete"):
        load("femnist_digits", tmp_path)


# The real ones --------------------------------------------------------------------------------------------

SHARED = Path(os.environ.get("ARCHIPELAGO_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
# (name, training samples, test samples, shape, some class counts of the training part, mean of its pixels)
REAL = [
    ("fashion_mnist", 60_000, 10_000, (1, 28, 28), [6000] * 10),
    ("cifar10", 50_000, 10_000, (3, 32, 32), [5000] * 10),
    ("pathmnist_subset", 14_400, 8_780, (3, 28, 28), [1501, 1502, 1701, 1620, 1275, 1908, 1258, 1522, 2113]),
    ("breastmnist", 546, 234, (1, 28, 28), [147, 399]),
    ("pneumoniamnist", 4_708, 1_148, (1, 28, 28), [1214, 3494]),
    ("femnist_digits", None, None, (1, 28, 28), None),
    ("tiny_imagenet10", 5_000, 500, (3, 64, 64), [500] * 10),
]


@pytest.mark.parametrize(("name", "train", "test", "shape", "counts"), REAL, ids=[case[0] for case in REAL])
def test_real_data(name, train, test, shape, counts, tmp_path: Path) -> None:
    settings = DataSettings(name=name, root=str(SHARED), cache=str(tmp_path))
    if DATASETS.find(name).present(settings) is None:
        pytest.skip(f"{name} is not in {SHARED}: set ARCHIPELAGO_SHARED_DATA to a folder that has it")
    data = load_dataset(settings, seed=0)
    assert data.x_train.shape[1:] == shape and data.x_train.dtype == np.uint8
    if train is not None:
        assert (len(data.x_train), len(data.x_test)) == (train, test)
        assert np.bincount(data.y_train).tolist() == counts
    if name == "cifar10":  # the published channel means and deviations
        levels = np.arange(256) / 255
        shares = [np.bincount(data.x_train[:, c].ravel(), minlength=256) / (50_000 * 1024) for c in range(3)]
        means = [float(share @ levels) for share in shares]
        stds = [float(share @ levels**2 - mean**2) ** 0.5 for share, mean in zip(shares, means, strict=True)]
        assert np.allclose(means, (0.4914, 0.4822, 0.4465), atol=1e-4)
        assert np.allclose(stds, (0.2470, 0.2435, 0.2616), atol=1e-4)
    if name == "femnist_digits":
        whose = np.bincount(np.concatenate([data.owners_train, data.owners_test]))
        assert whose.tolist() == [487, 504, 544, 518, 507, 454, 516, 528, 479, 505, 496, 459]
        labels = np.bincount(np.concatenate([data.y_train, data.y_test]))
        assert labels.tolist() == [593, 702, 591, 607, 621, 565, 615, 559, 560, 584]
