"""`data=datamodule data.target=package.module.Class`: a user's own LightningDataModule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from archipelago.core.causes import USERS, cause_of, refuse_end
from archipelago.core.errors import UserError
from archipelago.core.randomness import seeded_globals
from archipelago.core.settings import DataSettings, setting
from archipelago.core.targets import construct, load_class
from archipelago.data.arrays import from_arrays
from archipelago.data.datasets import DATASETS, Array, Dataset, dataset
from archipelago.data.files import root_of
from archipelago.data.options import TargetOptions


def load_target(target: str | None) -> Any:
    """The class behind `data.target`."""
    if not target:
        raise UserError(
            "Expected data.target to name a LightningDataModule, got nothing: write it as "
            "data.target=package.module.Class.",
            code="missing-value", setting="data.target",
        )  # fmt: skip
    import archipelago.core.torchvision_operators  # noqa: F401  (before lightning)

    # isort: split
    import lightning

    return load_class("data.target", target, lightning.LightningDataModule)


@dataclass
class DataModuleOptions(TargetOptions):
    """`data.target=...`: whose data set it is."""

    target: str | None = setting(
        None, "datamodule: import path of your LightningDataModule, as package.module.Class"
    )


def _target(settings: DataSettings) -> str | None:
    options: DataModuleOptions = DATASETS.entry("datamodule").options_from(settings)
    return options.target


@dataset(
    "datamodule",
    "your own LightningDataModule, by import path (data.target)",
    present=_target,
)
def datamodule(settings: DataSettings, options: DataModuleOptions, seed: int) -> Dataset:
    """Every sample of the module's data sets, once, in their order.

    The training data loader's data set is trained on, the test data loader's tested on (the validation
    loader's where there is none). A sample is (x, y) or (x, y, owner). What the module draws from global
    generators while it sets up comes from the seed; random transforms are applied once, not at every epoch.
    An argument `root` of the module gets `data.root`.
    """
    made = load_target(options.target)
    with seeded_globals(seed):
        module = construct("data.target", str(options.target), made, root=str(root_of(settings)))
        try:
            module.prepare_data()
            for stage in ("fit", "test"):
                module.setup(stage)
            parts = [_collect(options.target, module, loaders) for loaders in (_TRAIN, _TEST)]
        except UserError:
            raise
        except USERS as error:  # whatever the user's own code raises
            refuse_end(error)
            raise UserError(
                f"data.target={options.target} gave no samples: {cause_of(error)}.",
                code="users-code", name=options.target,
            ) from error  # fmt: skip
    (x_train, y_train, o_train, tensors), (x_test, y_test, o_test, _) = parts
    owners = None if o_train is None or o_test is None else (o_train, o_test)
    return from_arrays(
        type(module).__name__,
        {"x_train": [x_train], "y_train": [y_train], "x_test": [x_test], "y_test": [y_test]},
        where=f"data.target={options.target}",
        owners=owners,
        targets=options.targets,
        channels_first=tensors,  # as torch has them; PIL images and arrays have them last
    )


_TRAIN, _TEST = ("train_dataloader",), ("test_dataloader", "val_dataloader")


def _collect(target: Any, module: Any, loaders: Iterable[str]) -> tuple[Array, Array, Array | None, bool]:
    """Stacked samples, labels and owners of the first of these data loaders that the module has.

    And whether the samples are tensors.
    """
    import lightning
    import torch

    for name in loaders:
        if getattr(type(module), name) is getattr(lightning.LightningDataModule, name):
            continue  # not overridden
        loader = getattr(module, name)()
        data = getattr(loader, "dataset", None)
        if data is None or not hasattr(data, "__len__"):
            raise UserError(
                f"Expected {name} of data.target={target} to return one DataLoader over a data set with a length, "
                f"got {type(loader).__name__}: return torch.utils.data.DataLoader(data_set).",
                code="wrong-result", name=name,
            )  # fmt: skip
        samples = [data[i] for i in range(len(data))]
        if not samples or not all(isinstance(each, tuple | list) and len(each) in (2, 3) for each in samples):
            raise UserError(
                f"Expected samples (x, y) or (x, y, owner) from {name} of data.target={target}, got "
                f"{'none' if not samples else type(samples[0]).__name__}.",
                code="wrong-result", name=name,
            )  # fmt: skip
        columns = list(zip(*samples, strict=True))
        try:
            x, y = (np.stack([np.asarray(value) for value in column]) for column in columns[:2])
        except ValueError as error:
            raise UserError(
                f"data.target={target}: samples must have one shape ({error}).",
                code="unequal-shapes", name=target,
            ) from error  # fmt: skip
        owners = np.asarray(columns[2]) if len(columns) == 3 else None
        return x, y, owners, isinstance(columns[0][0], torch.Tensor)
    raise UserError(
        f"Expected data.target={target} to have {' or '.join(loaders)}, got neither: add it.",
        code="incomplete", name=target, lacks=loaders,
    )  # fmt: skip
