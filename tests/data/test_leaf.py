"""FEMNIST from JSON as LEAF writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from archipelago.core.settings import DataSettings
from archipelago.data import Dataset, load_dataset
from tests.support import data_files
from tests.support.errors import refused


def load(root: Path, **more: object) -> Dataset:
    return load_dataset(DataSettings(name="femnist", root=str(root), **more), seed=0)


def test_leafs_own_split_by_sample_is_kept_and_writers_are_owners(tmp_path: Path) -> None:
    train = data_files.leaf(tmp_path / "femnist" / "train", {"f0001_41": 4, "f0002_13": 3})
    more = data_files.leaf(tmp_path / "femnist" / "train", {"f0003_07": 2}, first=5)
    test = data_files.leaf(
        tmp_path / "femnist" / "test", {"f0002_13": 1, "f0001_41": 2, "f0003_07": 1}, first=9
    )
    data = load(tmp_path)
    expected = np.concatenate([train["f0001_41"], train["f0002_13"], more["f0003_07"]])
    assert (data.x_train[:, 0] == expected).all()  # grey levels survive the way through [0, 1]
    assert (data.x_test[:, 0] == np.concatenate(list(test.values()))).all()
    assert data.owners_train.tolist() == [0] * 4 + [1] * 3 + [2] * 2
    assert data.owners_test.tolist() == [1, 0, 0, 2]
    assert data.y_train.tolist() == [0, 1, 2, 3, 1, 2, 3, 5, 6]
    assert data.classes == 62


def test_writers_put_aside_whole_are_split_one_by_one(tmp_path: Path) -> None:
    data_files.leaf(tmp_path / "femnist" / "data" / "train", {"a": 10, "b": 5})
    data_files.leaf(tmp_path / "femnist" / "data" / "test", {"c": 5}, first=3)
    data = load(tmp_path, test_fraction=0.2)
    assert np.bincount(data.owners_train).tolist() == [8, 4, 4]
    assert np.bincount(data.owners_test).tolist() == [2, 1, 1]
    other = load(tmp_path, test_fraction=0.4)  # the stored copy of another fraction is not taken for it
    assert np.bincount(other.owners_test).tolist() == [4, 2, 2]


def test_unsplit_data_is_found_too(tmp_path: Path) -> None:
    data_files.leaf(tmp_path / "femnist" / "all_data", {"a": 5, "b": 5})
    assert np.bincount(load(tmp_path).owners_test).tolist() == [1, 1]


def test_damage_and_absence_are_sentences(tmp_path: Path) -> None:
    with refused("no-data", name="femnist") as caught:
        load(tmp_path)
    assert all(each in str(caught.value) for each in ("LEAF", "preprocess.sh", "data=digits"))
    data_files.leaf(tmp_path / "femnist" / "train", {"a": 2})
    data_files.leaf(tmp_path / "femnist" / "test", {"a": 1})
    (path,) = (tmp_path / "femnist" / "train").glob("*.json")
    whole = path.read_text()
    for content in (whole[: len(whole) // 2], whole.replace('"y": [0, 1]', '"y": [0]'), '{"users": ["a"]}'):
        assert content != whole
        path.write_text(content)
        with refused("damaged", path=path, says=data_files.md5(content.encode())):
            load(tmp_path)
    assert not [*(tmp_path / "mapped").iterdir()]
