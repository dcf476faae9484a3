"""Modules of users that do something the stacked engine does not know of, each in its own way. Images of 3x32x32."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.base import FederatedModule


class Small(nn.Module):
    """A convolution, a norm, a linear layer."""

    head = ("fc",)

    def __init__(self, convolution: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = convolution or nn.Conv2d(3, 4, 4, stride=4)
        self.norm = norm or nn.Identity()
        self.fc = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.conv(x))).flatten(1))


class _Odd(FederatedModule):
    def __init__(self, classes: int | None, local: Any, network: nn.Module | None = None) -> None:
        super().__init__(network or Small(), classes=classes, local=local)


class OwnTrainingStep(_Odd):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x * 1.5, y), batch_idx)


class _Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride)


class OwnConvolution(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, Small(_Standardised(3, 4, 4, stride=4)))


class _Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnBatchNorm(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, Small(norm=_Doubled(4)))


class NoStatistics(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, Small(norm=nn.BatchNorm2d(4, track_running_stats=False)))


class LearnedLoss(_Odd):
    """A temperature in the loss, learned with the rest."""

    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def loss(self, outputs: Tensor, y: Tensor, reduction: str = "none") -> Tensor:
        return super().loss(outputs / self.temperature, y, reduction)


class _Averaging(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(dim=(0, 2, 3))
        return self.fc(F.relu(y).flatten(1))


class OwnBuffer(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, _Averaging())


class _Idle(Small):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))


class UnusedParameter(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, _Idle())


class NotCopied(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local)
        self.lock = threading.Lock()


class _NormTwice(Small):
    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(2 * self.norm(self.conv(x)) + 1)).flatten(1))


class SharedBatchNorm(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, _NormTwice())


class _DropTwice(Small):
    kept: list[float] = []  # noqa: RUF012  (what the last pass let through, for a test)

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(1)
        once = self.drop(torch.ones_like(y))
        twice = once * self.drop(torch.ones_like(y))
        if self.training and self.drop.training:
            type(self).kept = [_share(twice)]
        return self.fc(y * twice)


def _share(values: Tensor) -> float:
    """How many are not zero, also where torch has wrapped them."""
    plain: Any = values.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(plain):
        plain = torch._C._functorch.get_unwrapped(plain)
    return float((plain != 0).float().mean())


class SharedDropout(_Odd):
    def __init__(self, classes: int | None, local: Any) -> None:
        super().__init__(classes, local, _DropTwice())
