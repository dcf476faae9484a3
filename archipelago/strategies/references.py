"""How a strategy points at models without holding them.

`start`, `on_top_of` and penalty anchors are references, resolved where the client lives:
a model (a vector), `clusters[c]` (a row per client), a client's own private model, or what an earlier call
of this round produced (a handle). Arrays "per client" are aligned with the `ids` of the fleet they are
given to, never with client ids themselves. How each kind travels to the clients is in `actors/wire.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union, overload

import numpy as np
import numpy.typing as npt

from archipelago.strategies.parameters import Matrix, Vector

if TYPE_CHECKING:
    from archipelago.strategies.interface import Handle

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """One row of a (K, P) array for each client; -1 points at nothing."""

    models: Matrix
    rows: Indices


@dataclass(frozen=True)
class Private:
    """A client's own model, kept under a name; `default` until it has one."""

    name: str
    default: Reference | None = None


@dataclass(frozen=True)
class Merged:
    """A model whose `columns` come from another one: a shared backbone under a client's own head."""

    base: Reference
    other: Reference
    columns: Indices


@dataclass(frozen=True)
class Mixture:
    """A weighted mean of K models for each client; `weights` is (n, K), and each row is divided by its sum."""

    models: Models
    weights: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sum:
    """Models added up, each times a factor: one number, or one for each client. Who has no such model adds nothing."""

    terms: Terms


@dataclass(frozen=True)
class SampleWeights:
    """How much each training sample counts: a column of an array that client functions keep by that name."""

    name: str
    column: int = 0


@dataclass(frozen=True)
class PerClient:
    """A number or a small array for each client (its cluster, its importance weights)."""

    values: npt.NDArray[Any]


@dataclass(frozen=True)
class Models:
    """K models as one (K, P) array. `models[2]` is a vector, `models[c]` a reference for each client."""

    values: Matrix

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.dtype != np.float32:
            raise ValueError(f"expected a (K, P) float32 array, got {self.values.shape} {self.values.dtype}")
        self.values.flags.writeable = False  # models are values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, chosen: int) -> Vector: ...
    @overload
    def __getitem__(self, chosen: npt.NDArray[np.integer[Any]]) -> Rows: ...
    def __getitem__(self, chosen: int | npt.NDArray[np.integer[Any]]) -> Vector | Rows:
        if isinstance(chosen, int | np.integer):
            return self.values[int(chosen)]
        return Rows(self.values, np.asarray(chosen, np.int64))


Reference = Union[Vector, Rows, Private, Merged, Mixture, Sum, PerClient, Models, "Handle"]

Terms = tuple[tuple[float | npt.NDArray[np.float64], Reference], ...]  # of a `Sum`: factors and models


@dataclass(frozen=True)
class Prediction:
    """What a client predicts with: models, how much each counts, and how their outputs combine.

    `models` are references; `weights` is None (each counts once) or an (n, len(models)) array. `slots` are those
    of the optimizer that the models were trained in, "main" where none is given. `names` are those of the parts of an
    additive method, which are then measured one by one (`actors/parts.py`).
    """

    models: list[Reference]
    weights: npt.NDArray[np.float64] | None = None
    combine: str = field(default="logit_sum")
    slots: list[str] | None = None
    names: list[str] | None = None

    COMBINATIONS = ("logit_sum", "logit_mean", "probability_mean", "vote")

    def __post_init__(self) -> None:
        if self.combine not in self.COMBINATIONS:
            raise ValueError(f"expected combine to be one of {self.COMBINATIONS}, got {self.combine!r}")

    @property
    def trained_in(self) -> list[str]:
        """The slot of each model."""
        return ["main"] * len(self.models) if self.slots is None else self.slots
