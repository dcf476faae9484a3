"""Work on many clients in pieces that fit the memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from archipelago.core.errors import UserError

T = TypeVar("T")


class Chunks:
    """How many clients fit at a time: halved when memory runs out, and remembered.

    A `fixed` number is never halved: results would depend on the memory of a device.
    """

    def __init__(self, most: int | None = None, *, fixed: bool = False) -> None:
        self.most, self.fixed = most, fixed
        self.notes: list[str] = []

    def run(self, count: int, part: Callable[[npt.NDArray[np.int64]], T]) -> list[T]:
        """`part` for all of `count` positions, in pieces that fit."""
        found, at = [], 0
        while at < count:
            size = min(count - at, self.most or count)
            try:
                found.append(part(np.arange(at, at + size)))
                at += size
            except torch.OutOfMemoryError:
                if size == 1:
                    raise  # one client alone does not fit: nothing is left to divide
                if self.fixed:
                    raise UserError(
                        f"Expected {size} clients at a time to fit the device under determinism=exact, and they do "
                        f"not: set local.chunk={(size + 1) // 2}, the same for all runs that are compared, or "
                        "determinism=seeded."
                    ) from None
                self.most = (size + 1) // 2
                self.notes.append(
                    f"Out of device memory with {size} clients at a time: continuing with {self.most} "
                    f"(local.chunk={self.most} begins with that)."
                )
            # Outside the handler: its traceback would keep the tensors of the failed attempt alive.
            if self.notes and torch.cuda.is_available():
                torch.cuda.empty_cache()
        return found
