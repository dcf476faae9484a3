"""A network as the kernels see it: tensors and operations, before they have memory."""

from __future__ import annotations

from dataclasses import dataclass


class NotCovered(Exception):
    """What the kernels cannot do, as a clause of a sentence that names the layer."""


@dataclass(frozen=True)
class Shape:
    """A tensor of one sample; features have height and width 1 and are flat."""

    channels: int
    height: int = 1
    width: int = 1
    flat: bool = True
    alias: int | None = None  # the tensor whose memory this is

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.channels * self.height * self.width


@dataclass
class Layer:
    """An operation before it has memory; the fields are those of `Operation` in plan.h."""

    kind: int
    in_: int
    out: int
    second: int = -1
    relu: int = 0
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    count_padding: int = 0
    norm_groups: int = 0
    weight: int = -1
    bias: int = -1
    mean: int = -1
    variance: int = -1
    epsilon: float = 0.0
    momentum: float = 0.0


@dataclass
class NetworkPlan:
    """Tensors and operations in order; tensor 0 is the input."""

    shapes: list[Shape]
    layers: list[Layer]
    output: int
    model_size: int
    parameters: int

    @property
    def outputs(self) -> int:
        """Numbers that the network gives for a sample."""
        return self.shapes[self.output].channels

    def root(self, tensor: int) -> int:
        """The tensor whose memory a tensor uses."""
        alias = self.shapes[tensor].alias
        return tensor if alias is None else self.root(alias)
