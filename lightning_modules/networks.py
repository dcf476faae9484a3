"""The networks of the papers, as plain torch modules that take a batch and give logits.

Fully-connected layers are called fc1, fc2, ... in order. They are the head (the papers select it by names
containing "fc"), everything before them is the backbone, and the last of them is the classifier, whose
weight and bias are the last entries of the state dict. Layer widths follow the shape of the samples.
Weights are drawn by PyTorch's own initialisers from its global generator: build a network inside
`archipelago.core.randomness.seeded_torch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.settings import setting
from lightning_modules import networks_residual  # noqa: F401  (registers its networks)
from lightning_modules.networks_base import (
    NETWORKS,
    DefaultFor,
    Network,
    build_network,
    check_images,
    check_samples,
    default_network,
)

__all__ = ["NETWORKS", "DefaultFor", "Network", "build_network", "default_network"]


def pooled(x: Tensor) -> Tensor:
    """2x2 max-pooling of the ReLU, as the papers write it: the same bits, in less time.

    Both are monotone, so they can be exchanged, gradients included. Where no gradient is asked for, nobody needs to
    know which of the four was the largest. A forward pass of the CIFAR network takes 30 to 45% less time.
    """
    if torch.is_grad_enabled():
        return F.relu(F.max_pool2d(x, 2))
    height, width = (size // 2 * 2 for size in x.shape[-2:])
    rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
    return F.relu(torch.maximum(rows[..., 0::2], rows[..., 1::2]))


# -- Networks without convolutions: any shape of sample, flattened ----------------------------------------


class Linear(Network):
    """One fully-connected layer."""

    head = ("fc1",)

    def __init__(self, input_shape: tuple[int, ...], outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(input_shape), outputs, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class MLP(Network):
    """Fully-connected layers with ReLU between them; no hidden layer makes it `Linear`."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = (math.prod(input_shape), *hidden, outputs)
        self.head = tuple(f"fc{layer}" for layer in range(1, len(widths)))
        for name, before, after in zip(self.head, widths[:-1], widths[1:], strict=True):
            self.add_module(name, nn.Linear(before, after))

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for name in self.head[:-1]:
            x = F.relu(getattr(self, name)(x))
        return x


@NETWORKS.register("linear", "one linear layer with bias: softmax regression")
def linear(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_samples("linear", input_shape, outputs)
    return Linear(input_shape, outputs)


@NETWORKS.register("linear_regression", "a linear map to one number, without bias (FedSoft, synthetic data)",
                   default_for=[DefaultFor(dimensions=1, classes=1)])  # fmt: skip
def linear_regression(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Predictions have shape (N, 1), like every other network's with one output."""
    check_samples("linear_regression", input_shape, outputs)
    if outputs != 1:
        raise UserError(
            f"Model 'linear_regression' expects data with one number to predict, but the data has {outputs} "
            f"classes: use model={default_network(input_shape, outputs)} instead.",
            code="unfit-data", model="linear_regression",
        )  # fmt: skip
    return Linear(input_shape, 1, bias=False)


@dataclass
class MlpOptions:
    """`model.hidden=[64,32]`"""

    hidden: list[int] = setting([64], "mlp: widths of the hidden layers", at_least=1)


@NETWORKS.register("mlp", "fully-connected ReLU network with hidden layers of the widths in model.hidden",
                   options=MlpOptions, default_for=[DefaultFor()])  # fmt: skip
def mlp(input_shape: tuple[int, ...], outputs: int, options: MlpOptions) -> Network:
    check_samples("mlp", input_shape, outputs)
    hidden = tuple(options.hidden)
    if any(width < 1 for width in hidden):
        raise UserError(
            f"Model 'mlp' expects widths of at least 1 in model.hidden, but it has {list(hidden)}: "
            "try model.hidden=[64].",
            code="out-of-range", setting="model.hidden", given=hidden,
        )  # fmt: skip
    return MLP(input_shape, outputs, hidden)


# -- Small convolutional networks ---------------------------------------------------------------------------


class CnnDigits(Network):
    """One 3x3 convolution, one pool and two fully-connected layers."""

    head = ("fc1", "fc2")

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * (height // 2) * (width // 2), 64)
        self.fc2 = nn.Linear(64, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = pooled(self.conv1(x))
        return F.relu(self.fc1(x.flatten(1)))


@NETWORKS.register("cnn_digits", "small CNN for small images: 3x3 conv 16, pool, fc 64",
                   default_for=[DefaultFor(side=2)])  # fmt: skip
def cnn_digits(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_digits", input_shape, outputs, smallest=2)
    return CnnDigits(input_shape, outputs)


class CnnCifar(Network):
    """LeNet-like network of the CAM paper and the thesis (Tables A.2 and A.3).

    At 28x28 the first fully-connected layer has 256 inputs; the 400 of Table A.3 belongs to 32x32.
    """

    head = ("fc1", "fc2", "fc3")

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _after_two_5x5(height) * _after_two_5x5(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = pooled(self.conv1(x))
        x = pooled(self.conv2(x))
        return F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))


def _after_two_5x5(side: int) -> int:
    """What two rounds of (5x5 convolution without padding, 2x2 pool) leave of `side` pixels."""
    return ((side - 4) // 2 - 4) // 2


@NETWORKS.register("cnn_cifar", "LeNet-like CNN of CAM and the thesis for CIFAR-10 and PathMNIST",
                   default_for=[DefaultFor(side=16)])  # fmt: skip
def cnn_cifar(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_cifar", input_shape, outputs, smallest=16)
    return CnnCifar(input_shape, outputs)


class CnnFashion(Network):
    """Two 5x5 convolutions with BatchNorm and one linear layer (thesis, Tables A.1 and A.4).

    The second BatchNorm has 32 channels (Table A.1 prints 16) and both convolutions are padded by 2 (Table
    A.4 omits it), without which the printed widths of the linear layer would not fit.
    """

    head = ("fc1",)

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), outputs)

    def features(self, x: Tensor) -> Tensor:
        x = pooled(self.norm1(self.conv1(x)))
        x = pooled(self.norm2(self.conv2(x)))
        return x.flatten(1)


@NETWORKS.register("cnn_fashion", "BatchNorm CNN of CAM and the thesis for Fashion-MNIST and TissueMNIST",
                   default_for=[DefaultFor(side=16, channels=1)])  # fmt: skip
def cnn_fashion(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_fashion", input_shape, outputs, smallest=4)
    return CnnFashion(input_shape, outputs)


class CnnFemnist(Network):
    """Two padded 5x5 convolutions (32, 64) and a hidden layer of 248, as FeSEM's code has it (LEAF: 2048)."""

    head = ("fc1", "fc2")

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 248)
        self.fc2 = nn.Linear(248, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = pooled(self.conv1(x))
        x = pooled(self.conv2(x))
        return F.relu(self.fc1(x.flatten(1)))


@NETWORKS.register("cnn_femnist", "CNN of FeSEM for FEMNIST: 5x5 convs 32 and 64, fc 248",
                   default_for=[DefaultFor(shape=(1, 28, 28), classes=62)])  # fmt: skip
def cnn_femnist(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_femnist", input_shape, outputs, smallest=4)
    return CnnFemnist(input_shape, outputs)


class CnnFedEM(Network):
    """Two unpadded 5x5 convolutions (32, 64) and a hidden layer of 2048, as in FedEM's code for EMNIST."""

    head = ("fc1", "fc2")

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _after_two_5x5(height) * _after_two_5x5(width), 2048)
        self.fc2 = nn.Linear(2048, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = pooled(self.conv1(x))
        x = pooled(self.conv2(x))
        return F.relu(self.fc1(x.flatten(1)))


@NETWORKS.register("cnn_fedem", "CNN of FedEM for EMNIST and FEMNIST: 5x5 convs 32 and 64, fc 2048")
def cnn_fedem(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_fedem", input_shape, outputs, smallest=16)
    return CnnFedEM(input_shape, outputs)


class CnnCelebA(Network):
    """Four times (3x3 convolution of 32, BatchNorm, pool, ReLU) and one linear layer (FeSEM, 84x84).

    Pools round up, as TensorFlow's "same" pools do (84, 42, 21, 11, 6), which gives the 1152 inputs of the
    original classifier. The original BatchNorm normalises by the batch even when it predicts; ours uses the
    running statistics then, so that a prediction does not depend on the samples beside it.
    """

    head = ("fc1",)

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.blocks = nn.Sequential()
        for block in range(4):
            self.blocks.append(nn.Conv2d(channels if block == 0 else 32, 32, 3, padding=1))
            self.blocks.append(nn.BatchNorm2d(32))
            self.blocks.append(nn.MaxPool2d(2, ceil_mode=True))
            self.blocks.append(nn.ReLU())
        self.fc1 = nn.Linear(32 * math.ceil(height / 16) * math.ceil(width / 16), outputs)

    def features(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x.flatten(1)


@NETWORKS.register("cnn_celeba", "BatchNorm CNN of FeSEM for CelebA at 84x84: four 3x3 convs of 32",
                   default_for=[DefaultFor(shape=(3, 84, 84))])  # fmt: skip
def cnn_celeba(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_celeba", input_shape, outputs, smallest=16)
    return CnnCelebA(input_shape, outputs)


class CnnLetters(Network):
    """FedSoft's network for letters: two padded 5x5 convolutions and two linear layers.

    The pools are the only non-linearity before the output. The original ends in ReLU and softmax and is then
    trained with cross-entropy, which takes a softmax again. `published=True` gives that output; without it
    the network gives plain logits. What the second softmax changes: cross-entropy sees numbers in [0, 1], so
    with C classes the loss cannot fall below log(1 + (C-1)/e), which is 2.32 for 26 letters, and gradients
    are small. The predicted class is the same wherever some logit is positive; elsewhere the original's
    ReLU makes all classes equal. Sums of logits (CAM, FeMAM) mean something for the plain output only.
    """

    head = ("fc1", "fc2")

    def __init__(self, input_shape: tuple[int, ...], outputs: int, *, published: bool = False) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.published = published
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.fc2 = nn.Linear(512, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x), 2)
        x = F.max_pool2d(self.conv2(x), 2)
        features: Tensor = self.fc1(x.flatten(1))
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return torch.softmax(F.relu(logits), dim=1) if self.published else logits


@NETWORKS.register("cnn_letters", "CNN of FedSoft for letters, plain logits: 5x5 convs 32 and 64, fc 512",
                   default_for=[DefaultFor(shape=(1, 28, 28), classes=26)])  # fmt: skip
def cnn_letters(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_letters", input_shape, outputs, smallest=4)
    return CnnLetters(input_shape, outputs)


@NETWORKS.register("cnn_letters_published", "cnn_letters with FedSoft's own output: ReLU, then softmax")
def cnn_letters_published(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_letters_published", input_shape, outputs, smallest=4)
    return CnnLetters(input_shape, outputs, published=True)


class CnnFedSoftCifar(Network):
    """FedSoft's network for CIFAR-10: three pairs of 3x3 convolutions and three fully-connected layers.

    FedSoft draws linear weights by Xavier-normal and convolutions by Kaiming-uniform; ours are PyTorch's.
    """

    head = ("fc1", "fc2", "fc3")

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv4 = nn.Conv2d(128, 128, 3, padding=1)
        self.conv5 = nn.Conv2d(128, 256, 3, padding=1)
        self.conv6 = nn.Conv2d(256, 256, 3, padding=1)
        self.fc1 = nn.Linear(256 * (height // 8) * (width // 8), 1024)
        self.fc2 = nn.Linear(1024, 512)
        self.fc3 = nn.Linear(512, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = pooled(self.conv2(F.relu(self.conv1(x))))
        x = pooled(self.conv4(F.relu(self.conv3(x))))
        x = pooled(self.conv6(F.relu(self.conv5(x))))
        return F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))


@NETWORKS.register("cnn_fedsoft_cifar", "CNN of FedSoft for CIFAR-10: six 3x3 convs, fc 1024 and 512")
def cnn_fedsoft_cifar(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("cnn_fedsoft_cifar", input_shape, outputs, smallest=8)
    return CnnFedSoftCifar(input_shape, outputs)
