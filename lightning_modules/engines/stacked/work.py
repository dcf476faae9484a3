"""What local training of many clients is given, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from archipelago.strategies.penalties import Penalty
from archipelago.strategies.rules import Memory, Rule
from lightning_modules.engines.stacked.batched import Anchors
from lightning_modules.engines.stacked.optimizers import Slabs


@dataclass(frozen=True)
class Work:
    """Local training of n clients, as tables. Places are rows of `rows` and of the tables, all clients' in one."""

    start: Callable[
        [npt.NDArray[np.int64]], Tensor
    ]  # (m, P) models of the clients at some positions, fresh memory
    batches: Sequence[Sequence[npt.NDArray[np.int64]]]  # of each client: the places of each of its batches
    rows: Tensor  # sample at each place, where the samples are looked up
    seeds: Sequence[int]
    slabs: Slabs = field(default_factory=dict)  # (n, parameters) optimizer states
    steps: npt.NDArray[np.int64] | None = None  # optimizer steps before
    tables: dict[str, Tensor] = field(
        default_factory=dict
    )  # by place: frozen, sample_weights, outputs of penalties
    scale: Tensor | None = None  # (n,)
    penalties: Sequence[Penalty] = ()
    anchors: Anchors = field(default_factory=list)
    only: tuple[str, ...] | None = None  # tensors that are trained, by name; None: all
    rule: Rule | None = None  # how a step follows from gradients
    memory: Memory = field(default_factory=dict)  # what it remembers: (n, parameters), or (n,) numbers
    rate: float = 1.0  # what the learning rate is multiplied with in this round

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def several(self) -> int:
        """Mini-batches that a step takes."""
        return 1 if self.rule is None else len(self.rule.passes)


@dataclass(frozen=True)
class Outcome:
    """What came out of it: all still on the device."""

    models: Tensor  # (n, P)
    slabs: Slabs
    steps: npt.NDArray[np.int64]  # optimizer steps after
    objective: Tensor  # (n,) float64: mean over the steps
    memory: Memory = field(default_factory=dict)  # what the rule remembers then
