"""The shape of an algorithm: what every method has, and how a base takes add-ons.

A strategy reads like its paper's pseudo-code: `setup` makes the first models, `round` is one communication
round, `prediction` says what each client predicts with. It talks to the clients only through the fleet.

A method is a base plus add-ons (`fesem+cam+finetune`). Add-ons are orthogonal parts: penalty terms of the
local objective, the assignment rule, a model that predictions are added on top of, what happens at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.registry import Registry
from archipelago.core.settings import AggregationSettings
from archipelago.strategies.aggregation import aggregate, check_rule
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Models, Prediction, Reference

METHODS: Registry[type[Strategy]] = Registry("method")
ADDONS: Registry[type[Addon]] = Registry("add-on")

UNASSIGNED = -1


@dataclass
class NoOptions:
    """A method without options of its own."""


@dataclass(frozen=True)
class Context:
    """What a strategy may know of the experiment around it."""

    clients: int
    clusters: int = 1
    rounds: int = 1
    seed: int = 0
    weights: str = "size"  # or "uniform"
    lr: float = 0.01  # of the clients' optimizer
    groups: Indices | None = None  # planted groups, for the oracle; empty while the data is not there yet
    has_validation: bool = False
    evaluate_every: int = 1
    evaluate_last: int = 3
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)


class WithState:
    """Something with named attributes that a checkpoint must hold."""

    state: ClassVar[tuple[str, ...]] = ()
    per_client: ClassVar[
        dict[str, float]
    ] = {}  # attributes with a row for each client; what a newcomer's holds

    def save_state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {name: _plain(getattr(self, name)) for name in self.state}

    def load_state(self, tree: dict[str, Any]) -> None:
        """The inverse of `save_state`, after `setup`."""
        for name in self.state:
            setattr(self, name, _revived(tree[name]))

    def make_room(self, clients: int) -> None:
        """Rows for clients that came after the state was saved: they have never been seen."""
        for name, fill in self.per_client.items():
            value = getattr(self, name)
            more = [_longer(rows, clients, fill) for rows in (value if isinstance(value, list) else [value])]
            setattr(self, name, more if isinstance(value, list) else more[0])


def _longer(rows: Any, clients: int, fill: float) -> Any:
    """`rows` with `fill` in every row beyond its last, up to `clients`."""
    if rows is None or len(rows) >= clients:
        return rows
    return np.concatenate([rows, np.full((clients - len(rows), *rows.shape[1:]), fill, rows.dtype)])


def _plain(value: Any) -> Any:
    if isinstance(value, Models):
        return {"models": value.values}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"models"}:
        values = np.asarray(value["models"])
        if values.flags.writeable:
            values.flags.writeable = False
        return Models(values)
    if isinstance(value, list):
        return [_revived(item) for item in value]
    return value


class Addon(WithState):
    """A part that a base can take. Subclasses override what they change, and nothing else."""

    Options: ClassVar[type] = NoOptions
    takes_round: ClassVar[bool] = False  # replaces the base's round by its own

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options if options is not None else self.Options()
        self.context = context

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        """Why this add-on makes no sense on that base with those other add-ons; None if it does."""
        return None

    def setup(self, base: Any, fleet: FleetView) -> None:
        """Make what the add-on needs, after the base's own setup."""

    def round(self, base: Any, fleet: FleetView) -> None:
        """The round, for add-ons that take it over."""
        raise TypeError(f"{type(self).__name__} does not take over rounds")

    def after_round(self, base: Any, fleet: FleetView) -> None:
        """After every round of the base."""

    def penalties(self, base: Any, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        """Terms of the local objective; c is the cluster each client trains under."""
        return []

    def restored(self, base: Any) -> None:
        """After the base and its add-ons took over a checkpoint's state."""

    def predicts_alone(self, base: Any, fleet: FleetView) -> Prediction | None:
        """What clients predict with if the base's own prediction is not needed at all; None if it is."""
        return None

    def freezes(self, base: Any) -> bool:
        """Whether the assignment of this round is the last one's."""
        return False

    def prediction(self, base: Any, fleet: FleetView, prediction: Prediction) -> Prediction:
        """What clients predict with, given what they would without this add-on."""
        return prediction

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """Models the add-on holds on the server."""
        return {}


class Strategy(WithState):
    """Base of all methods. Subclasses set the class attributes, and `round`."""

    Options: ClassVar[type] = NoOptions
    clustered: ClassVar[bool] = False  # uses K cluster models
    private: ClassVar[bool] = False  # clients keep models of their own
    mixes: ClassVar[bool] = False  # predicts with a mixture of probabilities
    additive: ClassVar[bool] = False  # predicts with the sum of several models
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED}
    when_empty: ClassVar[str] = "it keeps its model"  # what becomes of a cluster that no client is in

    def __init__(self, options: Any, context: Context, addons: Sequence[Addon] = ()) -> None:
        self.options = options if options is not None else self.Options()
        self.context = context
        self.addons = list(addons)
        self.K = context.clusters
        self.number = 0  # of the round under way
        self.assignment: Indices | None = None  # cluster of each client id, UNASSIGNED where not known
        self.report: dict[str, Any] = {}  # figures of the last round, for the metrics table
        self.records: dict[str, dict[str, npt.NDArray[Any]]] = {}  # tables of the last round, for the figures
        self.events: list[str] = []  # what a user should know of the last round

    # --- what a method defines --------------------------------------------------------------------------

    @classmethod
    def check(cls, options: Any, context: Context) -> None:
        """Refuse settings that do not go together, before anything is started or written."""

    def setup(self, fleet: FleetView) -> None:
        """Make the first models."""
        raise NotImplementedError

    def round(self, fleet: FleetView) -> None:
        """One communication round with the clients of `fleet`."""
        raise NotImplementedError

    def prediction(self, fleet: FleetView) -> Prediction:
        """What each client of `fleet` predicts with, add-ons aside."""
        raise NotImplementedError

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds, for the run directory."""
        raise NotImplementedError

    # --- what the server calls --------------------------------------------------------------------------

    def begin(self, fleet: FleetView) -> None:
        """Before the first round."""
        check_rule(self.rule, fleet.spec)
        self.check(self.options, self.context)
        self.setup(fleet)
        for addon in self.addons:
            addon.setup(self, fleet)

    def run_round(self, fleet: FleetView, number: int) -> None:
        """Round `number`, by the base or by the add-on that takes it over."""
        self.events = self.events if self.number == 0 else []  # what setup said comes with the first round
        self.number, self.report, self.records = number, {}, {}
        taker = next((addon for addon in self.addons if addon.takes_round), None)
        if taker is None:
            self.round(fleet)
        else:
            taker.round(self, fleet)
        for addon in self.addons:
            addon.after_round(self, fleet)

    def predict(self, fleet: FleetView) -> Prediction:
        """What each client predicts with, add-ons included."""
        prediction = self._alone(fleet) or self.prediction(fleet)
        for addon in self.addons:
            prediction = addon.prediction(self, fleet, prediction)
        return prediction

    def centre_models(self) -> list[list[Vector]]:
        """What is measured on every planted distribution: for each cluster, the models whose outputs add up."""
        return []

    def all_models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The server's models, those of add-ons included."""
        found = dict(self.models())
        for addon in self.addons:
            found |= addon.models()
        return found

    def gradient_point(self, fleet: FleetView) -> Reference:
        """Where each client's gradient is taken for the clusterability measure (thesis 3.18).

        The model that a client predicts with, on top of what it predicts on top of; during a warm-up that is the
        model being warmed up.
        """
        return (self._alone(fleet) or self.prediction(fleet)).models[0]

    def _alone(self, fleet: FleetView) -> Prediction | None:
        found = (addon.predicts_alone(self, fleet) for addon in self.addons)
        return next((prediction for prediction in found if prediction is not None), None)

    # --- what methods share -----------------------------------------------------------------------------

    @property
    def rule(self) -> AggregationSettings:
        """How models become one; a method with a rule of its own overrides this."""
        return self.context.aggregation

    def aggregated(
        self, theta: Handle, fleet: FleetView, c: Indices, clusters: int, otherwise: Models
    ) -> Models:
        """One model for each cluster `c`, by the rule of this experiment; an empty one keeps `otherwise`."""
        n, seed = self.client_weights(fleet), self.context.seed
        return aggregate(
            theta, c, clusters, n, otherwise, self.rule, fleet.spec, seed=seed, round=self.number
        )

    def client_weights(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        """n_i, or 1 for every client under `weights=uniform`."""
        uniform = self.context.weights == "uniform"
        return np.ones(len(fleet.ids)) if uniform else fleet.sizes.astype(np.float64)

    def penalties(self, fleet: FleetView, c: Indices | None = None) -> list[Penalty]:
        """The terms that add-ons put into the local objective."""
        return [term for addon in self.addons for term in addon.penalties(self, fleet, c)]

    def average(self, theta: Handle, fleet: FleetView, otherwise: Vector) -> Vector:
        """The aggregate of all clients' models: the mean, or what `aggregation` names."""
        labels = np.zeros(len(theta.ids), np.int64)
        keep = Models(np.asarray(otherwise)[None])
        return self.aggregated(theta, fleet, labels, 1, keep)[0]

    def save_state(self) -> dict[str, Any]:
        """The method's own state and its add-ons'."""
        addons = [addon.save_state() for addon in self.addons]
        own = {"assignment": self.assignment, "number": self.number}
        return {**super().save_state(), **own, "addons": addons}

    def load_state(self, tree: dict[str, Any]) -> None:
        """The inverse of `save_state`."""
        super().load_state(tree)
        self.assignment, self.number = tree["assignment"], tree["number"]
        for addon, part in zip(self.addons, tree["addons"], strict=True):
            addon.load_state(part)
        for part in (self, *self.addons):
            part.make_room(self.context.clients)
        for addon in self.addons:
            addon.restored(self)


class SingleModel(Strategy):
    """A method whose server holds one model that every client predicts with."""

    state: ClassVar[tuple[str, ...]] = ("model",)
    model: Vector

    def setup(self, fleet: FleetView) -> None:
        self.model = fleet.initial(1)[0]

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.model])

    def centre_models(self) -> list[list[Vector]]:
        return [[self.model]]

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"global": self.model}


class ClusteredModels(Strategy):
    """A method whose server holds K cluster models and an assignment of clients to them.

    Its round is four verbs, so that add-ons (CAM above all) can use them one by one:
    `expect` (the clusters that clients train under), `train`, `settle` (the clusters that the average uses) and
    `update`. Loss-based methods decide in `expect`, parameter-based ones in `settle`.
    """

    clustered = True
    by_loss: ClassVar[bool] = True  # assigns by loss (before training), else by parameters (after it)
    state: ClassVar[tuple[str, ...]] = ("clusters",)
    clusters: Models
    underlay: Reference | None = None  # what cluster models are added on top of (CAM's shared model)

    def setup(self, fleet: FleetView) -> None:
        self.clusters = fleet.initial(self.K)
        self.assignment = np.full(self.context.clients, UNASSIGNED, np.int64)

    def round(self, fleet: FleetView) -> None:
        c = self.expect(fleet)
        theta = self.train(fleet, c)
        c = self.settle(fleet, theta, c)
        self.update(fleet, theta, c)

    def expect(self, fleet: FleetView) -> Indices:
        """The cluster each client starts from in this round."""
        return self.labels(fleet)

    def train(self, fleet: FleetView, c: Indices, on_top_of: Reference | None = None) -> Handle:
        """Local training from the cluster models, with the add-ons' penalties."""
        under = self.underlay if on_top_of is None else on_top_of
        return fleet.train(start=self.clusters[c], on_top_of=under, penalties=self.penalties(fleet, c))

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """The cluster each client's model is averaged into."""
        return c

    def update(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        """Average inside each cluster; an empty one keeps its model."""
        self.clusters = self.aggregated(theta, fleet, c, self.K, self.clusters)
        self.assign(fleet, c)

    def assign(self, fleet: FleetView, c: Indices) -> None:
        """Remember the clusters of this round's clients."""
        assert self.assignment is not None
        self.assignment = self.assignment.copy()
        self.assignment[fleet.ids] = c

    @property
    def frozen(self) -> bool:
        """Whether an add-on holds the assignment still."""
        seen = self.assignment is not None and (self.assignment != UNASSIGNED).any()
        return seen and any(addon.freezes(self) for addon in self.addons)

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster of clients the method has not seen yet: the one of least loss."""
        return lowest(fleet.losses(self.clusters, on_top_of=self.underlay))

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

    def centre_models(self) -> list[list[Vector]]:
        under = [self.underlay] if isinstance(self.underlay, np.ndarray) else []
        return [[model, *under] for model in self.clusters.values]

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"clusters": self.clusters.values}


METHODS.base, ADDONS.base = Strategy, Addon  # what an import path must lead to


def lowest(losses: npt.NDArray[np.float64]) -> Indices:
    """argmin over models, ties to the lowest index; a loss that is not finite never wins.

    >>> lowest(np.array([[2.0, 1.0, 1.0], [np.nan, 5.0, 7.0]])).tolist()
    [1, 1]
    """
    return np.argmin(np.where(np.isfinite(losses), losses, np.inf), axis=1).astype(np.int64)


def parse_method(text: str, clusters: int | None = None) -> tuple[str, list[str]]:
    """`base+addon+addon` as (base, [addon, ...]), or a sentence about what is wrong with it.

    >>> from archipelago.strategies import parse_method
    >>> parse_method("ifca+cam")
    ('ifca', ['cam'])
    """
    base, *addons = text.split("+")
    method = METHODS.find(base)
    for addon in addons:
        if addon in METHODS:
            raise UserError(
                f"'{addon}' is a base method and cannot be added to '{base}': write method={addon}, or list both "
                f"as ensemble=[{base},{addon}]."
            )
        found = ADDONS.find(addon)
        if addons.count(addon) > 1:
            raise UserError(f"Expected add-on '{addon}' once, got it twice in '{text}': leave one out.")
        why_not = found.refuse(method, addons, 2 if clusters is None else clusters)
        if why_not:
            raise UserError(f"'{addon}' cannot be added to '{base}': {why_not}")
    takers = [addon for addon in addons if ADDONS.find(addon).takes_round]
    if len(takers) > 1:
        raise UserError(
            f"'{takers[0]}' and '{takers[1]}' both take over the round: leave one out of '{text}'."
        )
    return base, addons


def build(method: str, options: dict[str, Any], context: Context) -> Strategy:
    """The strategy named by `base+addon+addon`; `options` maps names to their options."""
    base, addons = parse_method(method, context.clusters)
    made = [entry.value(options.get(entry.section), context) for entry in map(ADDONS.entry, addons)]
    entry = METHODS.entry(base)
    return entry.value(options.get(entry.section), context, made)
