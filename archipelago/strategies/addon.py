"""Add-ons: orthogonal parts that a base can take (`fesem+cam+finetune`).

Terms of the local objective, the assignment rule, a model that predictions are added on top of, what happens at
the end. An add-on says which kind of base it works with by its type, `Addon[ClusteredModels]`: what it may ask of
the base is that class, no more. What the platform must know about it is declared on its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import NoOptions, Registry
from archipelago.strategies.base import Context, Strategy
from archipelago.strategies.expectations import Expectations
from archipelago.strategies.interface import FleetView
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Prediction
from archipelago.strategies.state import WithState

Base = TypeVar("Base", bound=Strategy)


class Addon(WithState, Generic[Base]):
    """A part that a base can take. Subclasses override what they change, and nothing else."""

    Options: ClassVar[type] = NoOptions
    # Capabilities: what composition, ensembles and sweeps must know.
    takes_round: ClassVar[bool] = False  # replaces the base's round by its own
    additive: ClassVar[bool] = False  # adds a model to those that clients predict with
    late: ClassVar[bool] = False  # has no state, and changes nothing before `first_round`
    expects: ClassVar[Expectations] = Expectations()  # its own cost, and what it is known for

    name = ""  # as it was chosen
    beside: Sequence[Addon[Any]] = ()  # the other add-ons of the same method

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options if options is not None else self.Options()
        self.context = context

    # --- before a run -----------------------------------------------------------------------------------

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        """Why this add-on makes no sense on that base with those other add-ons; None if it does."""
        return None

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        """Refuse settings that do not go together, before anything is started or written."""

    @classmethod
    def first_round(cls, context: Context) -> int:
        """The first round in which it changes anything: until then the run is the same without it."""
        return 1

    @classmethod
    def for_few_rounds(cls, options: Any, rounds: int) -> Any:
        """The options with which a run of so few rounds still shows what the add-on does."""
        return options

    @property
    def claims(self) -> str | None:
        """The part of a model that its term wants to itself ("head", "backbone"); None if it shares all."""
        return None

    # --- in a run ---------------------------------------------------------------------------------------

    def setup(self, base: Base, fleet: FleetView) -> None:
        """Make what the add-on needs, after the base's own setup."""

    def round(self, base: Base, fleet: FleetView) -> None:
        """The round, for add-ons that take it over."""
        raise TypeError(f"{type(self).__name__} does not take over rounds")

    def after_round(self, base: Base, fleet: FleetView) -> None:
        """After every round of the base."""

    def penalties(self, base: Base, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        """Terms of the local objective; c is the cluster each client trains under."""
        return []

    def freezes(self, base: Base) -> bool:
        """Whether the assignment of this round is the last one's."""
        return False

    def point_weights(self, base: Base, fleet: FleetView) -> npt.NDArray[np.float64] | None:
        """How much each client counts in K-means; None: as the base says."""
        return None

    def predicts_alone(self, base: Base, fleet: FleetView) -> Prediction | None:
        """What clients predict with if the base's own prediction is not needed at all; None if it is."""
        return None

    def prediction(self, base: Base, fleet: FleetView, prediction: Prediction) -> Prediction:
        """What clients predict with, given what they would without this add-on."""
        return prediction

    def tunes(self, base: Base) -> bool:
        """Whether predictions of this round come after a local training of each client's own."""
        return False

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """Models the add-on holds on the server."""
        return {}

    def restored(self, base: Base) -> None:
        """After the base and its add-ons took over a checkpoint's state."""


ADDONS: Registry[type[Addon[Any]]] = Registry("add-on", base=Addon)
