"""MedMNIST's sets in their official layout, through the package's own classes."""

from __future__ import annotations

from pathlib import Path

import medmnist
import numpy as np
import pytest

from archipelago.data import Dataset, load_dataset
from archipelago.data.medical import SETS
from tests.support import data_files
from tests.support.errors import refused
from tests.support.settings import data_settings


def load(name: str, root: Path, **more: object) -> Dataset:
    return load_dataset(data_settings(name=name, root=str(root), **more), seed=0)


def make(name: str, root: Path, monkeypatch: pytest.MonkeyPatch, labels: np.ndarray) -> dict[str, np.ndarray]:
    path = root / f"{name}.npz"
    made = data_files.medmnist(path, colours=medmnist.INFO[name]["n_channels"] == 3, labels=labels)
    monkeypatch.setitem(medmnist.INFO[name], "MD5", data_files.md5(path.read_bytes()))
    return made


def test_every_two_dimensional_set_is_there() -> None:
    assert set(SETS) == {name for name in medmnist.INFO if not name.endswith("3d")}


@pytest.mark.parametrize("name", sorted(set(SETS) - {"chestmnist"}))
def test_train_is_train_and_test_is_validation_and_test(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(name, tmp_path, monkeypatch, np.array([[0], [1], [1]]))
    data = load(name, tmp_path)
    channels = medmnist.INFO[name]["n_channels"]
    assert data.x_train.shape == (3, channels, 28, 28)
    images = made["train_images"] if channels == 3 else made["train_images"][..., None]
    assert (data.x_train.transpose(0, 2, 3, 1) == images).all()
    assert data.y_test.tolist() == [0, 1, 1, 0, 1, 1]
    assert (data.x_test[3, 0] == made["test_images"][0].reshape(28, 28, -1)[..., 0]).all()
    assert data.classes == len(medmnist.INFO[name]["label"])


def test_chest_is_one_finding_or_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = np.zeros((3, 14), int)
    answers[1, 2] = answers[2, 0] = 1  # effusion, atelectasis
    make("chestmnist", tmp_path, monkeypatch, answers)
    assert load("chestmnist", tmp_path).y_train.tolist() == [0, 1, 1]
    assert load("chestmnist", tmp_path, attribute="effusion").y_train.tolist() == [0, 1, 0]
    with refused("unknown-choice", setting="data.attribute", given="efusion", nearest="effusion"):
        load("chestmnist", tmp_path, attribute="efusion")


def test_missing_and_changed_files(tmp_path: Path) -> None:
    with refused("no-data", name="breastmnist", says="breastmnist.npz"):
        load("breastmnist", tmp_path)
    data_files.medmnist(tmp_path / "breastmnist.npz", colours=False, labels=np.array([[0], [1]]))
    with refused("damaged", name="breastmnist", says=("breastmnist.npz", "750601b1f35ba3300ea97c75c52ff8f6")):
        load("breastmnist", tmp_path)
