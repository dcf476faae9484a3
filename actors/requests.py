"""What the fleet asks of a block of clients: plain values that travel well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from actors.wire import Encoded, with_references
from archipelago.core.settings import EvaluationSettings, LocalSettings, ModelSettings
from archipelago.strategies.penalties import Penalty

R = TypeVar("R", bound="Request")


@dataclass(frozen=True)
class Request:
    """Something that some clients are asked for in a round."""

    round: int
    clients: list[int]

    def part(self: R, clients: list[int]) -> R:
        """What the block that hosts `clients` needs of it."""
        own = {each.name: _part(getattr(self, each.name), clients) for each in dataclasses.fields(self)}
        return dataclasses.replace(self, **{**own, "clients": clients})


def _part(value: Any, clients: Sequence[int]) -> Any:
    """The part of a reference, or of the references in a list or dictionary; everything else as it is."""
    if isinstance(value, Encoded):
        return value.part(clients)
    if isinstance(value, list):
        return [each.part(clients) if isinstance(each, Encoded) else each for each in value]
    if isinstance(value, dict):
        return {n: each.part(clients) if isinstance(each, Encoded) else each for n, each in value.items()}
    return value


@dataclass(frozen=True)
class TrainRequest(Request):
    """Local training of some clients."""

    handle: str
    start: Encoded
    on_top_of: list[Encoded]
    penalties: list[Penalty]  # their references are encoded
    sample_weights: tuple[str, int] | None
    scale: Encoded | None
    slot: str
    keep: str | None
    fresh: bool  # start with a new optimizer and forget it afterwards
    step_share: Encoded | None  # share of the steps that each manages; None: all of them

    def part(self, clients: list[int]) -> TrainRequest:
        """What the block that hosts `clients` needs of it."""
        penalties = [with_references(each, lambda encoded: encoded.part(clients)) for each in self.penalties]
        return dataclasses.replace(super().part(clients), penalties=penalties)


@dataclass(frozen=True)
class ModelRequest(Request):
    """Losses or gradients of some clients at given models."""

    models: Encoded
    on_top_of: list[Encoded]
    handle: str = ""


@dataclass(frozen=True)
class BestRequest(ModelRequest):
    """Which of K models has the least loss for each of some clients."""

    first: Encoded | None = None  # the model that is the best one most likely; -1: no idea
    owner: str = ""  # whose models they are: what is remembered of one method's is of no use for another's


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """Metrics of some clients under a prediction."""

    models: list[Encoded]
    weights: Encoded | None  # how much each model counts; None: each once
    combine: str
    split: str


@dataclass(frozen=True)
class MapRequest(Request):
    """A pure client function on some clients."""

    stage: str
    function: Callable[..., Any]
    inputs: dict[str, Any] = field(default_factory=dict)  # references among them are encoded
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
    gpus: float = 0.0  # share of a device; the session sets it once fleet.gpus=auto is a number
    precision: str = "32"
    determinism: str = "auto"
    holdout: tuple[
        npt.NDArray[np.int64], ...
    ] = ()  # test samples of each ground-truth distribution, no client's
    plugins: tuple[str, ...] = ()  # modules that register what is looked up here


@dataclass(frozen=True)
class ClientSamples:
    """A client's sample indices."""

    train: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
