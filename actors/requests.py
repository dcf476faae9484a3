"""What the fleet asks of a block of clients: plain values that travel well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from actors.wire import Encoded, rule_with_references, with_references
from archipelago.core.settings import (
    AttackSettings,
    EvaluationSettings,
    LocalSettings,
    ModelSettings,
    UpdateSettings,
)
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.rules import Rule

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
    continues: str | None = None  # fresh: the slot whose optimizer state it starts with instead of a new one
    leaves: bool = True  # the results may leave the clients, as attackers and transforms make them
    restart: bool = False  # start with a new optimizer in every round
    only: tuple[str, ...] | None = None  # tensors that are trained, by name; None: all
    steps: int | None = None  # instead of those that the settings ask for
    rule: Rule | None = None  # how a step is made; its references are encoded
    prefix: str = ""  # of private models that the rule keeps
    rate: float = 1.0  # what the learning rate is multiplied with in this round

    @property
    def passes(self) -> tuple[int, ...]:
        """Gradients that a step takes on each of its mini-batches."""
        return (1,) if self.rule is None else self.rule.passes

    def memory(self, kept: bool) -> str | None:
        """The state that the optimizer starts with, if clients keep theirs; None: a new one."""
        slot = self.continues if self.fresh else self.slot
        return f"optimizer/{slot}" if kept and slot is not None and not self.restart else None

    def remembers(self, kept: bool) -> bool:
        """Whether a client keeps its optimizer's state for the next round."""
        return kept and not self.fresh and not self.restart

    def part(self, clients: list[int]) -> TrainRequest:
        """What the block that hosts `clients` needs of it."""
        penalties = [with_references(each, lambda encoded: encoded.part(clients)) for each in self.penalties]
        rule = self.rule
        if rule is not None:
            rule = rule_with_references(rule, lambda encoded: encoded.part(clients))
        return dataclasses.replace(super().part(clients), penalties=penalties, rule=rule)


@dataclass(frozen=True)
class ModelRequest(Request):
    """Losses or gradients of some clients at given models."""

    models: Encoded
    on_top_of: list[Encoded]
    handle: str = ""
    leaves: bool = True  # as of a training


@dataclass(frozen=True)
class DeriveRequest(ModelRequest):
    """What a reference means for each of some clients, as a result of its own."""

    keep: str | None = None


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
class Stateless:
    """A function of a client's view alone, as a client function: the client's state stays as it is."""

    function: Callable[..., Any]

    def __call__(self, client: Any, state: dict[str, Any], **inputs: Any) -> tuple[dict[str, Any], Any]:
        return state, self.function(client, **inputs)


def numbers_in(value: Any) -> int:
    """How many numbers a result holds, whatever it is nested in.

    >>> numbers_in((np.zeros((2, 3)), {"mean": 1.0, "name": "x"}, None))
    7
    """
    if isinstance(value, np.ndarray):
        return int(value.size)
    if isinstance(value, dict):
        return sum(numbers_in(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(numbers_in(each) for each in value)
    return int(isinstance(value, int | float | np.number))


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
    update: UpdateSettings = field(default_factory=UpdateSettings)
    attack: AttackSettings = field(default_factory=AttackSettings)
    attackers: tuple[int, ...] = ()
    participants: int = 1  # clients that are selected in a round


@dataclass(frozen=True)
class ClientSamples:
    """A client's sample indices; where its data changes during a run, also those from later rounds on."""

    train: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
    later: tuple[tuple[int, ClientSamples], ...] = ()  # (first round, samples), ascending

    def at(self, round: int) -> ClientSamples:
        """What the client holds in a round."""
        return next((samples for first, samples in reversed(self.later) if first <= round), self)

    def every(self, *parts: str) -> npt.NDArray[np.int64]:
        """All samples of these parts (without any named: of all) that it ever holds; some may come twice."""
        names = parts or ("train", "validation", "test")
        stages = [self, *(samples for _, samples in self.later)]
        return np.concatenate([getattr(stage, name) for stage in stages for name in names])
