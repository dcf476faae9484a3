"""Your own LightningModule, trained by every client.

python examples/own_module/my_module.py

On the command line, in this folder:

    archipelago model.target=my_module.Plain method=fedavg
    archipelago model.target=my_module.Smooth method=ifca+cam clusters=4 data.rotations=4

A LightningModule as it is (`Plain`) works with methods that only train and average. Methods that compare models by
their loss, add outputs of models or pull parameters need a loss per sample: a `FederatedModule` around your network
(`Smooth`).
A constructor is given `input_shape`, `classes` and `local` (settings of local training) where it has such parameters.
"""

from __future__ import annotations

import math

import archipelago.core.torchvision_operators  # isort: skip
import lightning
import torch
from torch import Tensor, nn

import archipelago as ar
from archipelago.core.settings import LocalSettings
from lightning_modules.base import FederatedModule


class Plain(lightning.LightningModule):
    """Nothing in it knows of federated learning; its own optimizer is used."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        hidden = [nn.Flatten(), nn.Linear(math.prod(input_shape), 48), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(48, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=0.005)


class Network(nn.Module):
    """A backbone and a head: methods like FedPer and CON ask which submodules are the head."""

    head = ("output",)
    classifier = "output"

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 48), nn.ReLU())
        self.output = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.backbone(x))


class Smooth(FederatedModule):
    """Your network and your loss, with the optimizer of the experiment's settings: every method takes it."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, local: LocalSettings) -> None:
        super().__init__(Network(math.prod(input_shape), classes), classes=classes, local=local)

    def loss(self, outputs: Tensor, y: Tensor, reduction: str = "none") -> Tensor:
        return nn.functional.cross_entropy(outputs, y, reduction=reduction, label_smoothing=0.05)


def main() -> list[ar.Run]:
    """Both, on digits that four groups of clients see turned."""
    shared = {
        "clients": 12,
        "rounds": 5,
        "data": {"name": "digits", "rotations": 4},
        "fleet": {"backend": "in_process"},
    }
    plain = ar.run(model={"target": "my_module.Plain"}, method="fedavg", name="my-plain-module", **shared)
    smooth = ar.run(
        model={"target": "my_module.Smooth"}, method="ifca", clusters=4, name="my-module", **shared
    )
    return [plain, smooth]


if __name__ == "__main__":
    for run in main():
        print(run)
