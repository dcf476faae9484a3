"""What a network is, the registry of networks, and which one is taken where none is named.

A network of your own is a function or class `(input_shape, outputs)` that gives a torch module, chosen by its import
path (`model=my_module.my_network`) or by a name under `@NETWORKS.register`. With `options=Dataclass` it is given an
instance of that dataclass as a third argument, and `model.OPTION=...` is a setting. What else it may declare:
`default_for=[DefaultFor(...)]`, the samples for which `model=auto` means it. The fully-connected layers at the end of a
module are its head, unless it names others in an attribute `head`, the classifier last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import ModelSettings


class Network(nn.Module):
    """A backbone and a head: `forward` is the classifier applied to `features`."""

    head: tuple[str, ...]

    @property
    def classifier(self) -> str:
        """The name of the last fully-connected layer."""
        return self.head[-1]

    def features(self, x: Tensor) -> Tensor:
        """What the classifier sees, of shape (N, its width)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (or predicted values) of shape (N, outputs)."""
        logits: Tensor = getattr(self, self.classifier)(self.features(x))
        return logits


# (shape of a sample, number of outputs), and its options if it declares any: gives a torch module.
NetworkBuilder = Callable[..., nn.Module]
NETWORKS: Registry[NetworkBuilder] = Registry("model", section="model")


def build_network(settings: ModelSettings, input_shape: tuple[int, ...], classes: int | None) -> nn.Module:
    """The network that `model=...` names, for samples of this shape; `classes` is None for a regression."""
    name = default_network(input_shape, classes) if settings.name == "auto" else settings.name
    entry = NETWORKS.entry(name)
    options = [] if entry.options is NoOptions else [entry.options_from(settings)]
    network = entry.value(input_shape, 1 if classes is None else classes, *options)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"Expected model '{name}' to make a torch.nn.Module, got {type(network).__name__}: return the module from "
            "the function (input_shape, outputs) that it names.",
            code="wrong-result", name=name,
        )  # fmt: skip
    return network


# -- Which network, and is it one for these samples? ----------------------------------------------------


class DefaultFor(NamedTuple):
    """Samples for which a network is what `model=auto` means, as it declares with `default_for=[...]`.

    Of several networks the one that says most about the samples is taken: the order of the fields is what counts.
    """

    shape: tuple[int, ...] = ()  # exactly this one; (): any
    classes: int = 0  # exactly so many, a regression having 1; 0: any number
    side: int = 0  # images at least so many pixels high and wide; 0: not only images
    channels: int = 0  # exactly so many; 0: any number
    dimensions: int = 0  # of a sample; 0: any number

    def fits(self, shape: tuple[int, ...], classes: int) -> bool:
        """Whether samples are of this kind."""
        is_image = len(shape) == 3
        return (
            self.shape in ((), shape)
            and self.classes in (0, classes)
            and (not self.side or (is_image and min(shape[1:]) >= self.side))
            and (not self.channels or (is_image and shape[0] == self.channels))
            and self.dimensions in (0, len(shape))
        )


def default_network(input_shape: tuple[int, ...], classes: int | None) -> str:
    """What `model=auto` means for samples of this shape; for a regression `classes` is None, 0 or 1.

    Small images get `cnn_digits` rather than `mlp` because it is measurably better where both are cheap:
    IFCA with 4 models on digits in 4 rotations (20 clients, 20 rounds, defaults, 14 seeds) ends at 95.5%
    against 94.1% and finds the ground-truth groups in 11 runs against 8, for 1.6 ms a step against 0.7 ms.
    """
    shape, count = tuple(input_shape), max(classes or 1, 1)
    fitting = [
        (kind, entry.name)
        for entry in NETWORKS.values()
        for kind in entry.capabilities.get("default_for", ())
        if kind.fits(shape, count)
    ]
    return max(fitting)[1]


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) if shape else "() (a single number)"


def check_samples(name: str, input_shape: tuple[int, ...], outputs: int) -> None:
    """Refuse samples without features, and outputs that are none."""
    if not input_shape or min(input_shape) < 1:
        raise UserError(
            f"Model '{name}' expects samples with at least one feature, but the data has samples of shape "
            f"{_written(input_shape)}; no network can use these: check the data set.",
            code="unfit-data", model=name,
        )  # fmt: skip
    if outputs < 1:
        raise UserError(
            f"Model '{name}' expects at least one output, but the data asks for {outputs}: "
            "check the number of classes of the data set.",
            code="unfit-data", model=name,
        )  # fmt: skip


def check_images(name: str, input_shape: tuple[int, ...], outputs: int, *, smallest: int) -> None:
    """Refuse samples that are not images of at least `smallest` pixels a side."""
    check_samples(name, input_shape, outputs)
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UserError(
            f"Model '{name}' expects images (channels x height x width) of at least {smallest}x{smallest} "
            f"pixels, but the data has samples of shape {_written(input_shape)}: "
            f"use model={default_network(input_shape, outputs)} instead.",
            code="unfit-data", model=name,
        )  # fmt: skip
