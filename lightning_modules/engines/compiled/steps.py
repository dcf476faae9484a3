"""What the kernels do to a model vector: forward passes, steps, updates."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_modules.engines.compiled import structures as c
from lightning_modules.engines.compiled.memory import Arena
from lightning_modules.engines.compiled.operations import NetworkPlan
from lightning_modules.flat import OptimizerState
from lightning_modules.samples import Samples

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# Samples of a forward pass without gradients: convolutions want activations that stay in the cache, linear layers many
# samples for each time that their weights are put in order.
FORWARD, FORWARD_FLAT = 64, 256


def floats(values: npt.NDArray[Any], shape: tuple[int, ...], what: str) -> Floats:
    """float32 values that lie side by side, as kernels read them; another shape is refused before one runs."""
    if values.shape != shape:
        raise ValueError(f"expected {what} of shape {shape}, got {values.shape}")
    return np.ascontiguousarray(values, np.float32)


def address(array: npt.NDArray[Any] | None) -> int | None:
    """Of an array's memory; None stays a null pointer."""
    return None if array is None else array.ctypes.data


class Inputs:
    """Brings samples into the lanes of an arena, normalised on the way."""

    def __init__(self, library: Any, samples: Samples, shape: tuple[int, ...]) -> None:
        self.library, self.samples, self.shape, self.size = library, samples, shape, math.prod(shape)
        raw = samples.raw()
        self._x, self._position = raw.x, raw.position
        memory_order = self._memory_order(raw.x, shape)
        # Anything else than bytes or floats in one of two orders is made ready by Samples, batch by batch.
        self._direct = memory_order is not None and raw.x.dtype in (torch.uint8, torch.float32)
        self._order = np.arange(self.size) if memory_order is None else memory_order
        self._bytes = raw.x.dtype == torch.uint8
        self._mean = self._each(raw.mean, shape) if self._direct else None
        self._deviation = self._each(raw.std, shape) if self._direct else None

    @staticmethod
    def _memory_order(x: Tensor, shape: tuple[int, ...]) -> Index | None:
        """Positions (channel, y, x) of a sample's numbers in the order in which they lie in memory."""
        if x.is_contiguous():
            return np.arange(math.prod(shape))
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return np.ascontiguousarray(
                np.arange(math.prod(shape)).reshape(shape).transpose(1, 2, 0)
            ).reshape(-1)
        return None

    def _each(self, values: Tensor | None, shape: tuple[int, ...]) -> Floats | None:
        """A number per channel as one for each number of a sample, in memory order."""
        if values is None:
            return None
        return np.ascontiguousarray(values.expand(shape).reshape(-1).numpy()[self._order])

    def rows(self, index: Index) -> Index:
        """Rows of the stored samples; those that are not there are refused."""
        index = np.ascontiguousarray(index, np.int64)
        if self._position is not None:
            index = np.ascontiguousarray(self._position.numpy()[index])
        if len(index) and (index.min() < 0 or index.max() >= len(self._x)):
            raise IndexError(f"expected samples below {len(self._x)}, got {index.min()} to {index.max()}")
        return index

    def put(self, arena: Arena, index: Index, rows: Index) -> None:
        """Samples into tensor 0; `rows` are `rows(index)`."""
        arena.holds(len(rows))
        if arena.input_offsets is None:
            arena.input_offsets = arena.tensor_offsets(0, self._order)
        where = arena.input_offsets
        group, to = arena.group_floats(0), arena.values.ctypes.data + 4 * arena.tensors[0].value
        mean, deviation = address(self._mean), address(self._deviation)
        if self._direct:
            gather = self.library.gather_bytes if self._bytes else self.library.gather_floats
            gather(
                self._x.data_ptr(),
                self.size,
                rows.ctypes.data,
                len(rows),
                where.ctypes.data,
                mean,
                deviation,
                to,
                group,
            )
            return
        self.put_values(arena, self.samples.batch(index)[0], len(index))

    def put_values(self, arena: Arena, x: Tensor, batch: int) -> None:
        """Normalised inputs of a batch that somebody made into tensor 0."""
        if arena.plain_offsets is None:
            arena.plain_offsets = arena.tensor_offsets(0, np.arange(self.size))
        ready = floats(x.detach().numpy(), (arena.holds(batch), *self.shape), "inputs")
        where, each = arena.plain_offsets, np.arange(batch)
        group, to = arena.group_floats(0), arena.values.ctypes.data + 4 * arena.tensors[0].value
        self.library.gather_floats(
            ready.ctypes.data, self.size, each.ctypes.data, batch, where.ctypes.data, None, None, to, group
        )


@dataclass
class Update:
    """The optimizer: its numbers, and a client's state as flat vectors beside the model's parameters."""

    library: Any
    kind: str  # "sgd" or "adam"
    options: dict[str, Any]
    sizes: Sequence[tuple[int, ...]]  # shapes of the parameters, in the model's order

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept for each parameter."""
        if self.kind == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.options["momentum"] != 0 else ()

    def begin(self, state: OptimizerState | None) -> None:
        """Take a client's state (None or empty: a fresh start)."""
        total = sum(math.prod(size) for size in self.sizes)
        self.fresh = not state
        self.count = 0.0
        self.vectors = [np.zeros(total, np.float32) for _ in self.names]
        if not state:
            return
        for name, vector in zip(self.names, self.vectors, strict=True):
            parts = [np.asarray(state[f"{i}.{name}"], np.float32).reshape(-1) for i in range(len(self.sizes))]
            vector[:] = np.concatenate(parts)
        if self.kind == "adam":
            self.count = float(state["0.step"])

    def fits(self, state: OptimizerState | None) -> bool:
        """Whether a state is one of this optimizer, whole."""
        if not state:
            return True
        names = (*self.names, "step") if self.kind == "adam" else self.names
        expected = {
            f"{i}.{name}": () if name == "step" else tuple(size)
            for i, size in enumerate(self.sizes)
            for name in names
        }
        steps = {float(state[key]) for key in state if key.endswith(".step")}
        return {key: np.shape(value) for key, value in state.items()} == expected and len(steps) <= 1

    def step(self, model: Floats, gradient: Floats) -> None:
        """Move the parameters, which come first in the model."""
        options, held = self.options, [vector.ctypes.data for vector in self.vectors]
        count = len(gradient)
        if self.kind == "sgd":
            self.library.sgd(
                count, model.ctypes.data, gradient.ctypes.data, held[0] if held else None, options["lr"],
                options["momentum"], options["dampening"], options["weight_decay"], options["nesterov"], self.fresh,
            )  # fmt: skip
        else:
            self.count += 1
            beta1, beta2 = options["betas"]
            adam = c.Adam(
                options["lr"] / (1 - beta1**self.count), 1 - beta1, beta2, 1 - beta2,
                math.sqrt(1 - beta2**self.count), options["eps"], options["weight_decay"],
            )  # fmt: skip
            self.library.adam(count, model.ctypes.data, gradient.ctypes.data, *held, ctypes.byref(adam))
        self.fresh = False

    def state(self) -> OptimizerState:
        """The state as torch's optimizer would have it."""
        found: OptimizerState = {}
        if self.fresh and not any(vector.any() for vector in self.vectors):
            return found  # no step was taken
        start = 0
        for number, shape in enumerate(self.sizes):
            stop = start + math.prod(shape)
            if self.kind == "adam":
                found[f"{number}.step"] = np.array(self.count, np.float32)
            for name, vector in zip(self.names, self.vectors, strict=True):
                found[f"{number}.{name}"] = vector[start:stop].reshape(shape).copy()
            start = stop
        return found


class Passes:
    """A network's forward and backward passes; arenas grow to the largest batch that was asked for."""

    def __init__(self, library: Any, network: NetworkPlan, inputs: Inputs) -> None:
        self.library, self.network, self.inputs = library, network, inputs
        self.gradient = np.zeros(network.parameters, np.float32)
        self._arena: Arena | None = None
        self._frozen: Arena | None = None

    def arena(self, samples: int) -> Arena:
        """Memory for training on batches of so many samples."""
        if self._arena is None or self._arena.samples < samples:
            self._arena = Arena(self.library, self.network, samples, training=True)
        return self._arena

    def model(self, values: npt.NDArray[Any]) -> Floats:
        """A model as kernels read it: of this network's size."""
        return floats(values, (self.network.model_size,), "a model")

    def outputs(self, model: npt.NDArray[Any], index: Index) -> Tensor:
        """(samples, outputs) in evaluation mode."""
        model = self.model(model)
        if self._frozen is None:
            images = any(layer.kind == c.CONVOLUTION for layer in self.network.layers)
            chunk = FORWARD if images else FORWARD_FLAT
            self._frozen = Arena(self.library, self.network, chunk, training=False)
        arena, rows = self._frozen, self.inputs.rows(index)
        found = np.empty((len(index), self.network.outputs), np.float32)
        for start in range(0, len(index), arena.samples):
            part = rows[start : start + arena.samples]
            self.inputs.put(arena, index[start : start + arena.samples], part)
            self.library.forward(arena.pointer, model.ctypes.data, len(part), False)
            self.library.outputs(arena.pointer, len(part), found[start:].ctypes.data)
        return torch.from_numpy(found)
