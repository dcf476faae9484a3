"""The samples of a block on its device: raw, normalised there, found by row; one table of rows goes in per stage."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_modules.flat import tensor_of

SHARE = 0.5  # of a device's free memory that samples may take; more stays in pinned host memory


class DeviceSamples:
    """Inputs and targets of the samples that a block uses, as tensors of its device.

    uint8 images stay uint8 until a batch is made. What is too large for the device stays on the host: a thread gathers
    the next batch into pinned memory (`prepare`) while the device is busy, and a stream of its own copies it.
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
        self._ahead = None if self.on_device else ThreadPoolExecutor(1, "samples")
        self._next: tuple[Tensor, Future[Tensor]] | None = None  # rows, and what is gathered for them
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

    def prepare(self, rows: Tensor) -> None:
        """Begin to gather the batch that will be asked for next; nothing to do where samples are on the device."""
        if self._ahead is not None:
            flat = rows.reshape(-1)
            self._next = (flat, self._ahead.submit(self._gathered, flat, self._staging(len(flat))))

    def _staging(self, count: int) -> Tensor:
        """Memory of the host for some samples that a device reads by itself."""
        return torch.empty(
            count, *self._x.shape[1:], dtype=self._x.dtype, pin_memory=self._copies is not None
        )

    def _gathered(self, rows: Tensor, into: Tensor) -> Tensor:
        return torch.index_select(self._x, 0, rows, out=into)

    def _from_host(self, rows: Tensor) -> Tensor:
        """Gathered by the processor, if not ahead then now, and copied beside the kernels of the batch before."""
        prepared, self._next = self._next, None
        if prepared is not None and torch.equal(prepared[0], rows):
            x = prepared[1].result()
        else:
            x = self._gathered(rows, self._staging(len(rows)))
        if self._copies is None:
            return x.to(self.device)
        with torch.cuda.stream(self._copies):
            sent = x.to(self.device, non_blocking=True)
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._copies)
        sent.record_stream(now)
        return sent

    def targets(self, rows: Tensor) -> Tensor:
        """Targets, of shape (*rows.shape, *shape of a target)."""
        found = self._y.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *self._y.shape[1:])
        return found if self.on_device else found.to(self.device, non_blocking=True)
