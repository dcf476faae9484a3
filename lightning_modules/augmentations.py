"""Augmentation: what becomes of the inputs of a batch of local training, in the order of `local.augment=[...]`.

    local.augment=[crop,flip] local.crop_padding=4
    local.augment=[torchvision.transforms.v2.RandomRotation] local.augment_options.RandomRotation.degrees=15

Only local training sees augmented samples: evaluations, comparisons of models by their loss and full-batch gradients
see them as they are. Every batch draws with the client's own key (seed, slot, round, client, step), so that the same
client sees the same pictures on any number of actors and after a resume.

One of your own is a subclass of `Augmentation` under `@AUGMENTATIONS.register`, or named by its import path. `draw`
makes one row of random numbers for each sample, `apply` uses them row by row: that is what lets the engine `stacked` do
all clients of a device at once. Any module that maps an image to one of its shape works by its import path, such as
torchvision's v2 transforms; it draws from global generators, which are seeded for it, and is called image by image, on
values as they were before normalisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator, seeded_globals
from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import LocalSettings, setting

Drawn = Mapping[str, Tensor]  # by name, a row for each sample
Numbers = Mapping[str, npt.NDArray[Any]]


class Augmentation:
    """Changes inputs at random. Subclasses give `draw` and `apply`."""

    Options: ClassVar[type] = NoOptions
    batched: ClassVar[bool] = (
        True  # `apply` looks at one row for one sample: batches of many clients can be joined
    )
    pixels: ClassVar[bool] = False  # wants values as they were before normalisation
    images: ClassVar[bool] = True  # wants samples of shape (channels, height, width)

    def __init__(self, options: Any) -> None:
        self.options = options

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        """The random numbers of `count` samples, by name, a row for each sample."""
        raise NotImplementedError(f"{type(self).__name__} has no draw")

    def apply(self, x: Tensor, drawn: Drawn, black: Tensor) -> Tensor:
        """The samples (count, ...) after it; `black` is what zero is after normalisation, of each channel."""
        raise NotImplementedError(f"{type(self).__name__} has no apply")


class AugmentationRegistry(Registry[type[Augmentation]]):
    """Augmentations; an import path may lead to a module that maps images to images as well."""

    def _import(self, path: str) -> None:
        import archipelago.core.torchvision_operators  # noqa: F401  (before the first import of torchvision)

        super()._import(path)

    def adopt(self, path: str, about: str, found: Any) -> None:
        if isinstance(found, type) and issubclass(found, Augmentation):
            super().adopt(path, about, found)
        elif isinstance(found, type) and issubclass(found, nn.Module):
            made = type(found.__name__, (ModuleAugmentation,), {"kind": found, "origin": found, "path": path})
            super().adopt(path, about or f"{found.__name__}, image by image", made)
        else:
            raise UserError(
                f"Expected {self.kind} '{path}' to be a subclass of Augmentation or a module that maps an image to an "
                f"image, got {found!r}: name another one.",
                code="wrong-kind", kind=self.kind, name=path,
            )  # fmt: skip


AUGMENTATIONS: AugmentationRegistry = AugmentationRegistry("augmentation", section="local")


class Augmentations:
    """The augmentations of an experiment, in order."""

    def __init__(self, local: LocalSettings, mean: npt.ArrayLike = 0.0, std: npt.ArrayLike = 1.0) -> None:
        self.steps = [_made(name, local) for name in local.augment]
        self._mean, self._std = (torch.from_numpy(np.array(each, np.float32)) for each in (mean, std))

    def __bool__(self) -> bool:
        return bool(self.steps)

    def why_not_batched(self) -> str:
        """Why many clients' batches cannot be augmented together; empty if they can."""
        odd = [type(each).__name__ for each in self.steps if not each.batched]
        return f"the augmentation {odd[0]} is not batched" if odd else ""

    def draws(self, seed: int, step: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """The numbers of one step of one training of one client, whose seed this is."""
        found: dict[str, npt.NDArray[Any]] = {}
        for number, each in enumerate(self.steps):
            rng = generator(seed, f"augmentation {number}", round=step)
            found |= {f"{number}.{name}": rows for name, rows in each.draw(rng, count).items()}
        return found

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """Normalised inputs (count, ...), augmented and normalised."""
        shape = (-1,) + (1,) * (x.ndim - 2)
        mean, std = (each.reshape(shape).to(x.device) for each in (self._mean, self._std))
        for number, each in enumerate(self.steps):
            own = {
                name.partition(".")[2]: rows for name, rows in drawn.items() if name.startswith(f"{number}.")
            }
            if each.pixels:
                x = (each.apply(x * std + mean, own, torch.zeros_like(mean)) - mean) / std
            else:
                x = each.apply(x, own, -mean / std)
        return x

    def of_step(self, x: Tensor, seed: int, step: int) -> Tensor:
        """The inputs of one step of a training, augmented."""
        drawn = self.draws(seed, step, len(x))
        return self.apply(x, {name: torch.from_numpy(rows).to(x.device) for name, rows in drawn.items()})


def _made(name: str, local: LocalSettings) -> Augmentation:
    entry = AUGMENTATIONS.entry(name)
    if issubclass(entry.value, ModuleAugmentation):
        return entry.value(local.augment_options.get(entry.value.__name__, {}))
    return entry.value(entry.options_from(local))


def check_augmentations(local: LocalSettings, shape: Sequence[int] | None = None) -> None:
    """Refuse what is unknown, listed twice, misses its options, or (`shape` given) does not fit the samples."""
    entries = AUGMENTATIONS.listed(local.augment, "local.augment")
    for number, entry in enumerate(entries):
        if entry in entries[:number]:
            raise UserError(
                f"Expected '{entry.name}' once in local.augment=[...], got it twice: leave one out.",
                code="given-twice", setting="local.augment", given=entry.name,
            )  # fmt: skip
    modules = {
        entry.value.__name__: entry for entry in entries if issubclass(entry.value, ModuleAugmentation)
    }
    for name in local.augment_options:
        if name not in modules:
            raise UserError(
                f"Expected an augmentation of that name in local.augment beside local.augment_options.{name}, got "
                f"local.augment=[{','.join(local.augment)}], with which nobody reads it: leave it out.",
                code="unread", setting=f"local.augment_options.{name}",
            )  # fmt: skip
    for entry in entries:
        made = _made(entry.name, local)
        if shape is not None:
            _check_shape(made, entry.name, tuple(shape))


def _check_shape(made: Augmentation, name: str, shape: tuple[int, ...]) -> None:
    if made.images and len(shape) != 3:
        raise UserError(
            f"Expected images for local.augment=[{name}], got samples of shape {shape}: leave it out, or choose data "
            "with images.",
            code="unfit-data", setting="local.augment", given=name,
        )  # fmt: skip
    if not isinstance(made, ModuleAugmentation):
        return
    drawn = {key: torch.from_numpy(rows) for key, rows in made.draw(generator(0, "probe"), 2).items()}
    try:
        tried = made.apply(torch.full((2, *shape), 0.5), drawn, torch.zeros(1, 1, 1))
        cause = "" if tried.shape == (2, *shape) else f"it makes images of shape {tuple(tried.shape[1:])}"
    except Exception as error:  # whatever the module says of an image
        cause = " ".join(f"{type(error).__name__}: {error}".split())
    if cause:
        raise UserError(
            f"Expected local.augment=[{name}] to map an image of shape {shape} to one of the same shape, got: {cause}; "
            "give its arguments as local.augment_options.CLASS.NAME=VALUE, or choose another one.",
            code="wrong-result", name=name,
        )  # fmt: skip


@dataclass
class CropOptions:
    """`local.crop_padding=4`"""

    crop_padding: int = setting(
        4, "augment=[crop]: pixels of black on each side before a random crop", at_least=1
    )


@AUGMENTATIONS.register("crop", "a random crop of the padded image (He et al. 2016)", label="random crop")
class Crop(Augmentation):
    """Pad by `crop_padding` on each side, cut a window of the old size at random."""

    Options = CropOptions

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        return {"offset": rng.integers(0, 2 * self.options.crop_padding + 1, (count, 2), np.int64)}

    def apply(self, x: Tensor, drawn: Drawn, black: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        start = drawn["offset"] - self.options.crop_padding
        rows = start[:, :1] + torch.arange(height, device=x.device)
        columns = start[:, 1:] + torch.arange(width, device=x.device)
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
        at = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
        at = at.reshape(count, 1, -1).expand(-1, channels, -1)
        moved = x.reshape(count, channels, -1).gather(2, at).reshape(x.shape)
        return torch.where(inside[:, None], moved, black)


@dataclass
class FlipOptions:
    """`local.flip_chance=0.5`"""

    flip_chance: float = setting(0.5, "augment=[flip]: how often an image is mirrored", at_least=0, at_most=1)


@AUGMENTATIONS.register("flip", "left and right exchanged in a part of the images", label="random flip")
class Flip(Augmentation):
    """Mirrored with probability `flip_chance`."""

    Options = FlipOptions

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        return {"flip": rng.random(count) < self.options.flip_chance}

    def apply(self, x: Tensor, drawn: Drawn, black: Tensor) -> Tensor:
        return torch.where(drawn["flip"][:, None, None, None], x.flip(-1), x)


class ModuleAugmentation(Augmentation):
    """A module that maps images to images, image by image, with the global generators seeded for the batch."""

    batched, pixels = False, True
    kind: ClassVar[type[nn.Module]]
    path: ClassVar[str]

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        arguments = {
            name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
        }
        try:
            self.module = self.kind(**arguments)
        except Exception as error:  # whatever torchvision or the user's own class says of its arguments
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"local.augment=[{self.path}] cannot be made with {arguments}: {cause}. Give its arguments as "
                f"local.augment_options.{self.kind.__name__}.NAME=VALUE.",
                code="cannot-be-made", name=self.path,
            ) from error  # fmt: skip

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        return {"seed": rng.integers(0, 2**62, count, np.int64)}

    def apply(self, x: Tensor, drawn: Drawn, black: Tensor) -> Tensor:
        if not len(x):
            return x
        with seeded_globals(int(drawn["seed"][0])), torch.no_grad():
            return torch.stack([self.module(image) for image in x])
