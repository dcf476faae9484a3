"""The samples of a block on its device: raw, normalised there, found by row; one table of rows goes in per stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_modules.flat import tensor_of

SHARE = 0.5  # of a device's free memory that samples may take; more stays in pinned host memory


class DeviceSamples:
    """Inputs and targets of the samples that a block uses, as tensors of its device.

    uint8 images stay uint8 until a batch is made. What is too large for the device stays in pinned host memory and
    is copied batch by batch, while the device is busy with the batch before.
    """

    def __init__(
        self,
        x: npt.NDArray[np.generic],
        y: npt.NDArray[np.generic],
        *,
        used: npt.NDArray[np.int64],
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        classes: int | None,
        device: torch.device,
        room: float | None = None,
    ) -> None:
        self.device = device
        self._index = np.unique(used)
        whole = len(self._index) == len(x)
        raw = tensor_of(x) if whole else tensor_of(x)[torch.from_numpy(self._index)]
        targets = tensor_of(y) if whole else tensor_of(y)[torch.from_numpy(self._index)]
        self.shape: Sequence[int] = tuple(x.shape[1:])
        self.on_device = room is None or raw.numel() * raw.element_size() <= SHARE * room
        # Where rows must be to be looked up: a gather on the host that waited for the device would be no gain.
        self.rows_device = device if self.on_device else torch.device("cpu")
        self._x = raw.to(device) if self.on_device else raw
        self._y = targets.to(torch.float32 if classes is None else torch.int64).to(self.rows_device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and not self.on_device else None
        shape = (-1,) + (1,) * (x.ndim - 2)
        self._mean = torch.from_numpy(np.array(mean, np.float32)).reshape(shape).to(device)
        self._std = torch.from_numpy(np.array(std, np.float32)).reshape(shape).to(device)
        self._plain = not np.any(np.asarray(mean)) and bool(np.all(np.asarray(std) == 1))

    def rows(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Where samples of the federation stand here."""
        return np.searchsorted(self._index, index).astype(np.int32)

    def __len__(self) -> int:
        return len(self._index)

    def inputs(self, rows: Tensor) -> Tensor:
        """Normalised inputs, of shape (*rows.shape, *shape of a sample)."""
        flat = rows.reshape(-1)
        x = self._x.index_select(0, flat) if self.on_device else self._from_host(flat)
        raw = x.dtype == torch.uint8
        x = x.to(torch.float32)
        x = x.div_(255) if raw else x
        x = x if self._plain else x.sub_(self._mean).div_(self._std)
        return x.reshape(*rows.shape, *self.shape)

    def _from_host(self, rows: Tensor) -> Tensor:
        """Gathered by the processor and copied beside the kernels of the batch before, from pinned memory."""
        x = self._x.index_select(0, rows)
        if self._copies is None:
            return x.to(self.device)
        with torch.cuda.stream(self._copies):
            sent = x.pin_memory().to(self.device, non_blocking=True)
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._copies)
        sent.record_stream(now)
        return sent

    def targets(self, rows: Tensor) -> Tensor:
        """Targets, of shape (*rows.shape, *shape of a target)."""
        found = self._y.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *self._y.shape[1:])
        return found if self.on_device else found.to(self.device, non_blocking=True)
