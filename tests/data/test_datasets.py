from __future__ import annotations

import dataclasses
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.core.errors import UserError
from archipelago.data import DATASETS, Dataset, load_dataset, normalised
from archipelago.data.embedded import ground_truth_weights
from tests.support.errors import Mistake, mistake, refused
from tests.support.settings import data_settings


def arrays(**changes: Any) -> dict[str, Any]:
    """Four 6x6 colour images per part, with two classes, in the layout of a user's own file."""
    pixels = np.arange(4 * 6 * 6 * 3).reshape(4, 6, 6, 3).astype(np.uint8)
    return {
        "x_train": pixels,
        "y_train": np.array([0, 1, 0, 1]),
        "x_test": pixels[::-1],
        "y_test": np.array([1, 0, 1, 0]),
        **changes,
    }


def load_npz(folder: Path, **content: Any) -> Dataset:
    np.savez(folder / "mine.npz", **content)
    return load_dataset(data_settings(name="npz", root=str(folder)), seed=0)


class TestDigits:
    def test_holds_every_image_once_and_every_class_in_proportion(self) -> None:
        data = load_dataset(data_settings(), seed=0)
        assert (data.x_train.shape, data.x_test.shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
        assert data.x_train.dtype == np.uint8
        together = np.concatenate([data.x_train, data.x_test]).reshape(1797, -1)
        from sklearn.datasets import load_digits

        original = np.rint(load_digits().data * 255 / 16)
        assert sorted(map(bytes, together)) == sorted(map(bytes, original.astype(np.uint8)))
        per_class = np.bincount(np.concatenate([data.y_train, data.y_test]))
        assert (np.abs(np.bincount(data.y_test) - 0.2 * per_class) < 1).all()

    def test_split_is_the_same_for_every_seed_and_follows_the_fraction(self) -> None:
        first, second = (load_dataset(data_settings(), seed=seed) for seed in (0, 1))
        assert first.x_test.tobytes() == second.x_test.tobytes()
        assert len(load_dataset(data_settings(test_fraction=0.5), seed=0).x_test) == pytest.approx(
            1797 / 2, abs=1
        )

    def test_every_class_is_tested_however_small_the_fraction(self) -> None:
        data = load_dataset(data_settings(test_fraction=1e-6), seed=0)
        assert np.bincount(data.y_test).tolist() == [1] * 10


class TestSynthetic:
    settings = data_settings(name="synthetic", samples=2000, sources=3, dimension=5, noise=0.1)

    def test_least_squares_recovers_the_ground_truth_weights_of_each_source(self) -> None:
        data = load_dataset(self.settings, seed=4)
        weights = ground_truth_weights(self.settings, seed=4)
        assert data.classes is None
        assert data.x_train.dtype == data.y_train.dtype == np.float32
        for x, y, sources in (
            (data.x_train, data.y_train, data.sources_train),
            (data.x_test, data.y_test, data.sources_test),
        ):
            for source in range(3):
                mine = sources == source
                found, residual, *_ = np.linalg.lstsq(x[mine], y[mine], rcond=None)
                assert np.abs(found - weights[source]).max() < 0.05
                assert residual[0] / mine.sum() == pytest.approx(0.01, rel=0.4)

    def test_weight_scale_is_a_standard_deviation(self) -> None:
        settings = data_settings(name="synthetic", sources=200, dimension=50, weight_scale=10.0)
        assert ground_truth_weights(settings, seed=0).std() == pytest.approx(10, rel=0.03)

    def test_common_part_is_the_same_for_all_ground_truth_models_and_changes_nothing_else(self) -> None:
        settings = data_settings(name="synthetic", sources=3, dimension=200)
        common = dataclasses.replace(settings, common_scale=5.0)
        more = ground_truth_weights(common, seed=0) - ground_truth_weights(settings, seed=0)
        assert np.allclose(more, more[0]) and more[0].std() == pytest.approx(5, rel=0.2)
        ours, theirs = load_dataset(common, seed=0), load_dataset(settings, seed=0)
        assert np.array_equal(ours.x_train, theirs.x_train)
        assert np.allclose(ours.y_train - theirs.y_train, ours.x_train @ more[0], atol=1e-3)

    def test_sources_share_the_samples_evenly_and_another_seed_is_another_problem(self) -> None:
        data = load_dataset(self.settings, seed=0)
        counts = np.bincount(np.concatenate([data.sources_train, data.sources_test]))
        assert counts.max() - counts.min() <= 1
        assert np.bincount(data.sources_test).tolist() == pytest.approx([133, 133, 133], abs=1)
        assert not np.allclose(ground_truth_weights(self.settings, 0), ground_truth_weights(self.settings, 1))

    def test_too_few_samples_for_the_sources(self) -> None:
        with refused("too-few-samples", setting="data.samples", samples=5, says="data.samples=5"):
            load_dataset(data_settings(name="synthetic", samples=5, sources=3), seed=0)


class TestNpz:
    def test_channels_last_becomes_channels_first(self, tmp_path: Path) -> None:
        data = load_npz(tmp_path, **arrays())
        assert data.name == "mine"
        assert data.x_train.shape == (4, 3, 6, 6)
        assert data.classes == 2
        assert (data.x_train[1, 2] == arrays()["x_train"][1, :, :, 2]).all()
        assert (data.mean, data.std) == ((0.5,) * 3, (0.5,) * 3)

    def test_channels_first_stays(self, tmp_path: Path) -> None:
        pixels = arrays()["x_train"].transpose(0, 3, 1, 2)
        data = load_npz(tmp_path, **arrays(x_train=pixels, x_test=pixels))
        assert (data.x_train == pixels).all()

    def test_medmnist_file_with_validation_part(self, tmp_path: Path) -> None:
        grey = np.arange(4 * 6 * 6).reshape(4, 6, 6).astype(np.uint8)
        data = load_npz(
            tmp_path,
            train_images=grey,
            train_labels=np.array([[0], [2], [1], [0]], dtype=np.uint8),
            val_images=grey[:1] + 100,
            val_labels=np.array([[2]], dtype=np.uint8),
            test_images=grey[:2],
            test_labels=np.array([[1], [0]], dtype=np.uint8),
        )
        assert data.x_train.shape == (4, 1, 6, 6)
        assert (data.x_test[:, 0] == np.concatenate([grey[:1] + 100, grey[:2]])).all()
        assert data.y_test.tolist() == [2, 1, 0]
        assert data.classes == 3

    def test_numbers_are_used_as_they_are_and_real_labels_make_a_regression(self, tmp_path: Path) -> None:
        x, y = np.random.default_rng(0).normal(size=(4, 7)), np.array([0.5, 1.5, -1.0, 2.0])
        data = load_npz(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y)
        assert data.classes is None
        assert np.allclose(normalised(data.x_train, data.mean, data.std), x)

    def test_file_itself_may_be_the_root(self, tmp_path: Path) -> None:
        load_npz(tmp_path, **arrays())
        np.savez(tmp_path / "other.npz", **arrays())
        settings = data_settings(name="npz", root=str(tmp_path / "mine.npz"))
        assert load_dataset(settings, seed=0).name == "mine"
        assert DATASETS.find("npz").present(settings) == str(tmp_path / "mine.npz")

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"y_train": np.array([0, 1])}, mistake("unequal-lengths")),
            ({"y_train": np.array([0, 1, -1, 1])}, mistake("wrong-labels", low=-1, high=1, says="-1..1")),
            (
                {"y_train": np.array([0, 1, 10**6, 1])},
                mistake("wrong-labels", low=0, high=1000000, says="0..1000000"),
            ),
            ({"y_train": np.array(["a", "b", "a", "b"])}, mistake("wrong-labels")),
            ({"y_train": np.zeros((4, 3), dtype=int)}, mistake("wrong-labels")),
            ({"y_train": np.array([0.5, np.nan, 1, 1])}, mistake("not-finite", what="labels")),
            ({"x_train": np.full((4, 6, 6, 3), np.inf)}, mistake("not-finite", what="samples")),
            ({"x_train": np.full((4, 6, 6, 3), 1e300)}, mistake("not-finite", what="samples")),
            ({"x_train": np.full((4, 6, 6, 3), "x")}, mistake("wrong-dtype")),
            (
                {"x_train": np.zeros((4, 6, 6, 6, 3), dtype=np.uint8)},
                mistake("wrong-shape", given="uint8 of shape (4, 6, 6, 6, 3)"),
            ),
            ({"x_train": np.zeros((4, 5, 5, 3), dtype=np.uint8)}, mistake("unequal-shapes", name="mine")),
            (
                {"x_train": np.zeros((0, 6, 6, 3), dtype=np.uint8), "y_train": np.zeros(0, dtype=int)},
                mistake("no-samples"),
            ),
        ],
    )
    def test_wrong_content_is_a_sentence(
        self, tmp_path: Path, changes: dict[str, Any], sentence: Mistake
    ) -> None:
        with sentence():
            load_npz(tmp_path, **arrays(**changes))

    def test_validation_part_of_another_shape(self, tmp_path: Path) -> None:
        extra = {"val_images": np.zeros((2, 5, 5), dtype=np.uint8), "val_labels": np.array([0, 1])}
        with refused("unequal-shapes"):
            load_npz(tmp_path, **arrays(**extra))

    def test_missing_arrays_are_named(self, tmp_path: Path) -> None:
        with refused("wrong-file", says=("x_train", "y_train", "mine.npz")):
            load_npz(tmp_path, images=np.zeros(3), labels=np.zeros(3))
        with refused("wrong-file"):
            load_npz(tmp_path)

    @pytest.mark.parametrize(
        ("files", "sentence"),
        [
            (None, mistake("wrong-file", says=("data.root=", "data=digits"))),
            ([], mistake("wrong-file", says="data=digits")),
            (["notes.txt"], mistake("wrong-file", says="notes.txt")),
            (["a.npz", "b.npz"], mistake("ambiguous", setting="data.root", says=("a.npz", "b.npz"))),
            (["a.npz"], mistake("damaged", says=("a.npz", "MD5"))),
        ],
    )
    def test_missing_empty_or_wrong_folder(
        self, tmp_path: Path, files: list[str] | None, sentence: Mistake
    ) -> None:
        root = tmp_path / "data"
        if files is not None:
            root.mkdir()
            for name in files:
                (root / name).write_text("not an archive")
        settings = data_settings(name="npz", root=str(root))
        with sentence():
            load_dataset(settings, seed=0)
        assert (DATASETS.find("npz").present(settings) is None) == (files != ["a.npz"])

    def test_single_array_is_not_an_archive(self, tmp_path: Path) -> None:
        with (tmp_path / "one.npz").open("wb") as file:
            np.save(file, np.zeros(3))
        with refused("damaged"):
            load_dataset(data_settings(name="npz", root=str(tmp_path)), seed=0)

    def test_damaged_file_is_a_sentence_wherever_the_damage_is(self, tmp_path: Path) -> None:
        load_npz(tmp_path, **arrays())
        path = tmp_path / "mine.npz"
        whole = path.read_bytes()
        settings = data_settings(name="npz", root=str(path))
        refused = 0
        for position in range(0, len(whole), len(whole) // 150):
            flipped = bytearray(whole)
            flipped[position] ^= 0xFF
            for damaged in (whole[:position], bytes(flipped)):
                path.write_bytes(damaged)
                try:
                    load_dataset(settings, seed=0)  # a flipped time stamp harms nobody
                except UserError as error:
                    assert str(path) in str(error)
                    refused += 1
        assert refused > 200

    def test_archive_larger_than_memory_is_refused_by_its_headers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        zeros = np.zeros((1_000_000, 64), np.uint8)  # 64 MB of samples in a file of 64 KB
        np.savez_compressed(
            tmp_path / "mine.npz", **arrays(x_train=zeros, y_train=np.zeros(len(zeros), np.uint8))
        )
        monkeypatch.setattr("archipelago.data.npz.available", lambda: 50_000_000)
        settings = data_settings(name="npz", root=str(tmp_path))
        tracemalloc.start()
        try:
            with refused("too-large", says=("65", "50")):
                load_dataset(settings, seed=0)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()
        path = tmp_path / "mine.npz"  # one that claims more than it holds, whatever the memory
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%s, 1000000), }"
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                text = (header % b"50000").ljust(117) + b"\n"
                archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        with refused("damaged", says=("x_test", "50,000,000,000")):
            load_dataset(settings, seed=0)

    def test_loading_never_runs_code(self, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.mkdir, (str(tmp_path / "sprung"),)

        trap = np.array([Trap()] * 4, dtype=object)
        for content in (arrays(y_train=trap), arrays(x_test=trap)):
            np.savez(tmp_path / "mine.npz", allow_pickle=True, **content)
            with refused("damaged"):
                load_dataset(data_settings(name="npz", root=str(tmp_path)), seed=0)
        (tmp_path / "mine.npz").write_bytes(trap.dumps())
        with refused("damaged"):
            load_dataset(data_settings(name="npz", root=str(tmp_path)), seed=0)
        assert not (tmp_path / "sprung").exists()


class TestRegistry:
    def test_unknown_name_points_at_the_nearest(self) -> None:
        with refused("unknown-name", kind="data set", name="digit", nearest="digits"):
            load_dataset(data_settings(name="digit"), seed=0)

    def test_every_entry_says_what_it_is_and_where(self) -> None:
        assert {"digits", "synthetic", "npz"} <= set(DATASETS)
        for name in ("digits", "synthetic"):
            assert "embedded" in (DATASETS.find(name).present(data_settings()) or "")
        assert all(entry.about for entry in DATASETS.values())


class TestDataset:
    good: dict[str, Any] = {  # noqa: RUF012
        "name": "mine",
        "x_train": np.zeros((2, 1, 4, 4), dtype=np.uint8),
        "y_train": np.array([0, 1]),
        "x_test": np.zeros((2, 1, 4, 4), dtype=np.uint8),
        "y_test": np.array([0, 1]),
        "classes": 2,
        "mean": (0.5,),
        "std": (0.5,),
    }

    def test_good_one_is_good(self) -> None:
        Dataset(**self.good)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            (
                {"x_train": np.zeros((2, 4, 4), dtype=np.uint8)},
                mistake("wrong-shape", given="uint8 of shape (2, 4, 4)"),
            ),
            (
                {"x_test": np.zeros((2, 1, 4, 4))},
                mistake("wrong-shape", given="float64 of shape (2, 1, 4, 4)"),
            ),
            ({"y_test": np.array([0, 2])}, mistake("wrong-labels", says=("0..1", "0..2"))),
            ({"classes": None}, mistake("wrong-dtype", says=("float32", "int64"))),
            ({"mean": (0.5, 0.5)}, mistake("unequal-lengths", name="mine", channels=1)),
            ({"sources_train": np.zeros(3, dtype=int)}, mistake("unequal-lengths")),
            ({"sources_train": np.zeros(2, dtype=int)}, mistake("incomplete", lacks="sources")),
            ({"owners_train": np.zeros(3, dtype=int)}, mistake("unequal-lengths")),
            ({"owners_test": np.zeros(2, dtype=int)}, mistake("incomplete", lacks="owners")),
            ({"x_test": np.zeros((2, 1, 4, 4), dtype=np.float32)}, mistake("unequal-shapes", name="mine")),
        ],
    )
    def test_whatever_does_not_fit_is_refused(self, changes: dict[str, Any], sentence: Mistake) -> None:
        with sentence():
            Dataset(**{**self.good, **changes})


def test_normalised_by_hand_and_per_channel() -> None:
    x = np.array([[[[0, 255]], [[51, 102]]]], dtype=np.uint8)  # one image, two channels, 1x2
    result = normalised(x, (0.5, 0.2), (0.5, 0.1))
    assert result.dtype == np.float32
    assert np.allclose(result, [[[[-1, 1]], [[0, 2]]]], atol=1e-6)
    assert np.allclose(normalised(np.array([[3.0, 5.0]], dtype=np.float32), (1.0,), (2.0,)), [[1, 2]])
