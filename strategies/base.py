"""The shape of an algorithm: what every method has, and how methods are named.

A strategy reads like its paper's pseudo-code: `setup` makes the first models, `round` is one communication
round, `prediction` says what each client predicts with. It talks to the clients only through the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from foundation.errors import UserError
from foundation.registry import Registry
from strategies.interface import FleetView
from strategies.parameters import Vector
from strategies.references import Indices, Models, Prediction, Reference, Rows

METHODS: Registry[type[Strategy]] = Registry("method")
ADDONS: Registry[Any] = Registry("add-on")

UNASSIGNED = -1


@dataclass
class NoOptions:
    """A method without options of its own."""


class Strategy:
    """Base of all methods. Subclasses set the class attributes, and `round`."""

    Options: ClassVar[type] = NoOptions
    clustered: ClassVar[bool] = False  # uses K cluster models
    private: ClassVar[bool] = False  # clients keep models of their own
    state: ClassVar[tuple[str, ...]] = ()  # attributes that a checkpoint must hold

    def __init__(
        self,
        *,
        clients: int,
        clusters: int = 1,
        options: Any = None,
        weights: str = "size",
        seed: int = 0,
        rounds: int = 1,
    ) -> None:
        self.clients = clients
        self.K = clusters
        self.options = options if options is not None else self.Options()
        self.weights = weights
        self.seed = seed
        self.rounds = rounds
        self.assignment: Indices | None = None  # cluster of each client id, UNASSIGNED where not known
        self.report: dict[str, float] = {}  # figures of the last round, for the metrics table
        self.events: list[str] = []  # what a user should know of the last round

    def setup(self, fleet: FleetView) -> None:
        """Make the first models."""
        raise NotImplementedError

    def round(self, fleet: FleetView) -> None:
        """One communication round with the clients of `fleet`."""
        raise NotImplementedError

    def prediction(self, fleet: FleetView) -> Prediction:
        """What each client of `fleet` predicts with."""
        raise NotImplementedError

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds, for the run directory."""
        raise NotImplementedError

    def client_weights(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        """n_i, or 1 for every client under `weights=uniform`."""
        return np.ones(len(fleet.ids)) if self.weights == "uniform" else fleet.sizes.astype(np.float64)

    def gradient_point(self, fleet: FleetView) -> Reference:
        """Where each client's gradient is taken for the clusterability measure (thesis 3.18)."""
        return self.prediction(fleet).models[0]

    def save_state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        tree: dict[str, Any] = {"assignment": self.assignment}
        for name in self.state:
            value = getattr(self, name)
            tree[name] = value.values if isinstance(value, Models) else value
        return tree

    def load_state(self, tree: dict[str, Any]) -> None:
        """The inverse of `save_state`, after `setup`."""
        self.assignment = tree["assignment"]
        for name in self.state:
            value = tree[name]
            setattr(self, name, Models(value) if isinstance(getattr(self, name, None), Models) else value)


class SingleModel(Strategy):
    """A method whose server holds one model that every client predicts with."""

    state = ("model",)
    model: Vector

    def setup(self, fleet: FleetView) -> None:
        self.model = fleet.initial(1)[0]

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.model])

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"global": self.model}


class ClusteredModels(Strategy):
    """A method whose server holds K cluster models and an assignment of clients to them."""

    clustered = True
    state = ("clusters",)
    clusters: Models

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"clusters": self.clusters.values}

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster of clients the method has not seen yet: the one of least loss."""
        return lowest(fleet.losses(self.clusters))

    def labels(self, fleet: FleetView) -> Indices:
        """The cluster of each client of `fleet`; clients never seen are adopted for now, not for good."""
        assert self.assignment is not None
        labels = self.assignment[fleet.ids].copy()
        unseen = labels == UNASSIGNED
        if unseen.any():
            labels[unseen] = self.adopt(fleet.select(fleet.ids[unseen]))
        return labels

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.clusters[self.labels(fleet)]])


def lowest(losses: npt.NDArray[np.float64]) -> Indices:
    """argmin over models, ties to the lowest index; a loss that is not finite never wins.

    >>> lowest(np.array([[2.0, 1.0, 1.0], [np.nan, 5.0, 7.0]])).tolist()
    [1, 1]
    """
    return np.argmin(np.where(np.isfinite(losses), losses, np.inf), axis=1).astype(np.int64)


def parse_method(text: str) -> tuple[str, list[str]]:
    """`base+addon+addon` as (base, [addon, ...]), or a sentence about what is wrong with it.

    >>> from strategies import parse_method
    >>> parse_method("fedavg")
    ('fedavg', [])
    """
    base, *addons = text.split("+")
    METHODS.find(base)
    for addon in addons:
        if addon in METHODS:
            raise UserError(
                f"'{addon}' is a base method and cannot be added to '{base}': write {addon} alone."
            )
        if not ADDONS:
            raise UserError(f"There are no add-ons in this version, got '{addon}': write method={base}.")
        ADDONS.find(addon)
        if addons.count(addon) > 1:
            raise UserError(f"Add-on '{addon}' is given twice in '{text}': write it once.")
    return base, addons


def build(method: str, options: dict[str, Any], **context: Any) -> Strategy:
    """The strategy named by `base+addon+addon`; `options` maps names to their options."""
    base, _ = parse_method(method)
    return METHODS.find(base)(options=options.get(base), **context)


__all__ = [
    "ADDONS",
    "METHODS",
    "UNASSIGNED",
    "ClusteredModels",
    "NoOptions",
    "Rows",
    "SingleModel",
    "Strategy",
    "build",
    "lowest",
    "parse_method",
]
