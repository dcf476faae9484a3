"""A user's own arrays and LightningDataModules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from federated_data import DATASETS, Dataset, load_dataset, use_arrays
from foundation.errors import UserError
from foundation.settings import DataSettings
from tests.support import data_files

X, Y = data_files.pixels(20, 6, 6, 3), np.arange(20) % 2


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    DATASETS.remove("mine")


class TestArrays:
    def test_two_pairs(self) -> None:
        use_arrays("mine", (X, Y), (X[:4], Y[:4]))
        data = load_dataset(DataSettings(name="mine"), seed=0)
        assert data.x_train.shape == (20, 3, 6, 6) and data.y_test.tolist() == [0, 1, 0, 1]
        use_arrays("mine", (X[:6], Y[:6]), (X[:4], Y[:4]))  # again: replaces
        assert len(load_dataset(DataSettings(name="mine"), seed=0).x_train) == 6

    def test_one_pair_is_split_by_class_or_by_owner(self) -> None:
        use_arrays("mine", (X, Y))
        data = load_dataset(DataSettings(name="mine", test_fraction=0.2), seed=0)
        assert np.bincount(data.y_test).tolist() == [2, 2]
        owners = np.repeat(["ann", "bob"], [15, 5])
        use_arrays("mine", (X, Y), owners=owners)
        data = load_dataset(DataSettings(name="mine", test_fraction=0.2), seed=0)
        assert np.bincount(data.owners_train).tolist() == [12, 4] and np.bincount(
            data.owners_test
        ).tolist() == [3, 1]

    def test_owners_of_both_parts_share_their_numbers(self) -> None:
        use_arrays("mine", (X[:3], Y[:3]), (X[:2], Y[:2]), owners=(["b", "a", "b"], ["c", "a"]))
        data = load_dataset(DataSettings(name="mine"), seed=0)
        assert data.owners_train.tolist() == [1, 0, 1] and data.owners_test.tolist() == [2, 0]

    def test_mistakes(self) -> None:
        with pytest.raises(UserError, match="got 'digits': it is a data set already"):
            use_arrays("digits", (X, Y))
        use_arrays("mine", (X, Y[:5]))
        with pytest.raises(UserError, match="one label for each of 20 samples"):
            load_dataset(DataSettings(name="mine"), seed=0)

    def test_an_experiment_on_arrays(self, tmp_path: Path) -> None:
        import experiments
        from experiments.config import load_config
        from experiments.runner import run_experiment

        use_arrays("mine", (X, Y))
        config = load_config(None, [
            "method=fedavg", "data=mine", "clients=2", "rounds=1", "model=linear", "fleet.backend=in_process",
            f"storage={tmp_path}", "local.steps=1",
        ])  # fmt: skip
        assert experiments.open_run(run_experiment(config, quiet=True)).status.state == "finished"


class TestDataModule:
    def load(self, name: str, **more: object) -> Dataset:
        target = f"tests.support.datamodules.{name}"
        return load_dataset(DataSettings(name="datamodule", target=target, **more), seed=3)

    def test_every_sample_once_in_order(self) -> None:
        data = self.load("Pixels")
        assert data.name == "Pixels" and data.classes == 2
        assert (data.x_train[:, 0] == np.arange(12)[:, None, None]).all() and data.x_train.dtype == np.float32
        assert data.y_train.tolist() == [0, 1] * 6 and len(data.x_test) == 4
        assert (data.mean, data.std) == ((0.0,), (1.0,))  # numbers that are ready to use

    def test_owners_validation_and_root(self) -> None:
        data = self.load("Owned", root="somewhere")
        assert data.owners_train.tolist() == [0, 0, 1, 1] and data.owners_test.tolist() == [1, 2]
        assert data.x_train.dtype == np.uint8 and (data.mean, data.std) == ((0.5,), (0.5,))

    def test_what_it_draws_comes_from_the_seed(self) -> None:
        torch.manual_seed(1)
        first = self.load("Drawn")
        torch.manual_seed(2)
        assert (first.x_train == self.load("Drawn").x_train).all()

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("Nothing", "to have train_dataloader, got neither"),
            ("Streamed", "over a data set with a length"),
            ("Ragged", "samples must have one shape"),
            ("Single", r"Expected samples \(x, y\) or \(x, y, owner\)"),
            ("NoModule", "which is not one"),
            ("Absent", r"package\.module\.Class"),
        ],
    )
    def test_mistakes(self, name: str, sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            self.load(name)

    def test_no_target(self) -> None:
        with pytest.raises(UserError, match=r"got nothing: write it as data\.target="):
            load_dataset(DataSettings(name="datamodule"), seed=0)
