"""A user's own arrays and LightningDataModules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipelago.data import DATASETS, Dataset, load_dataset, use_arrays
from archipelago.data.catalogue import listing
from tests.support import data_files
from tests.support.errors import Mistake, mistake, refused
from tests.support.settings import data_settings

X, Y = data_files.pixels(20, 6, 6, 3), np.arange(20) % 2


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    DATASETS.remove("mine")


class TestArrays:
    def test_two_pairs(self) -> None:
        use_arrays("mine", (X, Y), (X[:4], Y[:4]))
        data = load_dataset(data_settings(name="mine"), seed=0)
        assert data.x_train.shape == (20, 3, 6, 6) and data.y_test.tolist() == [0, 1, 0, 1]
        use_arrays("mine", (X[:6], Y[:6]), (X[:4], Y[:4]))  # again: replaces
        assert len(load_dataset(data_settings(name="mine"), seed=0).x_train) == 6

    def test_one_pair_is_split_by_class_or_by_owner(self) -> None:
        use_arrays("mine", (X, Y))
        data = load_dataset(data_settings(name="mine", test_fraction=0.2), seed=0)
        assert np.bincount(data.y_test).tolist() == [2, 2]
        owners = np.repeat(["ann", "bob"], [15, 5])
        use_arrays("mine", (X, Y), owners=owners)
        data = load_dataset(data_settings(name="mine", test_fraction=0.2), seed=0)
        assert np.bincount(data.owners_train).tolist() == [12, 4] and np.bincount(
            data.owners_test
        ).tolist() == [3, 1]

    def test_owners_of_both_parts_share_their_numbers(self) -> None:
        use_arrays("mine", (X[:3], Y[:3]), (X[:2], Y[:2]), owners=(["b", "a", "b"], ["c", "a"]))
        data = load_dataset(data_settings(name="mine"), seed=0)
        assert data.owners_train.tolist() == [1, 0, 1] and data.owners_test.tolist() == [2, 0]

    def test_owners_may_be_any_numbers_and_labels_a_column(self) -> None:
        use_arrays("mine", (X, Y[:, None]), owners=np.repeat([0.5, 1.5], 10))
        data = load_dataset(data_settings(name="mine", test_fraction=0.2), seed=0)
        assert np.bincount(data.owners_train).tolist() == [8, 8]
        use_arrays("mine", (X, Y[:, None]))
        data = load_dataset(data_settings(name="mine", test_fraction=0.2), seed=0)
        assert np.bincount(data.y_test).tolist() == [2, 2]  # by class
        use_arrays("mine", (X, Y + 0.5), owners=np.repeat([0, 1], 10))
        data = load_dataset(data_settings(name="mine", test_fraction=0.2), seed=0)
        assert data.classes is None and np.bincount(data.owners_test).tolist() == [2, 2]

    def test_class_labels_saved_as_floats_must_be_called_classes_or_numbers(self) -> None:
        use_arrays("mine", (X, Y.astype(np.float64)))
        with refused("ambiguous-labels", says=("float64", "data.targets=classes", "data.targets=numbers")):
            load_dataset(data_settings(name="mine"), seed=0)
        classes = load_dataset(data_settings(name="mine", targets="classes"), seed=0)
        assert classes.classes == Y.max() + 1 and classes.y_train.dtype == np.int64
        whole = load_dataset(data_settings(name="mine", targets="numbers"), seed=0)
        assert whole.classes is None and whole.y_train.dtype == np.float32
        use_arrays("mine", (X, Y))
        assert load_dataset(data_settings(name="mine", targets="numbers"), seed=0).classes is None

    def test_numbers_that_happen_to_be_whole_in_one_part_are_numbers(self) -> None:
        use_arrays("mine", (X, Y + 0.5), (X[:4], Y[:4].astype(np.float64)))
        assert load_dataset(data_settings(name="mine"), seed=0).classes is None
        with refused("wrong-labels", given=0.5):
            load_dataset(data_settings(name="mine", targets="classes"), seed=0)

    @pytest.mark.parametrize(
        ("name", "arguments", "owners", "sentence"),
        [
            ("digits", [(X, Y)], None, mistake("name-taken", name="digits")),
            ("my/own", [(X, Y)], None, mistake("wrong-name", name="my/own")),
            ("mine", [X], None, mistake("wrong-type", setting="train", given="ndarray")),
            ("mine", [(X, Y), X], None, mistake("wrong-type", setting="test")),
            ("mine", [(X, Y[:5])], None, mistake("unequal-lengths", says=("20", "int64"))),
            ("mine", [(X, Y.astype(str))], None, mistake("wrong-dtype")),
            ("mine", [(X, Y)], Y[:8], mistake("wrong-owners", says=("20", "int64"))),
            ("mine", [(X, Y)], np.arange(30), mistake("wrong-owners", says=("20", "int64", "30"))),
            ("mine", [(X, Y)], (Y, Y), mistake("wrong-owners", says=("20", "int64"))),
            ("mine", [(X, Y), (X[:4], Y[:4])], Y, mistake("wrong-owners", says=("20", "int64"))),
            ("mine", [(X, Y), (X[:4], Y[:4])], (Y, Y), mistake("wrong-owners", says="20")),
        ],
    )  # fmt: skip
    def test_mistakes(self, name: str, arguments: list[Any], owners: Any, sentence: Mistake) -> None:
        with sentence():
            use_arrays(name, *arguments, owners=owners)

    def test_other_processes_find_them_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ARCHIPELAGO_CACHE", str(tmp_path))
        owners = np.repeat(["ann", "bob"], [15, 5])
        for given in ({}, {"test": (X[:4], Y[:4])}, {"owners": owners}):
            use_arrays("mine", (X, Y), **given)
            here = load_dataset(data_settings(name="mine"), seed=0)
            DATASETS.remove("mine")  # as in another process
            there = load_dataset(data_settings(name="mine"), seed=0)
            for field in ("x_train", "y_train", "x_test", "y_test", "owners_train", "owners_test"):
                one, other = getattr(here, field), getattr(there, field)
                assert (one is None) == (other is None) and (one is None or (one == other).all())
        DATASETS.remove("mine")
        assert "mine" in [row[0] for row in listing(data_settings(root=str(tmp_path)))]
        (kept,) = (tmp_path / "arrays").iterdir()
        kept.write_bytes(kept.read_bytes()[:99])
        with refused("unreadable", name="mine", says="use_arrays"):
            load_dataset(data_settings(name="mine"), seed=0)
        use_arrays("mine", (X, Y))  # mends it
        DATASETS.remove("mine")
        assert len(load_dataset(data_settings(name="mine"), seed=0).x_train) == 16

    def test_arrays_of_a_process_that_lives_are_not_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ARCHIPELAGO_CACHE", str(tmp_path))
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("os.getpid", lambda: os.getppid())
            use_arrays("mine", (X, Y))
        use_arrays("mine", (X, Y))  # the same ones: nothing to be lost
        with refused("name-taken", name="mine", says=f"{os.getppid()}"):
            use_arrays("mine", (X[::-1], Y))
        monkeypatch.setattr("psutil.Process.create_time", lambda process: 0.0)  # another one with its number
        use_arrays("mine", (X[::-1], Y))

    def test_folder_that_cannot_be_written_is_done_without(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("ARCHIPELAGO_CACHE", str(tmp_path / "file"))
        use_arrays("mine", (X, Y))
        assert len(load_dataset(data_settings(name="mine"), seed=0).x_train) == 16

    def test_experiment_on_arrays(self, tmp_path: Path) -> None:
        import archipelago
        from archipelago.experiments.config import load_config
        from archipelago.experiments.runner import run_experiment

        use_arrays("mine", (X, Y))
        config = load_config(None, [
            "method=fedavg", "data=mine", "clients=2", "rounds=1", "model=linear", "fleet.backend=in_process",
            f"storage={tmp_path}", "local.steps=1",
        ])  # fmt: skip
        assert archipelago.open_run(run_experiment(config, quiet=True)).status.state == "finished"


class TestDataModule:
    def load(self, name: str, **more: object) -> Dataset:
        target = f"tests.support.datamodules.{name}"
        return load_dataset(data_settings(name="datamodule", target=target, **more), seed=3)

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

    def test_root_is_a_path(self) -> None:
        assert len(self.load("Owned", root="~/data").x_train) == 4

    def test_what_it_draws_comes_from_the_seed(self) -> None:
        torch.manual_seed(1)
        first = self.load("Drawn")
        torch.manual_seed(2)
        assert (first.x_train == self.load("Drawn").x_train).all()

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            (
                "Nothing",
                mistake("incomplete", name="tests.support.datamodules.Nothing", says="train_dataloader"),
            ),
            ("Streamed", mistake("wrong-result", name="train_dataloader")),
            ("Ragged", mistake("unequal-shapes", name="tests.support.datamodules.Ragged")),
            ("Single", mistake("wrong-result", name="train_dataloader")),
            (
                "NoModule",
                mistake("wrong-kind", kind="LightningDataModule", name="tests.support.datamodules.NoModule"),
            ),
            ("Needy", mistake("needs-arguments", name="tests.support.datamodules.Needy")),
            (
                "Absent",
                mistake(
                    "not-importable", name="tests.support.datamodules.Absent", says="package.module.Class"
                ),
            ),
        ],
    )
    def test_mistakes(self, name: str, sentence: Mistake) -> None:
        with sentence():
            self.load(name)

    def test_no_target(self) -> None:
        with refused("missing-value", setting="data.target", says="data.target="):
            load_dataset(data_settings(name="datamodule"), seed=0)
