"""Fetching, from a real web server on this machine, through torchvision's and medmnist's own downloaders."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import zipfile
from pathlib import Path
from typing import Any

import medmnist
import numpy as np
import pytest
import torchvision.datasets

from archipelago.core.settings import DataSettings
from archipelago.data import image_files, load_dataset, torchvision_sets
from archipelago.data.catalogue import fetch_dataset, listing
from archipelago.data.files import fetch
from tests.support import data_files
from tests.support.errors import refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder that is served, and its address; no Debian package is in the way."""
    monkeypatch.setattr(torchvision_sets, "DEBIAN", tmp_path / "debian")
    (tmp_path / "site").mkdir()
    with data_files.served(tmp_path / "site") as address:
        yield tmp_path / "site", address


def publish_fashion(site: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = data_files.fashion_mnist(site, packed=True)
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", [address])
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "resources", list(made["gz_md5"].items()))
    monkeypatch.setattr(torchvision_sets, "FASHION_FILES", made["md5"])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_data_download_fetches_what_is_missing(
    site: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_fashion(*site, monkeypatch)
    settings = DataSettings(name="fashion_mnist", root=str(root), download=True)
    assert load_dataset(settings, 0).x_train.shape == (20, 1, 28, 28)
    shutil.rmtree(site[0])  # what is here is not fetched again
    assert load_dataset(settings, 0).x_test.shape == (10, 1, 28, 28)
    assert names(root) == {"FashionMNIST"}


def test_emnist_letters_medmnist_and_tiny_imagenet(
    site: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = site
    data_files.emnist(folder / "plain", "letters", [1, 2])
    with zipfile.ZipFile(folder / "gzip.zip", "w") as packed:
        import gzip

        for path in (folder / "plain").iterdir():
            packed.writestr(f"gzip/{path.name}.gz", gzip.compress(path.read_bytes()))
    monkeypatch.setattr(torchvision.datasets.EMNIST, "url", f"{address}gzip.zip")
    monkeypatch.setattr(
        torchvision.datasets.EMNIST, "md5", data_files.md5((folder / "gzip.zip").read_bytes())
    )

    data_files.medmnist(folder / "breastmnist.npz", colours=False, labels=np.array([[0], [1]]))
    about = medmnist.INFO["breastmnist"]
    monkeypatch.setitem(about, "url", f"{address}breastmnist.npz")
    monkeypatch.setitem(about, "MD5", data_files.md5((folder / "breastmnist.npz").read_bytes()))

    data_files.tiny_imagenet(folder / "tiny-imagenet-200", classes=2, train=2, val=2)
    shutil.make_archive(str(folder / "tiny-imagenet-200"), "zip", folder, "tiny-imagenet-200")
    archive = folder / "tiny-imagenet-200.zip"
    monkeypatch.setattr(image_files, "TINY_ADDRESS", f"{address}{archive.name}")
    monkeypatch.setattr(image_files, "TINY_MD5", data_files.md5(archive.read_bytes()))

    for name in ("emnist_letters", "breastmnist", "tiny_imagenet"):
        settings = DataSettings(name=name, root=str(root))
        assert str(root) in fetch_dataset(name, settings)
        assert len(load_dataset(settings, 0).x_train) >= 2
    assert names(root) == {"EMNIST", "breastmnist.npz", "tiny-imagenet-200", "mapped"}
    assert not [*(root / "EMNIST").rglob("*.zip")]
    # A byte of what was fetched that has changed is reported, though nobody publishes this file's checksum.
    path = root / "EMNIST" / "raw" / "emnist-letters-train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with refused("damaged", path=path, says=data_files.md5(bytes(content))):
        load_dataset(DataSettings(name="emnist_letters", root=str(root)), 0)


@pytest.mark.parametrize("fault", ["cut", "changed", "absent"])
def test_failed_fetch_says_why_and_leaves_nothing(
    fault: str, site: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = data_files.publish_cifar(*site, monkeypatch)
    content = archive.read_bytes()
    expected = data_files.md5(content)
    facts: tuple[str, ...] = (archive.name, f"{len(content)}", expected)
    if fault == "cut":
        archive.rename(archive.with_name(f"{archive.name}.cut"))
        facts = (archive.name, data_files.md5(content[: len(content) // 2]), expected)
    elif fault == "changed":
        archive.write_bytes(content[:-1] + b"?")
    else:
        archive.unlink()
        facts = ("404",)
    with refused("cannot-be-fetched", says=(site[1], *facts, "data=digits")):
        fetch_dataset("cifar10", DataSettings(root=str(root)))
    assert names(root) == set()


def test_medmnist_says_the_reason_behind_its_advice(
    site: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(medmnist.INFO["breastmnist"], "url", f"{site[1]}nowhere.npz")
    with refused("cannot-be-fetched", name="breastmnist", says=("nowhere.npz", "404")):
        fetch_dataset("breastmnist", DataSettings(root=str(root)))
    assert names(root) == set()


def test_leftovers_of_a_killed_fetch_go_and_those_of_a_live_one_stay(root: Path) -> None:
    root.mkdir()
    dead, alive = (root / f".fetching-x-{socket.gethostname()}-{pid}" for pid in (2**22 + 1, os.getppid()))
    dead.mkdir()
    alive.mkdir()
    (root / "old").mkdir()
    (root / "old" / "damaged").touch()

    def download(folder: Path) -> None:
        (folder / "old").mkdir()
        (folder / "old" / "fresh").touch()

    fetch("x", DataSettings(root=str(root)), "http://nowhere", ["old"], download)
    assert not dead.exists() and alive.exists()
    assert names(root / "old") == {"fresh"}  # replaced whole
    assert names(root) == {"old", alive.name}


def test_sigterm_during_a_fetch_leaves_nothing(root: Path) -> None:
    def download(folder: Path) -> None:
        (folder / "half").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        fetch("x", DataSettings(root=str(root)), "http://nowhere", ["half"], download)
    assert end.value.code == 143 and names(root) == set()
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_cannot_be_fetched_says_how_to_get_it(root: Path) -> None:
    with refused("no-data", name="femnist", says="preprocess.sh"):
        fetch_dataset("femnist", DataSettings(root=str(root)))
    with refused("unknown-name", name="cifar", nearest="cifar10"):
        fetch_dataset("cifar", DataSettings(root=str(root)))


def test_every_data_set_is_listed_and_embedded_ones_are_present(root: Path) -> None:
    rows = {name: (state, about) for name, state, _, about in listing(DataSettings(root=str(root)))}
    assert rows["digits"][0] == rows["synthetic"][0] == "present"
    assert rows["celeba"][0] == "missing" and "data fetch gets it" in rows["celeba"][1]
    assert rows["femnist"][0] == "missing" and "bring your own" in rows["femnist"][1]


def test_file_of_ones_own_is_listed_with_its_size(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x_train=np.zeros(300_000, np.uint8))
    (row,) = [row for row in listing(DataSettings(root=str(tmp_path))) if row[0] == "npz"]
    assert row == ("npz", "present", "300 kB", str(tmp_path / "mine.npz"))
