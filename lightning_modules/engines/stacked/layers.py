"""Layers that mix the rows of a batch, or draw random numbers, rewritten for batches that are padded and stacked.

A batch of the stacked engine has rows that only fill it up. Almost every layer treats rows one by one and needs no
change. BatchNorm averages over rows: here it averages over real rows alone. Dropout draws from the process's
generator, whose draws would depend on which clients are stacked: here each client draws from its own key.
Convolutions with one kernel per client become grouped convolutions, or one matrix product per client
(`unfold`), as the caller decides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Sides = tuple[int, int]  # vertical, horizontal
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass
class BatchContext:
    """What the rewritten layers must know of the batch that is passing, for one client (under vmap: for each)."""

    mask: Tensor | None = None  # (rows,) 1 for real rows; None: all are real and nothing is updated
    length: Tensor | None = None  # how many rows are real
    step: int = 0  # of the local training
    shortest: int = 2  # real rows of the shortest batch
    keys: Tensor | None = None  # (dropout layers,) this client's draws of this step
    updates: dict[str, Tensor] = field(default_factory=dict)  # new values of buffers, by name
    uses: dict[int, int] = field(
        default_factory=dict
    )  # how often each dropout layer has drawn for this batch


def batched_copy(module: nn.Module, context: BatchContext, *, unfold: bool) -> nn.Module:
    """A copy of a module whose layers know about padded rows; parameters keep their names."""
    made = copy.deepcopy(module)
    dropouts = 0
    for name, layer in made.named_modules():
        forward: Callable[[Tensor], Tensor] | None = None
        if isinstance(layer, BATCH_NORMS):
            forward = _masked_batch_norm(name, layer, context)
        elif isinstance(layer, DROPOUTS):
            forward = _keyed_dropout(dropouts, layer, context)
            dropouts += 1
        elif unfold and isinstance(layer, nn.Conv2d) and _is_plain(layer, (nn.Conv2d,)) and can_unfold(layer):
            forward = _unfolded_convolution(layer)
        if forward is not None:
            layer.forward = forward
    return made


def _is_plain(layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a layer's forward is that of one of torch's own kinds."""
    return any(type(layer).forward is kind.forward for kind in kinds)


def count_dropouts(module: nn.Module) -> int:
    """How many layers draw from keys."""
    return sum(isinstance(layer, DROPOUTS) for layer in module.modules())


def reason_against_layers(module: nn.Module) -> str:
    """The layer that cannot be batched, and why; empty if there is none."""
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, BATCH_NORMS) and layer.running_mean is None:
            return (
                f"layer '{name}' ({kind}) keeps no statistics, so that its outputs depend on the other rows"
            )
        if isinstance(layer, (*BATCH_NORMS, *DROPOUTS)) and not _is_plain(layer, (*BATCH_NORMS, *DROPOUTS)):
            return f"layer '{name}' ({kind}) has a forward of its own"
        if isinstance(layer, _BatchNorm) and not isinstance(layer, BATCH_NORMS):
            return f"layer '{name}' ({kind}) averages over rows in a way that has no masked form"
        if isinstance(layer, _DropoutNd) and not isinstance(layer, DROPOUTS):
            return f"layer '{name}' ({kind}) draws random numbers in a way that has no keyed form"
        if isinstance(layer, nn.RNNBase) and layer.dropout:
            return f"layer '{name}' ({kind}) draws random numbers inside (dropout={layer.dropout:g})"
    return ""


# -- BatchNorm ------------------------------------------------------------------------------------------------


def _masked_batch_norm(name: str, layer: _BatchNorm, context: BatchContext) -> Callable[[Tensor], Tensor]:
    """Statistics of real rows only; the new running statistics go to `context.updates`."""

    def forward(x: Tensor) -> Tensor:
        layer._check_input_dim(x)
        tracked = layer.running_mean is not None and layer.running_var is not None
        if context.mask is None or not (layer.training or not tracked):
            return F.batch_norm(
                x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps
            )
        assert context.length is not None
        if context.shortest * math.prod(x.shape[2:]) == 1:  # as torch says it
            raise ValueError(
                f"Expected more than 1 value per channel when training, got a batch of one in '{name}'"
            )
        dimensions = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        real = context.mask.reshape([-1] + [1] * (x.dim() - 1))
        count = (context.length * math.prod(x.shape[2:])).clamp_min(1)
        mean = (x * real).sum(dimensions) / count
        away = x - mean.reshape(shape)
        variance = (away.square() * real).sum(dimensions) / count
        y = away * (variance + layer.eps).rsqrt().reshape(shape)
        if layer.affine:
            y = y * layer.weight.reshape(shape) + layer.bias.reshape(shape)
        if tracked:
            share = layer.momentum
            if (
                share is None
            ):  # a cumulative mean, which restarts with every local training (DECISIONS.md, B2)
                share = 1.0 / (context.step + 1)
            unbiased = variance * count / (count - 1).clamp_min(1)
            for kind, new in (("running_mean", mean), ("running_var", unbiased)):
                key = f"{name}.{kind}"  # a layer that is used twice has been updated already
                before = context.updates.get(key, getattr(layer, kind))
                context.updates[key] = (1.0 - share) * before + share * new.detach()
        return y

    return forward


# -- Dropout --------------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF


def _hashed(numbers: Tensor) -> Tensor:
    """32 well-mixed bits of each number (the finaliser of MurmurHash3), in int64 arithmetic.

    >>> [int(n) for n in _hashed(torch.tensor([0, 1, 2]))]
    [0, 1364076727, 821347078]
    """
    mixed = numbers & _WORD
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _WORD
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _WORD
    return mixed ^ (mixed >> 16)


def _keyed_dropout(number: int, layer: _DropoutNd, context: BatchContext) -> Callable[[Tensor], Tensor]:
    """Each client's draws depend on its key alone, hence not on the clients beside it."""
    whole_channels = not isinstance(layer, nn.Dropout)

    def forward(x: Tensor) -> Tensor:
        if not layer.training or context.keys is None or layer.p == 0.0:
            return x
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if whole_channels else x.shape
        places = torch.arange(math.prod(shape), device=x.device)
        # A layer that is used twice draws twice: later uses take later places.
        use = context.uses.get(number, 0)
        context.uses[number] = use + 1
        # Hashed twice: the key decides where the sequence of a client begins, not only how it is turned.
        drawn = _hashed(_hashed(places + use * len(places)) ^ context.keys[number])
        kept = (drawn >= int(layer.p * 2**32)).to(x.dtype).reshape(shape)
        return x * kept if layer.p == 1.0 else x * kept / (1.0 - layer.p)

    return forward


# -- Convolutions ---------------------------------------------------------------------------------------------


def can_unfold(layer: nn.Conv2d) -> bool:
    """Whether a convolution can be written as one matrix product."""
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return plain and layer.dilation == (1, 1)


class _Columns(torch.autograd.Function):
    """im2col: (rows, channels, height, width) -> (rows, inputs of a pixel, pixels).

    The windows are a view, copied once: torch's own im2col launches a kernel for every sample on a GPU. The way back is
    torch's col2im, which does not.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: Sides, stride: Sides, padding: Sides) -> Tensor:
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        windows = padded.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        return windows.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel, ctx.stride, ctx.padding = inputs
        ctx.size = tuple(x.shape[-2:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = F.fold(gradient, ctx.size, ctx.kernel, padding=ctx.padding, stride=ctx.stride)
        return back, None, None, None


def _unfolded_convolution(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    """im2col and one matrix product: batched over clients it is a batched product, not a grouped convolution."""
    kernel, stride = layer.kernel_size, layer.stride
    padding = (int(layer.padding[0]), int(layer.padding[1]))

    def forward(x: Tensor) -> Tensor:
        sides = [(x.shape[2 + d] + 2 * padding[d] - kernel[d]) // stride[d] + 1 for d in range(2)]
        columns = _Columns.apply(x, kernel, stride, padding)  # type: ignore[no-untyped-call]
        flat = columns.transpose(0, 1).reshape(columns.shape[1], -1)  # (inputs of a pixel, rows x pixels)
        weight = layer.weight.reshape(layer.out_channels, -1)
        y = weight @ flat if layer.bias is None else weight @ flat + layer.bias[:, None]
        return y.reshape(layer.out_channels, len(x), *sides).transpose(0, 1)

    return forward
