"""Tiny files in the real formats, through torchvision's real loaders, with their checksums checked."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.core.errors import UserError
from archipelago.core.settings import DataSettings
from archipelago.data import Dataset, load_dataset, torchvision_sets
from tests.support import data_files
from tests.support.errors import refused


def load(name: str, root: Path, **more: Any) -> Dataset:
    return load_dataset(DataSettings(name=name, root=str(root), **more), seed=0)


class TestFashionMnist:
    @pytest.fixture(autouse=True)
    def no_debian_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torchvision_sets, "DEBIAN", tmp_path / "debian")

    @pytest.mark.parametrize(
        ("place", "packed"), [("FashionMNIST/raw", False), ("fashion-mnist", True), ("../debian", True)]
    )
    def test_found_in_torchvisions_layout_and_in_debians(
        self, place: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "root"
        root.mkdir()
        made = data_files.fashion_mnist(root / place, packed=packed)
        monkeypatch.setattr(torchvision_sets, "FASHION_FILES", made["md5"])
        data = load("fashion_mnist", root)
        assert (data.x_train[:, 0] == made["arrays"]["train-images-idx3-ubyte"]).all()
        assert (data.x_test[:, 0] == made["arrays"]["t10k-images-idx3-ubyte"]).all()
        assert data.y_train.tolist() == [*range(10)] * 2 and data.y_test.tolist() == [*range(10)]
        assert (data.classes, data.mean, data.std) == (10, (0.5,), (0.5,))

    def test_content_that_is_not_the_published_one_names_file_and_checksum(self, tmp_path: Path) -> None:
        made = data_files.fashion_mnist(tmp_path / "fashion-mnist", packed=True)
        found = made["md5"]["train-images-idx3-ubyte"]
        with refused("damaged", says=("train-images-idx3-ubyte.gz", found, "f4a871")):
            load("fashion_mnist", tmp_path)

    def test_truncated_file_is_named_with_its_checksum(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = data_files.fashion_mnist(tmp_path / "fashion-mnist", packed=True)
        monkeypatch.setattr(torchvision_sets, "FASHION_FILES", made["md5"])
        path = tmp_path / "fashion-mnist" / "t10k-images-idx3-ubyte.gz"
        half = path.read_bytes()[:3000]
        path.write_bytes(half)
        with refused("damaged", path=path, says=data_files.md5(half)):
            load("fashion_mnist", tmp_path)

    def test_missing_says_where_it_looked_how_to_get_it_and_what_serves_meanwhile(
        self, tmp_path: Path
    ) -> None:
        with refused("no-data", name="fashion_mnist") as refusal:
            load("fashion_mnist", tmp_path)
        for said in (
            *(str(tmp_path / "FashionMNIST" / "raw"), "data fetch fashion_mnist", f"data.root={tmp_path}"),
            *("http://", "dataset-fashion-mnist", "data=digits needs no files"),
        ):
            assert said in str(refusal.value)


class TestWhatToDoAboutDamage:
    """The advice brings the data set to where it is looked for, or says that only its owner can."""

    def sentence(self, name: str, root: Path) -> str:
        with refused("damaged") as refusal:
            load(name, root)
        assert isinstance(pickle.loads(pickle.dumps(refusal.value)), UserError)
        return str(refusal.value)

    def test_what_can_be_fetched(self, tmp_path: Path) -> None:
        root = tmp_path / "my data"
        data_files.emnist(root / "EMNIST" / "raw", "letters", [1, 2])
        (root / "EMNIST" / "raw" / "emnist-letters-test-images-idx3-ubyte").write_bytes(b"")
        command = f"`archipelago data fetch emnist_letters data.root='{root}'`"
        said = self.sentence("emnist_letters", root)
        assert said.endswith(f"delete {root / 'EMNIST'} and get it again with {command}.")

    def test_what_cannot(self, tmp_path: Path) -> None:
        data_files.leaf(tmp_path / "femnist" / "all_data", {"ann": 2})
        (path,) = (tmp_path / "femnist" / "all_data").iterdir()
        path.write_text("{")
        said = self.sentence("femnist", tmp_path)
        assert said.endswith("bring it again, whole.") and "fetch" not in said

    def test_what_belongs_to_a_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data_files.fashion_mnist(tmp_path / "debian", packed=True)
        monkeypatch.setattr(torchvision_sets, "DEBIAN", tmp_path / "debian")
        said = self.sentence("fashion_mnist", tmp_path / "root")
        assert (
            said.endswith("(a file of a Debian package: install the package again).") and "fetch" not in said
        )


class TestCifar:
    @pytest.mark.parametrize(
        ("name", "folder", "first", "classes"),
        [
            ("cifar10", "cifar-10-batches-py", "data_batch_1", 10),
            ("cifar100", "cifar-100-python", "train", 100),
        ],
    )
    def test_pickles_of_the_real_layout(
        self,
        name: str,
        folder: str,
        first: str,
        classes: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        made = data_files.cifar(tmp_path / folder, name)
        data_files.point_cifar_at(monkeypatch, name, made)
        data = load(name, tmp_path)
        images, labels = made["arrays"][first]
        assert (data.x_train[: len(images)] == images).all()
        assert data.y_train[: len(labels)].tolist() == labels
        assert (data.x_test.shape, data.classes) == ((5, 3, 32, 32), classes)

    def test_changed_file_is_named_and_its_pickle_never_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = data_files.cifar(tmp_path / "cifar-10-batches-py", "cifar10")
        data_files.point_cifar_at(monkeypatch, "cifar10", made)
        trap = tmp_path / "sprung"
        code = b"cos\nmkdir\n(V" + str(trap).encode() + b"\ntR."
        (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(code)
        expected = made["md5"]["data_batch_3"]
        with refused("damaged", says=("data_batch_3", data_files.md5(code), expected)):
            load("cifar10", tmp_path)
        assert not trap.exists()

    def test_missing_names_both_layouts(self, tmp_path: Path) -> None:
        with refused("no-data", name="cifar10", says="cifar-10-batches-py"):
            load("cifar10", tmp_path)

    def test_incomplete_folder_is_missing(self, tmp_path: Path) -> None:
        data_files.cifar(tmp_path / "cifar-100-python", "cifar100")
        (tmp_path / "cifar-100-python" / "test").unlink()
        with refused("no-data", name="cifar100") as caught:
            load("cifar100", tmp_path)
        assert "cifar-100-python" in str(caught.value) and "data fetch cifar100" in str(caught.value)


class TestEmnist:
    def test_letters_are_upright_and_counted_from_zero(self, tmp_path: Path) -> None:
        made = data_files.emnist(tmp_path / "EMNIST" / "raw", "letters", [1, 26, 5])
        data = load("emnist_letters", tmp_path)
        assert (data.x_train[:, 0] == made["train"]).all() and (data.x_test[:, 0] == made["test"]).all()
        assert data.y_train.tolist() == [0, 25, 4]
        assert (data.classes, data.mean, data.std) == (26, (0.0,), (1.0,))  # pixels in [0, 1], as FedSoft's

    def test_by_class_has_all_and_cases_are_two_sources_of_the_same_letters(self, tmp_path: Path) -> None:
        labels = [0, 10, 35, 36, 61, 9]  # '0', 'A', 'Z', 'a', 'z', '9'
        made = data_files.emnist(tmp_path / "EMNIST" / "raw", "byclass", labels)
        every = load("emnist_byclass", tmp_path)
        assert (every.y_train.tolist(), every.classes) == (labels, 62)
        cases = load("emnist_cases", tmp_path)
        assert (cases.x_test[:, 0] == made["test"][1:5]).all()
        assert cases.y_train.tolist() == [0, 25, 0, 25]
        assert cases.sources_train.tolist() == cases.sources_test.tolist() == [1, 1, 0, 0]
        assert cases.classes == 26

    def test_truncated_file_is_named(self, tmp_path: Path) -> None:
        data_files.emnist(tmp_path / "EMNIST" / "raw", "letters", [1, 2])
        path = tmp_path / "EMNIST" / "raw" / "emnist-letters-test-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-10])
        with refused("damaged", path=path, says=("1574", "1584", "MD5")):
            load("emnist_letters", tmp_path)


def test_normalisation_can_be_set(tmp_path: Path) -> None:
    data_files.emnist(tmp_path / "EMNIST" / "raw", "letters", [1, 2])
    data = load("emnist_letters", tmp_path, mean=[0.1307], std=[0.3081])
    assert (data.mean, data.std) == ((0.1307,), (0.3081,))
    with refused("unequal-lengths", name="emnist_letters", channels=1):
        load("emnist_letters", tmp_path, mean=[0.1, 0.2])


def test_labels_are_what_a_partition_can_divide(tmp_path: Path) -> None:
    from archipelago.core.settings import PartitionSettings
    from archipelago.data import build_federation

    data_files.emnist(tmp_path / "EMNIST" / "raw", "byclass", [10, 36] * 8)
    settings = DataSettings(name="emnist_cases", root=str(tmp_path))
    federation = build_federation(settings, PartitionSettings(name="iid"), 4, seed=0)
    assert federation.groups.tolist() == [0, 0, 1, 1]  # one source per client
    assert np.unique(federation.y[federation.clients[0].train]).tolist() == [0]
