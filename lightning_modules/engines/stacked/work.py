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
from lightning_modules.engines.stacked.device_memory import ClientRows, Positions
from lightning_modules.engines.stacked.optimizers import Slabs


def _nothing(at: Positions) -> dict[str, Tensor]:
    return {}


def _no_anchors(at: Positions) -> Anchors:
    return []


@dataclass(frozen=True)
class Work:
    """Local training of n clients, as tables. Places are rows of `rows` and of the tables, all clients' in one.

    What is large is asked for by position, for the clients of a chunk: tensors of the device, fresh memory.
    """

    start: Callable[[Positions], Tensor]  # (m, P) models
    batches: Sequence[Sequence[npt.NDArray[np.int64]]]  # of each client: the places of each of its batches
    rows: Tensor  # sample at each place, where the samples are looked up
    seeds: Sequence[int]
    slabs: Callable[[Positions], Slabs] = _nothing  # (m, parameters) optimizer states
    steps: npt.NDArray[np.int64] | None = None  # optimizer steps before
    tables: dict[str, Tensor] = field(
        default_factory=dict
    )  # by place: frozen, sample_weights, outputs of penalties
    scale: Tensor | None = None  # (n,)
    penalties: Sequence[Penalty] = ()
    anchors: Callable[[Positions], Anchors] = _no_anchors
    only: tuple[str, ...] | None = None  # tensors that are trained, by name; None: all
    rule: Rule | None = None  # how a step follows from gradients
    memory: Callable[[Positions], Memory] = _nothing  # what it remembers: (m, parameters), or (m,) numbers
    rate: float = 1.0  # what the learning rate is multiplied with in this round
    keeps_slabs: bool = True  # whether optimizer states are asked for afterwards

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def several(self) -> int:
        """Mini-batches that a step takes."""
        return 1 if self.rule is None else len(self.rule.passes)

    @property
    def kept(self) -> tuple[str, ...]:
        """What the rule remembers that becomes a private model."""
        return () if self.rule is None else tuple(self.rule.keeps)


@dataclass(frozen=True)
class Outcome:
    """What came out of it, a row for each client."""

    models: ClientRows  # (n, P)
    slabs: dict[str, ClientRows]
    steps: npt.NDArray[np.int64]  # optimizer steps after
    measured: npt.NDArray[
        np.float64
    ]  # (n, 2): mean objective, NaN if a kept model is not finite; largest value
    kept: dict[str, ClientRows] = field(default_factory=dict)  # (n, P) private models that the rule made
