"""LightningModules of users, for tests: one without the federated contract, one with Dropout."""

from __future__ import annotations

import random

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import lightning
import numpy as np
import torch
from torch import nn

from lightning_modules.base import FederatedModule


class ForeignModule(lightning.LightningModule):
    """Only what Lightning itself asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


class ForeignConvolution(ForeignModule):
    """A backbone and two fully-connected layers, for colour images of 32x32, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.body = nn.Sequential(nn.Conv2d(3, 2, 8, stride=8), nn.ReLU(), nn.Flatten())
        self.hidden = nn.Linear(32, 8)
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(self.body(x))))


class DropoutNetwork(nn.Module):
    head = ("fc",)
    classifier = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(x.flatten(1)))


class DropoutModule(FederatedModule):
    """The federated contract, with random draws inside the network."""

    def __init__(self, classes: int | None, local: object) -> None:
        super().__init__(DropoutNetwork(), classes=classes, local=local)  # type: ignore[arg-type]


class Drawing(FederatedModule):
    """Draws from Python's and NumPy's global generators: when it is made, in training and in evaluation."""

    def __init__(self, classes: int | None, local: object) -> None:
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        super().__init__(network, classes=classes, local=local)  # type: ignore[arg-type]
        with torch.no_grad():
            network[1].weight += 0.1 * random.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * np.random.rand() + 0.1 * random.random())  # noqa: NPY002


class Growing(ForeignModule):
    """Gets a parameter in its first step."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.zeros(10))
        return super().training_step(batch, batch_idx)


class TwoOptimizers(ForeignModule):
    """Something local training does not support."""

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


class Needy(ForeignModule):
    """Asks for more than it is given."""

    def __init__(self, width: int, *, depth: int, classes: int | None = None) -> None:
        super().__init__()


class Faulty(ForeignModule):
    def __init__(self) -> None:
        raise ValueError("not today")


class _OwnDropout(DropoutNetwork):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.drop = layer  # type: ignore[assignment]


class AlphaDropoutModule(FederatedModule):
    """Draws of a kind that the stacked engine has no form for."""

    def __init__(self, classes: int | None, local: object) -> None:
        super().__init__(_OwnDropout(nn.AlphaDropout(0.5)), classes=classes, local=local)  # type: ignore[arg-type]


class DataDependent(nn.Module):
    """Decides by its values, which nothing that is batched can do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.sum() > 0) else x + 1


class _Gated(DropoutNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()  # type: ignore[assignment]
        self.gate = DataDependent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.gate(x.flatten(1)))


class DataDependentModule(FederatedModule):
    """A module that torch cannot batch."""

    def __init__(self, classes: int | None, local: object) -> None:
        super().__init__(_Gated(), classes=classes, local=local)  # type: ignore[arg-type]


class _Centred(DropoutNetwork):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.fc(flat - flat.mean(dim=0))


class CentredModule(FederatedModule):
    """Rows of a batch change each other, by code of its own."""

    def __init__(self, classes: int | None, local: object) -> None:
        super().__init__(_Centred(), classes=classes, local=local)  # type: ignore[arg-type]
