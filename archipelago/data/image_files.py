"""Data sets of one file per image: CelebA, Tiny ImageNet, and a user's own image folder.

All of them are decoded once into a memory-mapped copy (`mapped.py`).
"""

from __future__ import annotations

import importlib.util
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import NoOptions, closest, nearest
from archipelago.core.settings import DataSettings, setting
from archipelago.data.datasets import Dataset, dataset, hold_out, some
from archipelago.data.files import NO_FILES, Damaged, check_md5, fetch, fetch_hint, md5_of, missing, root_of
from archipelago.data.image_reading import reader_of, recipe_of, refuse_pipe, refuse_size, too_large
from archipelago.data.mapped import Recipe, cache_choices, stored
from archipelago.data.options import AttributeOptions, ImageSizeOptions

# CelebA ---------------------------------------------------------------------------------------------------

_CELEBA_SIDE = 84
_CELEBA_HOME = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_CELEBA_TEXTS = (
    "list_attr_celeba.txt",
    "identity_CelebA.txt",
    "list_bbox_celeba.txt",
    "list_landmarks_align_celeba.txt",
    "list_eval_partition.txt",
)


def _celeba() -> Any:
    import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision.datasets import CelebA

    return CelebA


def _celeba_files(settings: DataSettings) -> list[Path]:
    folder = root_of(settings) / "celeba"
    found = [*(folder / name for name in _CELEBA_TEXTS), folder / "img_align_celeba"]
    return found if all(path.exists() for path in found) else []


def _celeba_fetch(settings: DataSettings) -> Path:
    source = _celeba()
    if importlib.util.find_spec("gdown") is None:
        raise UserError(
            "Data set 'celeba' comes from Google Drive, for which torchvision needs the package gdown: install it with "
            f"`pip install gdown`, or bring the files of {_CELEBA_HOME} to {root_of(settings) / 'celeba'} yourself.",
            code="needs-package", package="gdown",
        )  # fmt: skip

    def download(folder: Path) -> None:
        source(folder, download=True)
        (folder / "celeba" / "img_align_celeba.zip").unlink(missing_ok=True)

    archives = [(file, md5) for _, md5, file in source.file_list]
    return fetch(
        "celeba", settings, f"Google Drive, as named on {_CELEBA_HOME}", ["celeba"], download, archives
    )


@dataclass
class CelebaOptions(ImageSizeOptions, AttributeOptions):
    """`data.attribute=Male data.image_size=64`."""


@dataset(
    "celeba",
    "CelebA: 202,599 colour photographs of 10,177 persons at 84x84: smiling or not (data.attribute)",
    present=lambda settings: str(root_of(settings) / "celeba") if _celeba_files(settings) else None,
    files=_celeba_files,
    fetch=_celeba_fetch,
    seeded=False,
    owners=True,
    reads=("mapped", "cache", "test_fraction"),
)
def celeba(settings: DataSettings, options: CelebaOptions, seed: int) -> Dataset:
    """Owners are the persons; `data.test_fraction` of each person's photographs is held out (FeSEM, LEAF).

    The official split puts whole persons aside, so it cannot give every client a test part.
    """
    files = _celeba_files(settings)
    source = _celeba()
    if not files:
        how = fetch_hint("celeba", settings, f"{_CELEBA_HOME} (torchvision needs the package gdown for it)")
        raise missing("celeba", [root_of(settings) / "celeba"], how)
    texts = [(files[0].parent / file, md5) for _, md5, file in source.file_list if file.endswith(".txt")]
    check_md5("celeba", texts)
    side = options.image_size or _CELEBA_SIDE
    attribute = options.attribute or "Smiling"

    def recipe() -> Recipe:
        faces = source(root_of(settings), split="all", target_type=["attr", "identity"])
        names = [name for name in faces.attr_names if name]
        if attribute not in names:
            raise UserError(
                f"Unknown data.attribute '{attribute}' of celeba. {nearest(attribute, names)}",
                code="unknown-choice", setting="data.attribute", given=attribute, nearest=closest(attribute, names),
            )  # fmt: skip
        y = faces.attr[:, names.index(attribute)].numpy().astype(np.int64)
        people = np.unique(faces.identity[:, 0].numpy(), return_inverse=True)[1].astype(np.int64)
        train, test = hold_out(people, settings.test_fraction, generator(0, "split of celeba"))
        order = np.concatenate([train, test])
        paths = [files[-1] / faces.filename[i] for i in order]
        for path in paths:
            if not path.is_file():
                raise Damaged("celeba", path, "it is not there")
        read = reader_of("celeba", paths, side)
        return recipe_of(paths, y[order], len(train), read, (3, side, side), people[order])

    parts = [side, attribute, settings.test_fraction, [md5 for _, md5 in texts]]
    made = stored(settings, "celeba", [*files[:-1], *_listed(files[-1])], parts, recipe)
    return Dataset(name="celeba", classes=2, mean=(0.5,), std=(0.5,), **made.parts())


def _listed(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix)


# Tiny ImageNet --------------------------------------------------------------------------------------------

TINY_ADDRESS = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
_TINY_SIDE = 64


def _tiny_files(settings: DataSettings) -> list[Path]:
    folder = root_of(settings) / "tiny-imagenet-200"
    found = [folder / "wnids.txt", folder / "val" / "val_annotations.txt", folder / "train", folder / "val"]
    return found if all(path.exists() for path in found) else []


def _tiny_fetch(settings: DataSettings) -> Path:
    def download(folder: Path) -> None:
        import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision)

        # isort: split
        from torchvision.datasets.utils import download_url

        archive = folder / Path(TINY_ADDRESS).name
        download_url(TINY_ADDRESS, folder, md5=TINY_MD5)
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)

    archives = [(Path(TINY_ADDRESS).name, TINY_MD5)]
    return fetch("tiny_imagenet", settings, TINY_ADDRESS, ["tiny-imagenet-200"], download, archives)


@dataset(
    "tiny_imagenet",
    "Tiny ImageNet: 110,000 colour images 64x64, 200 classes",
    present=lambda settings: next((str(path.parent) for path in _tiny_files(settings)), None),
    files=lambda settings: _tiny_files(settings)[:1] + _tiny_files(settings)[2:],
    fetch=_tiny_fetch,
    seeded=False,
    reads=("mapped", "cache"),
)
def tiny_imagenet(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """Train = the training part, test = the validation part (the official test part has no labels)."""
    files = _tiny_files(settings)
    if not files:
        how = fetch_hint("tiny_imagenet", settings, TINY_ADDRESS)
        raise missing("tiny_imagenet", [root_of(settings) / "tiny-imagenet-200"], how)
    wnids, annotations, train_folder, val_folder = files
    number = {wnid: label for label, wnid in enumerate(wnids.read_text().split())}
    train = [(path, path.parents[1].name) for path in sorted(train_folder.glob("*/images/*.JPEG"))]
    rows = [line.split("\t") for line in annotations.read_text().splitlines() if line.strip()]
    try:
        val = [(val_folder / "images" / row[0], row[1]) for row in rows]
        y = np.array([number[wnid] for _, wnid in [*train, *val]], dtype=np.int64)
        paths = [path for path, _ in [*train, *val]]
        absent = next((path for path in paths if not path.is_file()), None)
        if absent or not train or not val:
            raise ValueError(f"{absent or 'a part'} is not there")
    except (KeyError, IndexError, ValueError) as error:
        why = f"it does not fit wnids.txt or the images: {error}, MD5 {md5_of(annotations)}"
        raise Damaged("tiny_imagenet", annotations, why) from error
    read = reader_of("tiny_imagenet", paths, _TINY_SIDE)
    shape = (3, _TINY_SIDE, _TINY_SIDE)
    made = stored(
        settings,
        "tiny_imagenet",
        [wnids, annotations, *paths],
        [],
        lambda: recipe_of(paths, y, len(train), read, shape),
    )
    mean, std = (0.4802, 0.4481, 0.3975), (0.2302, 0.2265, 0.2262)  # FeMAM's
    return Dataset(name="tiny_imagenet", classes=len(number), mean=mean, std=std, **made.parts())


# A user's own folder --------------------------------------------------------------------------------------

_COPIES = ".mapped"  # hidden: whatever else is in `data.root` is a class or a part
_FOLDER_WANTED = (
    "Expected data.root to be a folder with train/CLASS/*.png and test/CLASS/*.png (or val/), or with CLASS/*.png "
    "(any image format)"
)
# Folders that are parts of a data set rather than classes, where they hold folders themselves.
_TRAIN, _TEST = ("train", "training"), ("val", "valid", "validation", "test", "testing")


def _folders(place: Path, settings: DataSettings) -> list[Path]:
    """The folders in `place` that may be classes or parts: hidden ones and our own copies are neither."""
    own = {folder.resolve() for folder in cache_choices(settings, _COPIES)}
    found = (path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    # Copies were once kept in mapped/, beside the classes.
    return sorted(p for p in found if p.resolve() not in own and not any(p.glob("image_folder-*.json")))


def _folder_parts(root: Path, settings: DataSettings) -> tuple[Path, list[Path]]:
    """Where to train and where to test; without a test part, some of the training part is to be held out."""
    folders = _folders(root, settings)
    parts = {path.name.lower(): path for path in folders if _folders(path, settings)}
    train = [parts[name] for name in _TRAIN if name in parts]
    test = [parts[name] for name in _TEST if name in parts]
    others = [path for path in folders if path not in (*train, *test)]
    if not train:
        if test and not others:
            raise UserError(
                f"{_FOLDER_WANTED}, but {root} has {test[0].name}/ and no train/.",
                code="wrong-folder", path=root,
            )  # fmt: skip
        return root, []
    mixed = next((path for path in others if _has_images(path)), None)
    if mixed is not None or len(train) > 1:
        beside = mixed if mixed is not None else train[1]
        raise UserError(
            f"{_FOLDER_WANTED}, but {root} has {train[0].name}/CLASS and {beside.name}/ side by side: move one of them "
            "away.",
            code="wrong-folder", path=root,
        )  # fmt: skip
    return train[0], test


def _has_images(folder: Path) -> bool:
    endings = Image.registered_extensions()
    return any(path.suffix.lower() in endings for path in folder.rglob("*"))


def _class_folders(settings: DataSettings) -> list[Path]:
    """The folders that `image_folder` would take for classes of training images, if there are two at least."""
    root = root_of(settings)
    if not root.is_dir():
        return []
    endings = Image.registered_extensions()
    try:
        folders = _folders(_folder_parts(root, settings)[0], settings)
        held = [path for path in folders if any(each.suffix.lower() in endings for each in path.iterdir())]
    except (UserError, OSError):
        return []
    return held if len(held) >= 2 else []


@dataclass
class ImageFolderOptions(ImageSizeOptions):
    """`data.grey=true data.image_size=64`."""

    grey: bool = setting(False, "image_folder: read images as grey levels instead of colours")


@dataset(
    "image_folder",
    "your own folder of images, one folder per class (data.root), in train/ and test/ (or val/), or held out",
    present=lambda settings: str(root_of(settings)) if _class_folders(settings) else None,
    files=lambda settings: _folders(root_of(settings), settings) if _class_folders(settings) else [],
    seeded=False,
    reads=("mapped", "cache", "test_fraction"),
)
def image_folder(settings: DataSettings, options: ImageFolderOptions, seed: int) -> Dataset:
    """As torchvision's ImageFolder finds them. Without a test part, `data.test_fraction` is held out.

    Validation images, where there are any, join the test images, as those of `npz` do.
    """
    root = root_of(settings)
    if not root.is_dir():
        raise UserError(
            f"{_FOLDER_WANTED}, but {settings.root} is no folder; data={NO_FILES} needs no files.",
            code="wrong-folder", path=settings.root,
        )  # fmt: skip
    train_folder, test_folders = _folder_parts(root, settings)
    train, classes = _samples(train_folder, settings)
    test: list[tuple[Path, int]] = []
    for folder in test_folders:
        more, theirs = _samples(folder, settings)
        if theirs != classes:
            raise UserError(
                f"{_FOLDER_WANTED}, and the same classes in both, but {root} has {some(classes)} to train on and "
                f"{some(theirs)} to test on in {folder.name}/.",
                code="wrong-folder", path=root,
            )  # fmt: skip
        test += more
    paths = [path for path, _ in [*train, *test]]
    labels, cut = np.array([label for _, label in [*train, *test]], dtype=np.int64), len(train)
    if not test:
        if np.bincount(labels).min() < 2:
            raise UserError(
                f"{_FOLDER_WANTED} of two images at least, but a class of {train_folder} has one.",
                code="too-few-samples", path=train_folder,
            )  # fmt: skip
        kept, held = hold_out(labels, settings.test_fraction, generator(0, "split of image_folder"))
        order, cut = np.concatenate([kept, held]), len(kept)
        paths, labels = [paths[i] for i in order], labels[order]
    mode, channels = ("L", 1) if options.grey else ("RGB", 3)
    side = options.image_size or _side_of(paths[0])
    read = reader_of("image_folder", paths, side, mode)
    made = stored(
        settings,
        "image_folder",
        paths,
        [str(root.resolve()), mode, side, settings.test_fraction, classes, cut],
        lambda: recipe_of(paths, labels, cut, read, (channels, side, side)),
        _COPIES,
    )
    return Dataset(name=root.name, classes=len(classes), mean=(0.5,), std=(0.5,), **made.parts())


def _samples(folder: Path, settings: DataSettings) -> tuple[list[tuple[Path, int]], list[str]]:
    """(image, label) pairs and the names of the classes."""
    import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision.datasets import ImageFolder

    class Visible(ImageFolder):  # type: ignore[misc]  # torchvision has no types
        """Knows which folders are no classes."""

        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            names = [path.name for path in _folders(Path(directory), settings)]
            if not names:
                raise FileNotFoundError(f"Couldn't find any class folder in {directory}")
            return names, {name: label for label, name in enumerate(names)}

    _refuse_loops(folder, _folders(folder, settings))
    try:
        found = Visible(str(folder))
    except (FileNotFoundError, OSError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{_FOLDER_WANTED}, but {folder} is not one ({why}).", code="wrong-folder", path=folder
        ) from error
    return [(Path(path), label) for path, label in found.samples], list(found.classes)


def _refuse_loops(part: Path, classes: Iterable[Path]) -> None:
    """A link that leads back to a folder above it, or twice to one, shows images again, under wrong labels too."""
    seen = {part.resolve(): part}
    for place, folders, _ in (each for name in classes for each in os.walk(name, followlinks=True)):
        path = Path(place)
        real = path.resolve()
        if real in seen or real in part.resolve().parents:
            raise UserError(
                f"Expected every folder of images once, but {path} leads to {seen.get(real, real)} again: remove "
                "that link, or its images would count several times.",
                code="counted-twice", path=path,
            )  # fmt: skip
        seen[real] = path
        folders.sort()


def _side_of(path: Path) -> int:
    """The side of a square image; where it is not square, nobody said what to do."""
    refuse_pipe(path)
    try:
        with Image.open(path) as image:
            width, height = image.size
        refuse_size("image_folder", path, (width, height))
    except Image.DecompressionBombError as error:
        raise too_large("image_folder", path, error) from error
    except (OSError, UnidentifiedImageError) as error:
        raise Damaged("image_folder", path, f"{error}, MD5 {md5_of(path)}") from error
    if width != height:
        raise UserError(
            f"Expected square images, but {path} has {width}x{height} pixels: set data.image_size to the side that "
            "all are resized to.",
            code="wrong-shape", path=path, width=width, height=height,
        )  # fmt: skip
    return width
