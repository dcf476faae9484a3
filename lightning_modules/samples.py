"""The samples of a federation as tensors: indexed per batch, normalised per batch or once per actor."""

from __future__ import annotations

import hashlib

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
        content = hashlib.blake2b(np.ascontiguousarray(vector), digest_size=20)
        content.update(np.ascontiguousarray(index))
        return content.digest()

    def get(self, key: bytes) -> Tensor | None:
        """The outputs, if they were kept."""
        return self._kept.get(key)

    def put(self, key: bytes, outputs: Tensor) -> Tensor:
        """Keep outputs if there is room."""
        size = outputs.numel() * outputs.element_size()
        if self._bytes + size <= self.capacity:
            self._kept[key] = outputs
            self._bytes += size
        return outputs

    def clear(self) -> None:
        """The round is over: its models will not be asked for again."""
        self._kept.clear()
        self._bytes = 0


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

    def targets(self, index: npt.NDArray[np.int64]) -> Tensor:
        """Targets alone, on the device."""
        rows = tensor_of(np.asarray(index, np.int64))
        return self._y.index_select(0, rows).to(self._y_type).to(self.device, non_blocking=True)

    def _normalised(self, x: Tensor) -> Tensor:
        """`x` was indexed out and belongs to us: in place, which spares a third of the time."""
        raw = x.dtype == torch.uint8
        x = x.to(torch.float32, memory_format=self._format)
        x = x.div_(255) if raw else x
        return x if self._plain else x.sub_(self._mean).div_(self._std)
