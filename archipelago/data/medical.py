"""The twelve two-dimensional sets of MedMNIST, read and fetched by `medmnist`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions, closest, nearest
from archipelago.core.settings import DataSettings
from archipelago.data.apportion import Integers
from archipelago.data.datasets import Array, Dataset, dataset
from archipelago.data.files import Damaged, check_md5, fetch, fetch_hint, missing, root_of
from archipelago.data.options import AttributeOptions

# Names and what they show; the rest (addresses, checksums, classes) is asked of medmnist when it is needed,
# because importing it takes seconds.
SETS = {
    "pathmnist": "colon tissue, 107,180 colour images, 9 classes",
    "chestmnist": "chest X-rays, 112,120 grey images, one of 14 findings or any (data.attribute)",
    "dermamnist": "skin lesions, 10,015 colour images, 7 classes",
    "octmnist": "retinal tomography, 109,309 grey images, 4 classes",
    "pneumoniamnist": "chest X-rays of children, 5,856 grey images, 2 classes",
    "retinamnist": "fundus photographs, 1,600 colour images, 5 grades taken as classes",
    "breastmnist": "breast ultrasound, 780 grey images, 2 classes",
    "bloodmnist": "blood cells, 17,092 colour images, 8 classes",
    "tissuemnist": "kidney cortex cells, 236,386 grey images, 8 classes",
    "organamnist": "abdominal organs (axial), 58,830 grey images, 11 classes",
    "organcmnist": "abdominal organs (coronal), 23,583 grey images, 11 classes",
    "organsmnist": "abdominal organs (sagittal), 25,211 grey images, 11 classes",
}
_FINDINGS = "chestmnist"  # has several answers to each image


def _medmnist() -> Any:
    import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision, which medmnist imports)

    # isort: split
    import medmnist

    return medmnist


def _file(name: str, settings: DataSettings) -> Path:
    return root_of(settings) / f"{name}.npz"


def _fetch(name: str, settings: DataSettings) -> Path:
    medmnist = _medmnist()
    about = medmnist.INFO[name]
    source = getattr(medmnist, about["python_class"])

    def download(folder: Path) -> None:
        source("train", root=str(folder), download=True)

    return fetch(name, settings, about["url"], [f"{name}.npz"], download, [(f"{name}.npz", about["MD5"])])


def _load(name: str, settings: DataSettings, finding: str | None = None) -> Dataset:
    """Train = the official training part, test = the official validation and test parts (as in the papers)."""
    medmnist = _medmnist()
    about, path = medmnist.INFO[name], _file(name, settings)
    if not path.is_file():
        raise missing(name, [path], fetch_hint(name, settings, about["url"]))
    check_md5(name, [(path, about["MD5"])])
    source = getattr(medmnist, about["python_class"])
    try:
        parts = [source(split, root=str(path.parent)) for split in ("train", "val", "test")]
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(name, path, str(error)) from error
    train, val, test = ((_images(part.imgs), _labels(name, part.labels, finding)) for part in parts)
    x_test, y_test = (np.concatenate(pair) for pair in zip(val, test, strict=True))
    classes = 2 if name == _FINDINGS else len(about["label"])
    return Dataset(name, *train, x_test, y_test, classes=classes, mean=(0.5,), std=(0.5,))


def _images(images: Array) -> Array:
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _labels(name: str, labels: Array, finding: str | None) -> Integers:
    """One class per image. ChestMNIST gives 14 yes/no answers: the one asked for, or whether any is yes."""
    if name != _FINDINGS:
        return labels.reshape(-1).astype(np.int64)
    if finding is None:
        return (labels.max(axis=1) > 0).astype(np.int64)
    findings = list(_medmnist().INFO[name]["label"].values())
    if finding not in findings:
        raise UserError(
            f"Unknown data.attribute '{finding}' of {name}. {nearest(finding, findings)}",
            code="unknown-choice", setting="data.attribute", given=finding, nearest=closest(finding, findings),
        )  # fmt: skip
    return labels[:, findings.index(finding)].astype(np.int64)


def _register(name: str, about: str) -> None:
    def load(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
        return _load(name, settings)

    def load_finding(settings: DataSettings, options: AttributeOptions, seed: int) -> Dataset:
        return _load(name, settings, options.attribute)

    def files(settings: DataSettings) -> list[Path]:
        path = _file(name, settings)
        return [path] if path.is_file() else []

    dataset(
        name,
        f"MedMNIST: {about}, 28x28",
        present=lambda settings: next((str(path) for path in files(settings)), None),
        files=files,
        fetch=lambda settings: _fetch(name, settings),
        seeded=False,
    )(load_finding if name == _FINDINGS else load)


for _name, _about in SETS.items():
    _register(_name, _about)
