"""CelebA, Tiny ImageNet and image folders: one file per image, decoded once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from archipelago.data import DATASETS, Dataset, load_dataset
from archipelago.data.catalogue import fetch_dataset
from archipelago.data.image_reading import read_image
from tests.support import data_files
from tests.support.errors import refused
from tests.support.settings import data_settings


def load(name: str, root: Path, **more: object) -> Dataset:
    return load_dataset(data_settings(name=name, root=str(root), **more), seed=0)


class TestCelebA:
    people = [7, 7, 3, 3, 3, 9, 9, 7, 3, 9]  # noqa: RUF012

    def test_smiling_by_person(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = data_files.celeba(tmp_path / "celeba", self.people)
        data_files.point_celeba_at(monkeypatch, made)
        data = load("celeba", tmp_path, test_fraction=0.3)
        assert (data.x_train.shape, data.x_test.shape) == ((7, 3, 84, 84), (3, 3, 84, 84))
        assert sorted(data.owners_test.tolist()) == [0, 1, 2]  # one photograph of each person
        assert np.bincount(data.owners_train).tolist() == [3, 2, 2]
        # Every photograph once, with its own label and its own person.
        people = {3: 0, 7: 1, 9: 2}
        wanted = {
            (bytes(np.asarray(Image.open(path).resize((84, 84), Image.Resampling.BICUBIC)).transpose(2, 0, 1).copy()),
             int(smiles), people[person])
            for path, smiles, person in zip(
                sorted((tmp_path / "celeba" / "img_align_celeba").iterdir()), made["smiling"], self.people, strict=True
            )
        }  # fmt: skip
        x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
        owners = np.concatenate([data.owners_train, data.owners_test])
        assert {(bytes(a.copy()), int(b), int(c)) for a, b, c in zip(x, y, owners, strict=True)} == wanted

    def test_other_attributes_and_sizes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data_files.point_celeba_at(monkeypatch, data_files.celeba(tmp_path / "celeba", self.people))
        data = load("celeba", tmp_path, attribute="Male", image_size=16)
        assert set(data.y_train.tolist()) == {1} and data.x_train.shape[1:] == (3, 16, 16)
        with refused("unknown-choice", setting="data.attribute", given="Smilling", nearest="Smiling"):
            load("celeba", tmp_path, attribute="Smilling")

    def test_without_gdown_the_fetch_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gdown" else found(name))
        with refused("needs-package", package="gdown", says=("https://", "/celeba")):
            fetch_dataset("celeba", data_settings(root=str(tmp_path)))
        assert not [*tmp_path.iterdir()]

    def test_damaged_texts_and_photographs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with refused("no-data", name="celeba") as caught:
            load("celeba", tmp_path)
        assert "data fetch celeba" in str(caught.value) and "gdown" in str(caught.value)
        data_files.point_celeba_at(monkeypatch, data_files.celeba(tmp_path / "celeba", self.people))
        photograph = tmp_path / "celeba" / "img_align_celeba" / "000004.jpg"
        half = photograph.read_bytes()[:800]
        photograph.write_bytes(half)
        with refused("damaged", says=("000004.jpg", "800", data_files.md5(half))):
            load("celeba", tmp_path)
        assert not [*(tmp_path / "mapped").iterdir()]  # all or nothing
        text = tmp_path / "celeba" / "identity_CelebA.txt"
        text.write_text(text.read_text().replace(" 9", " 8", 1))
        with refused("damaged", name="celeba", says=("identity_CelebA.txt", "MD5")):
            load("celeba", tmp_path)


class TestTinyImageNet:
    def test_folder_layout(self, tmp_path: Path) -> None:
        made = data_files.tiny_imagenet(tmp_path / "tiny-imagenet-200", classes=3, train=4, val=6)
        data = load("tiny_imagenet", tmp_path)
        assert (data.x_train.shape, data.x_test.shape) == ((12, 3, 64, 64), (6, 3, 64, 64))
        assert data.classes == 3
        # Labels are positions in wnids.txt, which is not sorted; folders are read in order of their names.
        assert data.y_train.tolist() == [2] * 4 + [1] * 4 + [0] * 4
        assert data.y_test.tolist() == [0, 1, 2, 0, 1, 2]
        picture = made["images"][f"{made['wnids'][2]}_1"]
        assert np.abs(data.x_train[1].transpose(1, 2, 0).astype(int) - picture).max() < 12  # JPEG
        grey = data.x_train[8]  # the grey one became three equal channels
        assert (grey[0] == grey[1]).all() and (grey[0] == grey[2]).all()

    def test_what_does_not_fit_together_is_named(self, tmp_path: Path) -> None:
        with refused("no-data", name="tiny_imagenet", says="tiny-imagenet-200"):
            load("tiny_imagenet", tmp_path)
        folder = tmp_path / "tiny-imagenet-200"
        data_files.tiny_imagenet(folder, classes=2, train=2, val=2)
        (folder / "val" / "images" / "val_1.JPEG").unlink()
        with refused("damaged", name="tiny_imagenet", says=("val_annotations.txt", "val_1.JPEG")):
            load("tiny_imagenet", tmp_path)


class TestImageFolder:
    def make(
        self, folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 5, side: int = 12
    ) -> None:
        for number, name in enumerate(classes):
            (folder / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(data_files.smooth(side, seed=10 * number + i)).save(
                    folder / name / f"{i}.png"
                )

    def test_train_and_test_folders(self, tmp_path: Path) -> None:
        self.make(tmp_path / "pets" / "train")
        self.make(tmp_path / "pets" / "test", count=2)
        data = load("image_folder", tmp_path / "pets")
        assert (data.name, data.classes) == ("pets", 2)
        assert data.y_train.tolist() == [0] * 5 + [1] * 5 and data.y_test.tolist() == [0, 0, 1, 1]
        assert (data.x_train[7].transpose(1, 2, 0) == data_files.smooth(12, seed=12)).all()  # PNG is lossless

    @pytest.mark.parametrize("target", ["..", "../..", "../b", "."])
    def test_links_that_show_images_twice_are_refused(self, target: str, tmp_path: Path) -> None:
        self.make(tmp_path / "pets" / "train")
        self.make(tmp_path / "pets" / "test", count=2)
        classes = sorted(path.name for path in (tmp_path / "pets" / "train").iterdir())
        link = tmp_path / "pets" / "train" / classes[0] / "loop"
        link.symlink_to(target.replace("../b", f"../{classes[1]}"))
        # "../b": another class inside a class, whose images would have two labels.
        with refused("counted-twice"):
            load("image_folder", tmp_path / "pets")

    def test_class_may_be_a_link_to_images_elsewhere(self, tmp_path: Path) -> None:
        self.make(tmp_path / "pets")
        first = sorted((tmp_path / "pets").iterdir())[0]
        first.rename(tmp_path / "elsewhere")
        first.symlink_to(tmp_path / "elsewhere")
        assert load("image_folder", tmp_path / "pets").classes == 2

    def test_one_folder_is_split_and_may_be_grey_and_resized(self, tmp_path: Path) -> None:
        self.make(tmp_path / "pets")
        data = load("image_folder", tmp_path / "pets", test_fraction=0.2, grey=True, image_size=8)
        assert data.x_train.shape == (8, 1, 8, 8) and data.y_test.tolist() == [0, 1]

    @pytest.mark.parametrize("more", [(), ("mapped",)])  # nothing is odd about a class of this name
    @pytest.mark.parametrize("left_by_older_versions", [False, True])
    def test_one_folder_is_read_again_and_again(
        self, more: tuple[str, ...], left_by_older_versions: bool, tmp_path: Path
    ) -> None:
        self.make(tmp_path / "pets", ("cat", "dog", *more))
        if left_by_older_versions:
            (tmp_path / "pets" / "copies").mkdir()
            (tmp_path / "pets" / "copies" / "image_folder-0123.json").write_text("{}")
        first, again = (load("image_folder", tmp_path / "pets") for _ in range(2))
        assert first.classes == again.classes == 2 + len(more)
        assert (first.x_train == again.x_train).all() and (first.y_train == again.y_train).all()
        settings = data_settings(name="image_folder", root=str(tmp_path / "pets"))
        assert DATASETS.find("image_folder").present(settings) == str(tmp_path / "pets")
        (tmp_path / "pets" / "dog" / "9.png").write_bytes((tmp_path / "pets" / "dog" / "1.png").read_bytes())
        changed = load("image_folder", tmp_path / "pets")
        assert len(changed.x_train) + len(changed.x_test) == 11 + 5 * len(more)

    def test_copies_may_be_kept_among_the_classes(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        for _ in range(2):
            assert load("image_folder", tmp_path, cache=str(tmp_path / "copies")).classes == 2

    def test_val_is_tested_on_and_train_alone_is_split(self, tmp_path: Path) -> None:
        self.make(tmp_path / "train")
        alone = load("image_folder", tmp_path, test_fraction=0.2)
        assert (alone.classes, alone.y_test.tolist(), len(alone.x_train)) == (2, [0, 1], 8)
        self.make(tmp_path / "val", count=2)
        data = load("image_folder", tmp_path)
        assert data.y_train.tolist() == [0] * 5 + [1] * 5 and data.y_test.tolist() == [0, 0, 1, 1]
        self.make(tmp_path / "Test", count=1)  # joins the other, as in an .npz file
        assert load("image_folder", tmp_path).y_test.tolist() == [0, 0, 1, 1, 0, 1]
        self.make(tmp_path / "extra")
        with refused("wrong-folder", says=("train/CLASS", "extra/")):
            load("image_folder", tmp_path)

    def test_parts_without_training_images_and_classes_with_names_of_parts(self, tmp_path: Path) -> None:
        self.make(tmp_path / "a" / "val")
        self.make(tmp_path / "a" / "test")
        with refused("wrong-folder", says=("val/", "train/")):
            load("image_folder", tmp_path / "a")
        self.make(tmp_path / "b", ("car", "train"))
        assert load("image_folder", tmp_path / "b").classes == 2

    def test_what_cannot_be_is_a_sentence(self, tmp_path: Path) -> None:
        for root in (tmp_path / "none", tmp_path):
            with refused("wrong-folder", says=("data.root", str(root))):
                load("image_folder", root)
        self.make(tmp_path / "a" / "train")
        self.make(tmp_path / "a" / "test", classes=("cat", "cow"))
        with refused("wrong-folder"):
            load("image_folder", tmp_path / "a")
        (tmp_path / "b" / "x").mkdir(parents=True)
        Image.fromarray(data_files.smooth(9, seed=0, height=7)).save(tmp_path / "b" / "x" / "1.png")
        Image.fromarray(data_files.smooth(9, seed=0, height=7)).save(tmp_path / "b" / "x" / "2.png")
        with refused("wrong-shape", width=9, height=7, says=("9x7", "data.image_size")):
            load("image_folder", tmp_path / "b")

    def test_present_where_two_classes_hold_images(self, tmp_path: Path) -> None:
        def present(root: Path) -> str | None:
            return DATASETS.find("image_folder").present(data_settings(root=str(root)))

        assert present(tmp_path / "none") is None
        for name in ("cifar-10-batches-py", "mapped"):  # folders of other data sets
            (tmp_path / "root" / name).mkdir(parents=True)
            (tmp_path / "root" / name / "data_batch_1").touch()
        assert present(tmp_path / "root") is None
        self.make(tmp_path / "pets", count=2)
        self.make(tmp_path / "split" / "train", count=2)
        assert present(tmp_path / "pets") == str(tmp_path / "pets")
        assert present(tmp_path / "split") == str(tmp_path / "split")


def test_image_of_the_right_size_is_not_touched(tmp_path: Path) -> None:
    picture = data_files.pixels(9, 9, 3)
    Image.fromarray(picture).save(tmp_path / "a.png")
    assert (read_image("mine", tmp_path / "a.png", 9) == picture.transpose(2, 0, 1)).all()
