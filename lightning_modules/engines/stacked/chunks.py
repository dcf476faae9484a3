"""Work on many clients in pieces that fit the memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from archipelago.core.errors import UserError
from lightning_modules.engines.stacked.device_memory import DeviceMemory, Positions, is_out_of_memory

T = TypeVar("T")


class Chunks:
    """How many clients fit at a time: halved when memory runs out, and remembered.

    Tables of rows leave the device first. A `fixed` number is never halved: results would depend on the memory of a
    device. `noted` pieces are the user's concern: how many fit is reported.
    """

    def __init__(
        self, memory: DeviceMemory, most: int | None = None, *, fixed: bool = False, noted: bool = True
    ) -> None:
        self.memory, self.most, self.fixed, self._noted = memory, most, fixed, noted
        self.notes: list[str] = []
        self.under_way: Positions | None = None  # the piece that is worked on, or that failed

    def run(self, count: int, part: Callable[[Positions], T]) -> list[T]:
        """`part` for all of `count` positions, in pieces that fit; each may be asked for more than once."""
        found, at = [], 0
        while at < count:
            size = min(count - at, self.most or count)
            self.under_way = np.arange(at, at + size)
            try:
                found.append(part(self.under_way))
                at += size
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not self.memory.can_spill:
                    self._refuse(size)
                    if size == 1:
                        raise  # one client alone does not fit: nothing is left to divide
            # Outside the handler: its traceback would keep the tensors of the failed attempt alive.
            if not self.memory.spill():
                self._halve(size)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.under_way = None
        return found

    def _refuse(self, size: int) -> None:
        if self.fixed and size > 1:
            raise UserError(
                f"Expected {size} clients at a time to fit the device under determinism=exact, and they do "
                f"not: set local.chunk={(size + 1) // 2}, the same for all runs that are compared, or "
                "determinism=seeded.",
                code="too-little-memory", setting="local.chunk", given=size,
            ) from None  # fmt: skip

    def _halve(self, size: int) -> None:
        self.most = (size + 1) // 2
        if self._noted:
            self.notes.append(
                f"Out of device memory with {size} clients at a time: continuing with {self.most} "
                f"(local.chunk={self.most} begins with that)."
            )
