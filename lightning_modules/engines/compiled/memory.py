"""Memory for a network's tensors, and the plan that the kernels are given."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_modules.engines.compiled import structures as c
from lightning_modules.engines.compiled.operations import Layer, NetworkPlan, NotCovered

ALIGNED = 16  # floats: a cache line, and a register of AVX-512


class Arena:
    """Tensors of up to `samples` samples, in one piece of memory; `training` adds their gradients.

    Between two tensors a cache line stays free, which a build with AddressSanitizer forbids to touch.
    """

    def __init__(self, library: Any, network: NetworkPlan, samples: int, *, training: bool) -> None:
        self.library, self.network, self.training = library, network, training
        self.groups = -(-samples // c.LANES_OF_A_GROUP)
        self.samples = self.groups * c.LANES_OF_A_GROUP
        self.input_offsets: npt.NDArray[np.int32] | None = (
            None  # where the numbers of a sample go, once it is known
        )
        self.plain_offsets: npt.NDArray[np.int32] | None = (
            None  # the same of a sample in the order of its shape
        )
        self._size, self._gaps = ALIGNED, [0]
        self.tensors = (c.Tensor * len(network.shapes))()
        self.operations = (c.Operation * max(len(network.layers), 1))()
        self.plan = c.Plan(
            self.tensors, self.operations, len(network.shapes), len(network.layers), self.groups, network.output,
            model_size=network.model_size,
        )  # fmt: skip
        self._shape_tensors()
        self._fill_operations()
        self._place()
        # 64 bytes more than asked for, so that it can begin at a cache line.
        self._memory = np.zeros(self._size + ALIGNED, np.float32)
        skip = -self._memory.ctypes.data % 64 // 4
        self.values = self._memory[skip : skip + self._size]
        self.plan.arena, self.plan.arena_size = self.values.ctypes.data, self._size
        self.pointer = ctypes.pointer(self.plan)
        self._check()
        self._forbid_gaps()

    def holds(self, samples: int) -> int:
        """The number of samples, if they fit: kernels write as many lanes as they are told of."""
        if not 0 < samples <= self.samples:
            raise ValueError(f"expected 1 to {self.samples} samples in this arena, got {samples}")
        return samples

    def _forbid_gaps(self) -> None:
        for gap in self._gaps:
            self.library.forbid(self.values.ctypes.data + 4 * gap, ALIGNED, True)

    def _shape_tensors(self) -> None:
        network = self.network
        for tensor, shape in zip(self.tensors, network.shapes, strict=True):
            tensor.channels, tensor.height, tensor.width = shape.channels, shape.height, shape.width
            tensor.value = tensor.gradient = -1
        for layer in network.layers:
            if layer.kind == c.CONVOLUTION:
                source, made = self.tensors[layer.in_], self.tensors[layer.out]
                source.halo_y = max(source.halo_y, layer.pad[0])
                source.halo_x = max(source.halo_x, layer.pad[1])
                made.gradient_halo_y, made.gradient_halo_x = gradient_halo(layer, source, made)

    def _fill_operations(self) -> None:
        needs = tensors_with_gradients(self.network)
        seen: set[int] = set()
        for operation, layer in reversed(list(zip(self.operations, self.network.layers, strict=False))):
            fill(operation, layer)
            if self.training:
                operation.to_input = self._how(layer.in_, needs, seen)
                operation.to_second = self._how(layer.second, needs, seen) if layer.second >= 0 else 0
        self._needs = needs

    def _how(self, tensor: int, needs: set[int], seen: set[int]) -> int:
        """0: no gradient; 1: set it; 2: add to what a later layer put there (the backward pass goes backwards)."""
        root = self.network.root(tensor)
        if root not in needs:
            return 0
        how = 2 if root in seen else 1
        seen.add(root)
        return how

    def _take(self, floats: int) -> int:
        start = self._size
        self._size += -(-floats // ALIGNED) * ALIGNED
        self._gaps.append(self._size)
        self._size += ALIGNED
        return start

    def _place(self) -> None:
        for number, (tensor, shape) in enumerate(zip(self.tensors, self.network.shapes, strict=True)):
            if shape.alias is not None:
                continue
            area = (tensor.height + 2 * tensor.halo_y) * (tensor.width + 2 * tensor.halo_x)
            tensor.value = self._take(self.samples * tensor.channels * area)
            if self.training and number in self._needs:
                area = (tensor.height + 2 * tensor.gradient_halo_y) * (
                    tensor.width + 2 * tensor.gradient_halo_x
                )
                tensor.gradient = self._take(self.samples * tensor.channels * area)
        for number, tensor in enumerate(self.tensors):
            root = self.tensors[self.network.root(number)]
            tensor.value, tensor.gradient = root.value, root.gradient
        largest = 0
        for number in range(len(self.network.layers)):
            operation = self.operations[number]
            operation.kept_size = self.library.kept(ctypes.byref(self.plan), number)
            operation.kept = self._take(operation.kept_size) if operation.kept_size else 0
            largest = max(largest, self.library.workspace(ctypes.byref(self.plan), number))
        self.plan.workspace_size = largest
        self.plan.workspace = self._take(largest)

    def _check(self) -> None:
        """No kernel runs on shapes that do not fit."""
        found = self.library.check(self.pointer)
        if found:
            number, problem = divmod(found, 256)
            raise NotCovered(f"the kernels refuse {c.PROBLEMS[problem]} (number {number - 1})")

    def tensor_offsets(self, tensor: int, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Where each number of a sample lies inside a group, for numbers in this order of their positions."""
        t = self.tensors[tensor]
        row = t.width + 2 * t.halo_x
        grid = np.arange(t.channels)[:, None, None] * (t.height + 2 * t.halo_y) * row
        grid = grid + (np.arange(t.height)[:, None] + t.halo_y) * row + np.arange(t.width) + t.halo_x
        return (grid.reshape(-1)[order] * c.LANES_OF_A_GROUP).astype(np.int32)

    def group_floats(self, tensor: int) -> int:
        """Floats of a tensor's values for one group of samples."""
        t = self.tensors[tensor]
        return int(t.channels * (t.height + 2 * t.halo_y) * (t.width + 2 * t.halo_x) * c.LANES_OF_A_GROUP)


def gradient_halo(layer: Layer, source: c.Tensor, made: c.Tensor) -> tuple[int, int]:
    """How far around an output's gradient the backward pass of a convolution looks."""

    def around(side: int, size: int, made_size: int) -> int:
        kernel, stride, pad = layer.kernel[side], layer.stride[side], layer.pad[side]
        return max(0, (kernel - 1 - pad) // stride, (size - 1 + pad) // stride - (made_size - 1))

    return around(0, source.height, made.height), around(1, source.width, made.width)


def tensors_with_gradients(network: NetworkPlan) -> set[int]:
    """Tensors that depend on a parameter."""
    needs: set[int] = set()
    for layer in network.layers:
        inputs = [layer.in_] + ([layer.second] if layer.second >= 0 else [])
        if layer.weight >= 0 or layer.bias >= 0 or any(network.root(each) in needs for each in inputs):
            needs.add(network.root(layer.out))
    return needs


def fill(operation: c.Operation, layer: Layer) -> None:
    """A layer as the kernels see it."""
    operation.kind, operation.in_, operation.second, operation.out = (
        layer.kind,
        layer.in_,
        layer.second,
        layer.out,
    )
    operation.relu, operation.count_padding, operation.norm_groups = (
        layer.relu,
        layer.count_padding,
        layer.norm_groups,
    )
    operation.kernel_y, operation.kernel_x = layer.kernel
    operation.stride_y, operation.stride_x = layer.stride
    operation.pad_y, operation.pad_x = layer.pad
    operation.weight, operation.bias = layer.weight, layer.bias
    operation.mean, operation.variance = layer.mean, layer.variance
    operation.epsilon, operation.momentum = layer.epsilon, layer.momentum
