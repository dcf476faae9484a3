"""What a network is, the registry of networks, and which one is taken where none is named."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.registry import Registry
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


NetworkBuilder = Callable[[tuple[int, ...], int, ModelSettings], Network]
NETWORKS: Registry[NetworkBuilder] = Registry("model")


# -- Which network, and is it one for these samples? ----------------------------------------------------


# Shapes and classes by which a paper's data set is known, where its network is not the one of the shape.
_PUBLISHED: dict[tuple[tuple[int, ...], int | None], str] = {
    ((1, 28, 28), 62): "cnn_femnist",  # FeSEM's FEMNIST
    ((1, 28, 28), 26): "cnn_letters",  # FedSoft's letters
    ((3, 32, 32), 100): "resnet_slim",  # FeMAM's CIFAR-100
}


def default_network(input_shape: tuple[int, ...], classes: int | None) -> str:
    """What `model=auto` means for samples of this shape; for a regression `classes` is None, 0 or 1.

    Small images get `cnn_digits` rather than `mlp` because it is measurably better where both are cheap:
    IFCA with 4 models on digits in 4 rotations (20 clients, 20 rounds, defaults, 14 seeds) ends at 95.5%
    against 94.1% and finds the planted groups in 11 runs against 8, for 1.6 ms a step against 0.7 ms.
    """
    if len(input_shape) == 1 and (classes is None or classes <= 1):
        return "linear_regression"
    if len(input_shape) != 3:
        return "mlp"
    channels, side = input_shape[0], min(input_shape[1:])
    if (tuple(input_shape), classes) in _PUBLISHED:
        return _PUBLISHED[tuple(input_shape), classes]
    if tuple(input_shape) == (3, 84, 84):
        return "cnn_celeba"
    if side >= 64:
        return "resnet_slim"
    if side >= 16:
        return "cnn_fashion" if channels == 1 else "cnn_cifar"
    return "cnn_digits" if side >= 2 else "mlp"


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) if shape else "() (a single number)"


def check_samples(name: str, input_shape: tuple[int, ...], outputs: int) -> None:
    """Refuse samples without features, and outputs that are none."""
    if not input_shape or min(input_shape) < 1:
        raise UserError(
            f"Model '{name}' expects samples with at least one feature, but the data has samples of shape "
            f"{_written(input_shape)}; no network can use these: check the data set."
        )
    if outputs < 1:
        raise UserError(
            f"Model '{name}' expects at least one output, but the data asks for {outputs}: "
            "check the number of classes of the data set."
        )


def check_images(name: str, input_shape: tuple[int, ...], outputs: int, *, smallest: int) -> None:
    """Refuse samples that are not images of at least `smallest` pixels a side."""
    check_samples(name, input_shape, outputs)
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UserError(
            f"Model '{name}' expects images (channels x height x width) of at least {smallest}x{smallest} "
            f"pixels, but the data has samples of shape {_written(input_shape)}: "
            f"use model={default_network(input_shape, outputs)} instead."
        )
