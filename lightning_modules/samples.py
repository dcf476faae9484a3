"""The samples of a federation as tensors: indexed per batch, normalised per batch or once per actor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_modules.flat import tensor_of


class RememberedOutputs:
    """Outputs of frozen models by what they were computed from, up to a number of bytes, until the round ends.

    What is not there is computed again from the same values in the same way: the same bits, found or not.
    """

    def __init__(self, capacity: float = 64e6) -> None:
        self.capacity = capacity
        self._kept: dict[bytes, Tensor] = {}
        self._bytes = 0

    @staticmethod
    def key(vector: npt.NDArray[np.float32], index: npt.NDArray[np.int64]) -> bytes:
        """The content of a model and of a list of samples; next to a forward pass it costs nothing."""
        content = hashlib.blake2b(np.ascontiguousarray(vector).data, digest_size=20)
        content.update(np.ascontiguousarray(index).data)
        return content.digest()

    def get(self, key: bytes) -> Tensor | None:
        """The outputs, if they were kept."""
        return self._kept.get(key)

    def put(self, key: bytes, outputs: Tensor) -> Tensor:
        """Keep outputs if memory allows."""
        size = outputs.numel() * outputs.element_size()
        if self._bytes + size <= self.capacity:
            self._kept[key] = outputs
            self._bytes += size
        return outputs

    def clear(self) -> None:
        """The round is over: its models will not be asked for again."""
        self._kept.clear()
        self._bytes = 0


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
        self._format = (
            torch.channels_last
            if channels_last and x.ndim == 4 and x.shape[1] > 1
            else torch.contiguous_format
        )
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
            x = self._x[self._position[rows].to(self._x.device)]  # keeps the format, as index_select does not
        else:
            x = self._normalised(self._x.index_select(0, rows))
        return x.to(self.device, non_blocking=True), self.targets(index)

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
        rows = tensor_of(np.asarray(index, np.int64))
        return self._y.index_select(0, rows).to(self._y_type).to(self.device, non_blocking=True)

    def _normalised(self, x: Tensor) -> Tensor:
        """`x` was indexed out and belongs to us: in place, which spares a third of the time."""
        raw = x.dtype == torch.uint8
        x = x.to(torch.float32)
        x = x.div_(255) if raw else x
        x = x if self._plain else x.sub_(self._mean).div_(self._std)
        # Last: channel by channel, the mean and the deviation are one number for a whole image at a time.
        return x.contiguous(memory_format=self._format)
