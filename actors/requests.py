"""What the fleet asks of a block of clients: plain values that travel well.

References of a strategy are encoded for the wire: arrays travel once, beside the request, and are named
by their position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import EvaluationSettings, LocalSettings, ModelSettings
from archipelago.strategies.penalties import Penalty


@dataclass(frozen=True)
class Encoded:
    """A reference on the wire.

    kind: "vector" (array), "rows" (array, row per client), "private" (name, default), "result" (handle),
    "models" (array, whole), "merged" (default with the columns `array` of other), "mixture" (array, weights
    per client), "value" (one per client).
    """

    kind: str
    array: int = -1
    per_client: dict[int, Any] = field(default_factory=dict)
    name: str = ""
    default: Encoded | None = None
    other: Encoded | None = None

    @property
    def is_model(self) -> bool:
        """Whether it resolves to one or more models, which have buffers behind their parameters."""
        return self.kind != "value"


@dataclass(frozen=True)
class EncodedPenalty:
    """A penalty without its references, and the references on the wire."""

    penalty: Penalty
    anchors: dict[str, Encoded]
    outputs: dict[str, Encoded]


@dataclass(frozen=True)
class TrainRequest:
    """Local training of some clients."""

    round: int
    handle: str
    clients: list[int]
    start: Encoded
    on_top_of: list[Encoded]
    penalties: list[EncodedPenalty]
    sample_weights: tuple[str, int] | None
    scale: Encoded | None
    slot: str
    keep: str | None
    fresh: bool  # start with a new optimizer and forget it afterwards
    # Share of the steps that a straggler manages; clients not listed do them all.
    step_share: dict[int, float]


@dataclass(frozen=True)
class ModelRequest:
    """Losses or gradients of some clients at given models."""

    round: int
    clients: list[int]
    models: Encoded
    on_top_of: list[Encoded] = field(default_factory=list)
    handle: str = ""


@dataclass(frozen=True)
class EvaluateRequest:
    """Metrics of some clients under a prediction."""

    round: int
    clients: list[int]
    models: list[Encoded]
    weights: dict[int, npt.NDArray[np.float64]] | None
    combine: str
    split: str


@dataclass(frozen=True)
class MapRequest:
    """A pure client function on some clients."""

    round: int
    clients: list[int]
    stage: str
    function: Callable[..., Any]
    inputs: dict[str, Any]
    prefix: str = ""


@dataclass(frozen=True)
class BlockSetup:
    """Everything a block needs to know besides its data."""

    seed: int
    model: ModelSettings
    local: LocalSettings
    evaluation: EvaluationSettings
    input_shape: tuple[int, ...]
    classes: int | None
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]
    gpus: float = 0.0
    holdout: tuple[npt.NDArray[np.int64], ...] = ()  # test samples of each planted distribution, no client's
    plugins: tuple[str, ...] = ()  # modules that register what is looked up here


@dataclass(frozen=True)
class ClientSamples:
    """A client's sample indices."""

    train: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
