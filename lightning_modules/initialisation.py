"""`model.init`: how the weights of linear and convolutional layers are drawn at the start.

`default` leaves what the module drew itself. Everything else draws the weights of its `nn.Linear` and `nn.Conv*d`
layers again; biases, norms and frozen weights stay. Glorot and Bengio's (Xavier) variance is 2 / (fan_in + fan_out),
He's (Kaiming) 2 / fan_in; PyTorch's own start has 1 / (3 fan_in), so that every layer shrinks its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from archipelago.core.settings import MODEL_STARTS

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# How `model.init` draws the weights of (linear layers, convolutions).
_DRAWS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "xavier_normal": (nn.init.xavier_normal_, nn.init.xavier_normal_),
    "xavier_uniform": (nn.init.xavier_uniform_, nn.init.xavier_uniform_),
    "kaiming_normal": (nn.init.kaiming_normal_, nn.init.kaiming_normal_),
    "kaiming_uniform": (nn.init.kaiming_uniform_, nn.init.kaiming_uniform_),
    "xavier_normal+kaiming_uniform": (nn.init.xavier_normal_, nn.init.kaiming_uniform_),
}
assert set(MODEL_STARTS) == {"default", *_DRAWS}


def initialise(module: nn.Module, start: str) -> None:
    """Draw the weights of a module as `model.init` says, from torch's generator as it is now."""
    linear, convolution = _DRAWS[start]
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad:
            linear(layer.weight)
        elif isinstance(layer, _CONVOLUTIONS) and layer.weight.requires_grad:
            convolution(layer.weight)
