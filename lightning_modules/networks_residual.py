"""Residual networks: FeMAM's slim ResNet, torchvision's ResNet-18, and FedEM's MobileNet-v2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from archipelago.core.settings import setting
from lightning_modules.networks_base import NETWORKS, DefaultFor, Network, check_images


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut: a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNetSlim(Network):
    """FeMAM's ResNet: one block each of widths 8, 16, 32 and 64, a 4x4 average pool and one linear layer."""

    head = ("fc1",)

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(
            ResidualBlock(8, 8, stride=1),
            ResidualBlock(8, 16, stride=2),
            ResidualBlock(16, 32, stride=2),
            ResidualBlock(32, 64, stride=2),
        )
        # Three strides of 2 round up; the average pool rounds down.
        self.fc1 = nn.Linear(64 * (math.ceil(height / 8) // 4) * (math.ceil(width / 8) // 4), outputs)

    def features(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm1(self.conv1(x))))
        return F.avg_pool2d(x, 4).flatten(1)


@NETWORKS.register("resnet_slim", "slim ResNet of FeMAM for CIFAR-100 and Tiny ImageNet",
                   default_for=[DefaultFor(shape=(3, 32, 32), classes=100), DefaultFor(side=64)])  # fmt: skip
def resnet_slim(input_shape: tuple[int, ...], outputs: int) -> Network:
    check_images("resnet_slim", input_shape, outputs, smallest=25)
    return ResNetSlim(input_shape, outputs)


# -- Networks of torchvision --------------------------------------------------------------------------------

GROUPS = 32  # of a GroupNorm, as its paper has it; fewer where the channels are not a multiple


def _models() -> Any:
    """torchvision.models; imported when it is needed, since it takes seconds."""
    import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision)

    # isort: split
    import torchvision.models

    return torchvision.models


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm of up to 32 groups: no statistics of the batch, hence none to average over clients."""
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class TorchvisionNetwork(Network):
    """A network of torchvision whose last layer was taken off to be our classifier."""

    head = ("fc1",)

    def __init__(self, backbone: nn.Module, fc1: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc1 = fc1

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.backbone(x)
        return features


def _any_channels(first: nn.Conv2d, channels: int) -> nn.Conv2d:
    """The first convolution, for images of another number of channels than three."""
    if channels == first.in_channels:
        return first
    return nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]  # torch's stubs: a tuple of two, as its constructor takes
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )


@dataclass
class NormOptions:
    """`model.norm=group`"""

    norm: str = setting("batch", "resnet18, mobilenet_v2: BatchNorm or GroupNorm", choices=("batch", "group"))


@NETWORKS.register("resnet18", "torchvision's ResNet-18; model.norm=group takes GroupNorm for BatchNorm",
                   options=NormOptions)  # fmt: skip
def resnet18(input_shape: tuple[int, ...], outputs: int, options: NormOptions) -> Network:
    check_images("resnet18", input_shape, outputs, smallest=8)
    norm = group_norm if options.norm == "group" else nn.BatchNorm2d
    network = _models().resnet18(weights=None, num_classes=outputs, norm_layer=norm)
    network.conv1 = _any_channels(network.conv1, input_shape[0])
    fc1, network.fc = network.fc, nn.Identity()
    return TorchvisionNetwork(network, fc1)


@NETWORKS.register("mobilenet_v2", "torchvision's MobileNet-v2 (FedEM's network for CIFAR, not pre-trained)",
                   options=NormOptions)  # fmt: skip
def mobilenet_v2(input_shape: tuple[int, ...], outputs: int, options: NormOptions) -> Network:
    check_images("mobilenet_v2", input_shape, outputs, smallest=8)
    norm = group_norm if options.norm == "group" else nn.BatchNorm2d
    network = _models().mobilenet_v2(weights=None, num_classes=outputs, norm_layer=norm)
    network.features[0][0] = _any_channels(network.features[0][0], input_shape[0])
    dropout, fc1 = network.classifier
    network.classifier = dropout
    return TorchvisionNetwork(network, fc1)
