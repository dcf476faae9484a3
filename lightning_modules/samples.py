"""The samples of a federation as tensors: indexed per batch, normalised per batch or once per actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_modules.flat import is_value, tensor_of


class RememberedOutputs:
    """Outputs of frozen models on lists of samples, up to a number of bytes, until the round ends.

    A model is recognised by its memory, which costs nothing however large it is. That is safe for memory that nobody
    can write to, as models in the object store, clients' results and private models are, and as long as the model
    is kept beside its outputs, so that no other one can be given its address. Anything else is not remembered.
    What is not there is computed again from the same values in the same way: the same bits, found or not.
    """

    def __init__(self, capacity: float = 64e6) -> None:
        self.capacity = capacity
        self._kept: dict[tuple[Any, ...], tuple[Tensor, npt.NDArray[np.float32]]] = {}
        self._bytes = 0

    def get(
        self, vector: npt.NDArray[np.float32], index: npt.NDArray[np.int64], kind: str = "outputs"
    ) -> Tensor | None:
        """The outputs of a model (or what else of it `kind` says), if they were kept."""
        found = self._kept.get((kind, *_identity(vector, index))) if is_value(vector) else None
        return None if found is None else found[0]

    def put(
        self,
        vector: npt.NDArray[np.float32],
        index: npt.NDArray[np.int64],
        outputs: Tensor,
        kind: str = "outputs",
    ) -> Tensor:
        """Keep the outputs of a model if memory allows, and if it can be recognised."""
        size = outputs.numel() * outputs.element_size()
        if self._bytes + size <= self.capacity and is_value(vector):
            self._kept[(kind, *_identity(vector, index))] = (outputs, vector)
            self._bytes += size
        return outputs

    def clear(self) -> None:
        """The round is over: its models will not be asked for again."""
        self._kept.clear()
        self._bytes = 0


def _identity(vector: npt.NDArray[np.float32], index: npt.NDArray[np.int64]) -> tuple[Any, ...]:
    """Where a model lies in memory, and the samples."""
    return vector.ctypes.data, vector.shape, vector.strides, index.tobytes()


class _LastInputs:
    """Chunks of inputs up to a number of bytes; one that its reader changed in place is not given out again."""

    def __init__(self, index: npt.NDArray[np.int64], capacity: float = 64e6) -> None:
        self.index, self.capacity = index, capacity
        self._kept: dict[int, tuple[Tensor, int]] = {}  # each with its count of changes in place

    def get(self, number: int) -> Tensor | None:
        """A chunk, if it was kept and is as it was."""
        chunk, changes = self._kept.get(number, (None, 0))
        return chunk if chunk is not None and chunk._version == changes else None

    def put(self, number: int, chunk: Tensor) -> Tensor:
        """Keep a chunk if memory allows."""
        self.capacity -= chunk.numel() * chunk.element_size()
        if self.capacity >= 0:
            self._kept[number] = (chunk, chunk._version)
        return chunk


class RawSamples(NamedTuple):
    """What is stored: row i of `x`, or row `position[i]`, is sample i. Bytes count as / 255; then (x - mean) / std."""

    x: Tensor
    position: Tensor | None
    mean: Tensor | None  # None: nothing is subtracted or divided by
    std: Tensor | None


class GivenSamples(NamedTuple):
    """Samples as they came, and what normalises them."""

    x: npt.NDArray[np.generic]
    y: npt.NDArray[np.generic]
    mean: npt.ArrayLike
    std: npt.ArrayLike
    classes: int | None


class Samples:
    """Inputs and targets of the whole federation, read from shared memory.

    `normalise="batch"` keeps the raw samples only; `"actor"` keeps a normalised float32 copy of the samples
    in `used`, which is faster and takes more memory. Both give the same bits. With `channels_last`, images lie in
    memory pixel by pixel instead of channel by channel; their shape is the same, convolutions are faster.
    """

    def __init__(
        self,
        x: npt.NDArray[np.generic],
        y: npt.NDArray[np.generic],
        *,
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        classes: int | None,
        device: torch.device | str = "cpu",
        normalise: str = "batch",
        used: npt.NDArray[np.int64] | None = None,
        chunk: int = 512,
        channels_last: bool = False,
    ) -> None:
        self.given = GivenSamples(x, y, mean, std, classes)
        self.remembered = RememberedOutputs()
        self.chunk = chunk  # samples per forward pass where no gradient is needed
        self.device = torch.device(device)
        self._x = tensor_of(x)
        self._y = tensor_of(y)
        self._y_type = torch.float32 if classes is None else torch.int64
        shape = (-1,) + (1,) * (x.ndim - 2)
        self._mean = torch.from_numpy(np.array(mean, np.float32)).reshape(shape)
        self._std = torch.from_numpy(np.array(std, np.float32)).reshape(shape)
        self._plain = bool((self._mean == 0).all()) and bool((self._std == 1).all())
        self._pixel_by_pixel = channels_last and x.ndim == 4
        self._last: _LastInputs | None = None
        self._position: Tensor | None = None
        if normalise == "actor" and used is not None:
            index = torch.from_numpy(np.unique(used))
            position = torch.full((len(x),), -1, dtype=torch.int64)
            position[index] = torch.arange(len(index))
            self._x = self._normalised(self._x[index]).to(self.device)
            self._position = position

    def batch(self, index: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples, on the device."""
        rows = tensor_of(np.asarray(index, np.int64))
        if self._position is not None:
            # Keeps the memory format, as index_select does not; of one channel it keeps none.
            x = self._laid_out(self._x[self._position[rows].to(self._x.device)])
        else:
            x = self._normalised(self._x.index_select(0, rows))
        return x.to(self.device, non_blocking=True), self.targets(index)

    def changed(
        self, index: npt.NDArray[np.int64], change: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`batch` with inputs that somebody changes, in the memory format that they had."""
        x, y = self.batch(index)
        return self._laid_out(change(x)), y

    def raw(self) -> RawSamples:
        """The samples as they are stored, for who normalises them on the fly."""
        ready = self._plain or self._position is not None
        return RawSamples(
            self._x, self._position, None if ready else self._mean, None if ready else self._std
        )

    def inputs(self, index: npt.NDArray[np.int64]) -> Iterator[Tensor]:
        """Inputs alone, a chunk at a time. Those asked for last are kept: several frozen models see them in turn."""
        if self._last is None or not np.array_equal(self._last.index, index):
            self._last = _LastInputs(index)
        for number, start in enumerate(range(0, len(index), self.chunk)):
            found = self._last.get(number)
            if found is None:
                found = self._last.put(number, self.batch(index[start : start + self.chunk])[0])
            yield found

    def forget(self) -> None:
        """The round is over: its models, and what they were shown, will not be asked for again."""
        self.remembered.clear()
        self._last = None

    def targets(self, index: npt.NDArray[np.int64]) -> Tensor:
        """Targets alone, on the device."""
        return self.host_targets(index).to(self.device, non_blocking=True)

    def host_targets(self, index: npt.NDArray[np.int64]) -> Tensor:
        """Targets alone, where the samples are."""
        return self._y.index_select(0, tensor_of(np.asarray(index, np.int64))).to(self._y_type)

    def _normalised(self, x: Tensor) -> Tensor:
        """`x` was indexed out and belongs to us: in place, which spares a third of the time."""
        raw = x.dtype == torch.uint8
        x = x.to(torch.float32)
        x = x.div_(255) if raw else x
        x = x if self._plain else x.sub_(self._mean).div_(self._std)
        # Last: channel by channel, the mean and the deviation are one number for a whole image at a time.
        return self._laid_out(x)

    def _laid_out(self, x: Tensor) -> Tensor:
        """`x` in the memory format of all batches."""
        return pixel_by_pixel(x) if self._pixel_by_pixel else x.contiguous()


def pixel_by_pixel(x: Tensor) -> Tensor:
    """Images in the memory format channels_last, as PyTorch recognises it.

    One channel lies in memory the same way in both formats, and `contiguous` then leaves the strides of the plain one:
    the first convolution would go by them, and all layers behind it.

    >>> pixel_by_pixel(torch.zeros(2, 1, 5, 4)).stride()
    (20, 1, 4, 1)
    """
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous().flatten(1).unflatten(1, (*x.shape[2:], 1)).permute(0, 3, 1, 2)
