"""Rows of numbers for all clients of a device: on it while it has room for them, else in pinned host memory.

What grows with the number of clients (models, optimizer states, private models) is a table of rows. It is read and
written a few clients at a time, so that no more than these have to fit the device together with their computation.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RESERVE = 0.2  # share of a device's free memory that a table leaves to everything else
PIECE = 64  # rows that are copied to the host at a time, if not all are
OUT_OF_MEMORY = (  # what CUDA and its libraries say in a plain RuntimeError
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)

Positions = npt.NDArray[np.int64]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left, whoever noticed it.

    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may still use: what is free, and what PyTorch keeps for itself unused."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return int(max(0, min(free + unused, share - torch.cuda.memory_allocated(device))))


class ClientRows:
    """(n, width) numbers, a row for each client, on the device or in pinned host memory."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.values, self.device = values, device
        self._written: torch.cuda.Event | None = None  # the last copy into host memory

    def __len__(self) -> int:
        return len(self.values)

    @property
    def width(self) -> int:
        """Numbers of a client."""
        return int(self.values.shape[1])

    @property
    def on_device(self) -> bool:
        """Whether the rows are where they are computed with."""
        return self.values.device == self.device

    def read(self, rows: Positions) -> Tensor:
        """Some rows, on the device, as memory of their own."""
        if not self.on_device:
            return self._sent(self.values, rows)
        if len(rows) == len(self.values) and np.array_equal(rows, np.arange(len(rows))):
            return self.values.clone()
        at = torch.from_numpy(rows).to(self.device, non_blocking=True)
        return self.values.index_select(0, at)

    def columns(self, rows: Positions, there: Tensor, first: int, last: int) -> Tensor:
        """(rows, last - first) of some rows, given on the host and on the device."""
        part = self.values[:, first:last]
        return part.index_select(0, there) if self.on_device else self._sent(part, rows)

    def _sent(self, values: Tensor, rows: Positions) -> Tensor:
        """Gathered by the processor into pinned memory, and copied while the device is busy."""
        self._wait()
        staged = torch.empty(len(rows), values.shape[1], dtype=values.dtype, pin_memory=True)
        torch.index_select(values, 0, torch.from_numpy(rows), out=staged)
        return staged.to(self.device, non_blocking=True)

    def write(self, start: int, rows: Tensor) -> None:
        """New rows from a position on."""
        self.values[start : start + len(rows)].copy_(rows, non_blocking=True)
        if not self.on_device:
            self._written = torch.cuda.Event()
            self._written.record()

    def replace(self, at: Positions, source: ClientRows, rows: Positions) -> None:
        """Rows at some positions become rows of another table."""
        if self.on_device:
            sent = torch.from_numpy(at).to(self.device, non_blocking=True)
            self.values.index_copy_(0, sent, source.read(rows))
            return
        self._wait()
        self.values.index_copy_(0, torch.from_numpy(at), torch.from_numpy(source.on_host(rows)))

    def on_host(self, rows: Positions | None = None) -> npt.NDArray[np.float32]:
        """All rows, or some, as a plain array of its own memory: one copy."""
        if self.on_device and self.device.type == "cpu":
            return np.array(self.values.numpy() if rows is None else self.values.numpy()[rows])
        if self.on_device:
            chosen = self.values if rows is None else self.read(rows)
            return chosen.cpu().numpy()
        self._wait()
        return np.array(self.values.numpy() if rows is None else self.values.numpy()[rows])

    def to_host(self) -> int:
        """Move the rows to pinned host memory; returns the bytes of the device that nobody needs then."""
        if self.device.type == "cpu" or not self.on_device:
            return 0
        there = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
        there.copy_(self.values)
        self.values = there
        return there.numel() * there.element_size()

    def _wait(self) -> None:
        """Until what was written has arrived."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None


class DeviceMemory:
    """Gives tables of rows their place: when memory runs out, all of them move to the host, where new ones begin."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.notes: list[str] = []
        self._tables: WeakSet[ClientRows] = WeakSet()
        self._full = False
        self._copies: torch.cuda.Stream | None = None

    def empty(self, count: int, width: int) -> ClientRows:
        """A table whose rows will be written."""
        return self._made(torch.empty, count, width)

    def zeros(self, count: int, width: int) -> ClientRows:
        """A table of zeros."""
        return self._made(torch.zeros, count, width)

    def _made(self, make: Callable[..., Tensor], count: int, width: int) -> ClientRows:
        values = None
        if self._has_room(4 * count * width):
            try:
                values = make(count, width, device=self.device)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        if values is None:
            self._overflows()
            values = make(count, width, pin_memory=True)
        return self.keep(values)

    def keep(self, values: Tensor) -> ClientRows:
        """A table of rows that are there already, on the device or in pinned host memory."""
        table = ClientRows(values, self.device)
        self._tables.add(table)
        return table

    def placed(self, values: npt.NDArray[np.float32]) -> ClientRows:
        """A table with the values of an array."""
        table = self.empty(*values.shape)
        table.write(0, torch.from_numpy(values))
        return table

    def sent(self, values: Tensor) -> Tensor:
        """A tensor of the host on the device; tables make way for it."""
        try:
            return values.to(self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self.can_spill:
                raise
        self.spill()
        return values.to(self.device)

    def fetch(self, table: ClientRows, rows: Positions) -> Tensor:
        """Some rows as host memory of their own, copied beside the device's work: there when `wait` returns."""
        if not table.on_device or self.device.type == "cpu":
            return torch.from_numpy(table.on_host(rows))
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)
        there = torch.empty(len(rows), table.width, dtype=table.values.dtype, pin_memory=True)
        whole = len(rows) == len(table) and np.array_equal(rows, np.arange(len(rows)))
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            for at in range(0, len(rows), len(rows) if whole else PIECE):
                part = slice(at, len(rows) if whole else at + PIECE)
                there[part].copy_(table.values if whole else table.read(rows[part]), non_blocking=True)
        table.values.record_stream(self._copies)
        return there

    def wait(self) -> None:
        """Until everything that was fetched has arrived."""
        if self._copies is not None:
            self._copies.synchronize()

    @property
    def can_spill(self) -> bool:
        """Whether there is anything on the device that the host could hold."""
        return self.device.type != "cpu" and any(table.on_device for table in self._tables)

    def spill(self) -> bool:
        """Move all tables to the host, where new ones are made from now on; False if there were none."""
        freed = sum(table.to_host() for table in list(self._tables))
        if freed:
            self._overflows()
            torch.cuda.empty_cache()
        return freed > 0

    def _has_room(self, size: int) -> bool:
        if self.device.type != "cuda":
            return True
        return not self._full and size <= (1 - RESERVE) * free_memory(self.device)

    def _overflows(self) -> None:
        if not self._full:
            self.notes.append(
                "Out of device memory for the models and states of all clients: new ones are in host memory, and "
                "copied a few clients at a time (more GPUs or fleet.actors leave fewer clients to each)."
            )
        self._full = True
