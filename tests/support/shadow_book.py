"""What the shadow device knows: which storages are on it, and what was counted, by stage and by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

ROOT = Path(__file__).resolve().parents[2]
CPU, DEVICE = "cpu", "cuda:0"
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


@dataclass(frozen=True)
class Counts:
    """What a GPU would have been asked to do."""

    operations: int = 0  # kernels launched, one for each operation that is not a view
    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    synchronisations: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __bool__(self) -> bool:
        return any(astuple(self))

    @property
    def copies(self) -> int:
        """Copies in either direction."""
        return self.h2d_copies + self.d2h_copies

    @property
    def bytes(self) -> int:
        """Bytes in either direction."""
        return self.h2d_bytes + self.d2h_bytes


@dataclass(frozen=True)
class Mixed:
    """An operation that a GPU would have refused."""

    operation: str
    where: str  # file:line
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # device and shape of each tensor

    def __str__(self) -> str:
        given = ", ".join(f"{device} {list(shape)}" for device, shape in self.inputs)
        return f"{self.where}: {self.operation}({given})"


@dataclass(frozen=True)
class Copy:
    """One transfer."""

    stage: str
    to: str
    shape: tuple[int, ...]
    bytes: int
    where: str
    pinned: bool


@dataclass(frozen=True)
class Kernel:
    """One device operation, for a cost model."""

    stage: str
    name: str
    bytes: int  # read and written
    flops: int


@dataclass
class _Tally:
    values: list[int] = field(default_factory=lambda: [0] * len(fields(Counts)))

    def add(self, **more: int) -> None:
        for name, value in more.items():
            self.values[_POSITION[name]] += value

    @property
    def counts(self) -> Counts:
        return Counts(*self.values)


_POSITION = {each.name: number for number, each in enumerate(fields(Counts))}


class Storages:
    """The storages on the device, as long as they live, and how many bytes they have."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.peak = 0
        self._bound = 0  # at least what lives; exact after a sweep
        # A weak reference keeps the address of a dead storage from being given to another one.
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.pinned: dict[int, StorageWeakRef] = {}

    def label(self, tensor: Tensor) -> str:
        """Where a tensor is."""
        return DEVICE if _key(tensor) in self._held else CPU

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in page-locked host memory."""
        return _key(tensor) in self.pinned

    def pin(self, tensor: Tensor) -> None:
        """Say that a tensor is in page-locked host memory."""
        storage = _storage(tensor)
        self.pinned[storage._cdata] = StorageWeakRef(storage)

    def put(self, tensor: Tensor) -> None:
        """Say that a tensor's storage is on the device; raises what torch raises if it does not fit."""
        storage = _storage(tensor)
        if storage._cdata in self._held:
            return
        size = storage.nbytes()
        self._held[storage._cdata] = (StorageWeakRef(storage), size)
        self._bound += size
        if self._bound > self.peak or self._bound > self.memory:
            live = self.live()
            if live > self.memory:
                del self._held[storage._cdata]
                self._bound -= size
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                    f"{self.memory / 2**20:.2f} MiB (shadow device)."
                )
            self.peak = max(self.peak, live)

    def live(self) -> int:
        """Bytes of the storages that are still held by somebody."""
        dead = [key for key, (reference, _) in self._held.items() if reference.expired()]
        for key in dead:
            self._bound -= self._held.pop(key)[1]
        for key in [key for key, reference in self.pinned.items() if reference.expired()]:
            del self.pinned[key]
        return self._bound


def _storage(tensor: Tensor) -> Any:
    while _wrapped(tensor):  # a batch or a tracked gradient of torch.func: the memory is below
        tensor = _unwrapped(tensor)
    return tensor.untyped_storage()


def _key(tensor: Tensor) -> int:
    try:
        return int(_storage(tensor)._cdata)
    except NotImplementedError:  # sparse tensors have no storage of their own
        return 0


class Book:
    """Counts by stage and by line; `stage` is the one that is being counted now."""

    def __init__(self, memory: int, trace: bool) -> None:
        self.storages = Storages(memory)
        self.stage = ""
        self.mixed: list[Mixed] = []
        self.copies: list[Copy] = []
        self.kernels: list[Kernel] | None = [] if trace else None
        self.tallies: dict[tuple[str, str, str], _Tally] = {}  # by stage, line and operation

    def add(self, operation: str, where: str, **more: int) -> None:
        """Count something."""
        key = (self.stage, where, operation)
        if key not in self.tallies:
            self.tallies[key] = _Tally()
        self.tallies[key].add(**more)

    def copied(self, tensor: Tensor, to: str, operation: str, *, blocking: bool, size: int) -> None:
        """Count a transfer of a tensor of `size` bytes."""
        at = where()
        self.copies.append(
            Copy(self.stage, to, tuple(tensor.shape), size, at, self.storages.is_pinned(tensor))
        )
        if to == DEVICE:
            self.add(operation, at, h2d_copies=1, h2d_bytes=size)
        else:
            self.add(operation, at, d2h_copies=1, d2h_bytes=size, synchronisations=int(blocking))

    def total(self, stage: str | None = None) -> Counts:
        """What was counted, in one stage or in all."""
        chosen = [tally.counts for key, tally in self.tallies.items() if stage in (None, key[0])]
        return sum(chosen, Counts())

    def rows(self) -> Iterator[tuple[tuple[str, str, str], Counts]]:
        """Everything counted, by stage, line and operation."""
        for key, tally in self.tallies.items():
            yield key, tally.counts


_OURS: dict[CodeType, str] = {}


def where() -> str:
    """File and line of the nearest frame of the project, this machinery aside."""
    found: Any = sys._getframe(1)
    while found is not None:
        code = found.f_code
        if code not in _OURS:
            _OURS[code] = _name(code.co_filename)
        if _OURS[code]:
            return f"{_OURS[code]}:{found.f_lineno}"
        found = found.f_back
    return "?"


def _name(filename: str) -> str:
    path = Path(filename)
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return ""
    name = path.relative_to(ROOT).as_posix()
    return "" if name.startswith("tests/support/shadow") else name
