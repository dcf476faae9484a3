"""The shape of an algorithm: what a paper defines, and nothing else.

A strategy reads like its paper's pseudo-code: `setup` makes the first models, `round` is one communication
round, `prediction` says what each client predicts with, `models` are those that the server holds. It talks to the
clients only through the fleet. What add-ons bring is composed in `method.py`; a strategy asks for it at two points
(`Additions`): the terms of its local objective, and whether the assignment is held still.

What the platform must know about a strategy is declared on its class, where it is registered (`private`,
`clustered`, ...), and read there: no other file names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import AggregationSettings, ServerSettings
from archipelago.strategies import server_optimizers
from archipelago.strategies.adoption import ADOPTION, surest
from archipelago.strategies.aggregation import Rule, Uploads
from archipelago.strategies.expectations import Expectations
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Models, Prediction, Reference
from archipelago.strategies.state import WithState

UNASSIGNED = -1


def unchanged(round: int) -> float:
    """The learning rate of a round by `local.lr` where there is no schedule."""
    return 1.0


def always(round: int) -> int:
    """The first round that had the data of this one, where data never changes."""
    return 1


@dataclass(frozen=True)
class Context:
    """What a strategy may know of the experiment around it."""

    clients: int
    clusters: int = 1
    rounds: int = 1
    seed: int = 0
    weights: str = "size"  # or "uniform"
    lr: float = 0.01  # of the clients' optimizer
    optimizer: str = "sgd"  # of the clients
    momentum: float = 0.0  # of it, if it is sgd
    rates: Callable[[int], float] = unchanged  # what it is multiplied with in a round
    groups: Indices | None = (
        None  # ground-truth groups, for the oracle; empty while the data is not there yet
    )
    truth: Callable[[int], Indices | None] | None = (
        None  # the same in a round, where data changes during a run
    )
    since: Callable[[int], int] = always  # the first round that had the data of a round
    known_groups: Indices | None = None  # every ground-truth group that there ever is
    outputs: int | None = None  # of the network; None while it is not known
    has_validation: bool = False
    evaluate_every: int = 1
    evaluate_last: int = 3
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    options: Mapping[str, Any] = field(default_factory=dict)  # option sections of the experiment, by name
    new_clients: Indices = field(default_factory=lambda: np.zeros(0, np.int64))  # who never trains
    adoption: str = "labels"  # how these find a cluster (`adoption.py`)


class Additions(Protocol):
    """What a round of a strategy asks of the add-ons beside it."""

    def terms(self, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        """Terms of the local objective; c is the cluster each client trains under."""

    def freezes(self) -> bool:
        """Whether the assignment of this round is the last one's."""

    def point_weights(self, fleet: FleetView) -> npt.NDArray[np.float64] | None:
        """How much each client counts in K-means; None: as the base says."""


class NoAdditions:
    """A strategy on its own."""

    def terms(self, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        return []

    def freezes(self) -> bool:
        return False

    def point_weights(self, fleet: FleetView) -> npt.NDArray[np.float64] | None:
        return None


class Strategy(WithState):
    """Base of all algorithms. Subclasses set the class attributes, and `round`."""

    Options: ClassVar[type] = NoOptions
    # Capabilities: what the platform, add-ons and ensembles must know.
    clustered: ClassVar[bool] = False  # holds K = `clusters` models, and gives each client one of them
    aggregates: ClassVar[bool] = True  # the server makes models of what clients send
    private: ClassVar[bool] = False  # clients predict with models of their own
    mixes: ClassVar[bool] = False  # predicts with a mixture of probabilities
    additive: ClassVar[bool] = False  # predicts with the sum of several models
    grows: ClassVar[bool] = False  # starts with one cluster; `clusters` is the most there may be
    fixed: ClassVar[bool] = False  # its clusters never change
    reads_clusters: ClassVar[bool] = False  # `clusters` means something to it although it is not `clustered`
    takes_steps: ClassVar[bool] = True  # clients take local steps, on an objective that terms can be added to
    corrected: ClassVar[bool] = (
        False  # steps go along more than a client's own gradient, and so does their momentum
    )
    compares_models: ClassVar[bool] = (
        False  # participants pass their samples through all K models, in every round
    )
    proximal: ClassVar[bool] = False  # has a pull towards the received model already
    when_empty: ClassVar[str] = "it keeps its model"  # what becomes of a cluster that no client is in
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED}
    expects: ClassVar[Expectations] = Expectations()  # what it is held to (`python -m benchmarks behaviour`)

    additions: Additions = NoAdditions()

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options if options is not None else self.Options()
        self.context = context
        self.K = context.clusters
        self.number = 0  # of the round under way
        self.steps = server_optimizers.ServerSteps(server_optimizers.chosen(context.server))
        self.assignment: Indices | None = None  # cluster of each client id, UNASSIGNED where not known
        self.report: dict[str, Any] = {}  # metrics of the last round, for the metrics table
        self.records: dict[str, dict[str, npt.NDArray[Any]]] = {}  # tables of the last round, for the figures
        self.events: list[str] = []  # what a user should know of the last round

    # --- what a paper defines ---------------------------------------------------------------------------

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
        """What each client of `fleet` predicts with."""
        raise NotImplementedError

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds, for the run directory."""
        raise NotImplementedError

    # --- what a method may add to it --------------------------------------------------------------------

    def labels(self, fleet: FleetView) -> Indices | None:
        """The cluster of each client of `fleet`, also of clients never seen; None without clusters."""
        return None

    def centre_models(self) -> list[list[Vector]]:
        """What is measured on every ground-truth distribution: for each cluster, the models whose outputs add up."""
        return []

    def proximity(self, ids: Indices) -> tuple[Indices, npt.NDArray[np.float64]] | None:
        """Those of `ids` that the method can compare, and their distances (n, n); None if it compares no clients."""
        return None

    def gradient_point(self, fleet: FleetView) -> tuple[Reference, Reference | None]:
        """Where each client's gradient is taken for the clusterability measure (thesis 3.18), and on top of what.

        The model that a client predicts with.
        """
        return self.prediction(fleet).models[0], None

    # --- what strategies share --------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the clients' optimizer in this round."""
        return self.context.lr * self.context.rates(self.number)

    def start_round(self, number: int) -> None:
        """Forget what was reported of the last round; what setup said comes with the first one."""
        self.events = self.events if self.number == 0 else []
        self.number, self.report, self.records = number, {}, {}

    @property
    def rule(self) -> Rule:
        """How models become one; a method with a rule of its own overrides this."""
        return Rule.chosen(self.context.aggregation)

    def aggregated(
        self, theta: Handle, fleet: FleetView, c: Indices, otherwise: Models, name: str = ""
    ) -> Models:
        """One model for each cluster `c`, by the rule and the server optimizer; an empty one keeps `otherwise`.

        `otherwise` is what clients received. `name` tells sets of models apart that one training feeds.
        """
        n, seed = self.client_weights(fleet), self.context.seed
        uploads = Uploads(theta, c, n, otherwise, fleet.spec, seed=seed, round=self.number)
        if self.steps.optimizer.is_identity:
            return self.rule(uploads)
        fed = np.array([len(rows) > 0 for rows in uploads.members])
        return self.stepped(theta, otherwise, self.rule(uploads), fed, fleet, name)

    def stepped(
        self,
        theta: Handle,
        before: Models,
        aggregate: Models,
        fed: npt.NDArray[np.bool_],
        fleet: FleetView,
        name: str = "",
    ) -> Models:
        """The server optimizer's step from `before`, given the aggregate of `theta`; only models that were `fed` do."""
        return self.steps(f"{theta.slot}{name}", before, aggregate, fed, fleet.spec.parameters)

    def client_weights(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        """n_i, or 1 for every client under `weights=uniform`."""
        uniform = self.context.weights == "uniform"
        return np.ones(len(fleet.ids)) if uniform else fleet.sizes.astype(np.float64)

    def penalties(self, fleet: FleetView, c: Indices | None = None) -> list[Penalty]:
        """The terms that add-ons put into the local objective."""
        return self.additions.terms(fleet, c)

    def average(self, theta: Handle, fleet: FleetView, otherwise: Vector) -> Vector:
        """The aggregate of all clients' models: the mean, or what `aggregation` names."""
        labels = np.zeros(len(theta.ids), np.int64)
        return self.aggregated(theta, fleet, labels, Models(np.asarray(otherwise)[None]), "/all")[0]

    def save_state(self) -> dict[str, Any]:
        saved = {**super().save_state(), "assignment": self.assignment, "number": self.number}
        return {**saved, "server_optimizer": self.steps.state} if self.steps.state else saved

    def load_state(self, tree: dict[str, Any]) -> None:
        super().load_state(tree)
        self.assignment, self.number = tree["assignment"], tree["number"]
        self.steps.state = tree.get("server_optimizer", {})


METHODS: Registry[type[Strategy]] = Registry("method", base=Strategy)


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

    Its round is four verbs: `expect` (the clusters that clients train under), `train`, `settle` (the clusters that
    the average uses) and `update`. Loss-based methods decide in `expect`, parameter-based ones in `settle`. These,
    `notice`, `assign`, `average`, `clusters`, `number`, `by_loss` and `underlay` are what an add-on may ask for.
    """

    clustered = True
    by_loss: ClassVar[bool] = True  # assigns by loss (before training), else by parameters (after it)
    state: ClassVar[tuple[str, ...]] = ("clusters",)
    clusters: Models
    underlay: Reference | None = None  # what an add-on has cluster models added on top of

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

    def train(
        self,
        fleet: FleetView,
        c: Indices,
        on_top_of: Reference | None = None,
        *,
        start: Reference | None = None,
        keep: str | None = None,
    ) -> Handle:
        """Local training from the cluster models (or `start`), with the add-ons' penalties."""
        under = self.underlay if on_top_of is None else on_top_of
        start = self.clusters[c] if start is None else start
        return fleet.train(start=start, on_top_of=under, penalties=self.penalties(fleet, c), keep=keep)

    def notice(self, theta: Handle) -> None:
        """Remember what arrived of clients that may be absent when they are assigned; nothing by default."""

    def settle(self, fleet: FleetView, theta: Handle, c: Indices) -> Indices:
        """The cluster each client's model is averaged into."""
        return c

    def update(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        """Average inside each cluster; an empty one keeps its model."""
        self.clusters = self.aggregated(theta, fleet, c, self.clusters)
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
        return bool(seen) and self.additions.freezes()

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster of clients the method has not seen yet: the one of least loss."""
        return fleet.best(self.clusters, on_top_of=self.underlay)[0]

    def adopt_unlabelled(self, fleet: FleetView) -> Indices:
        """The cluster of new clients that have no labels: of the model that is surest of its predictions."""
        return surest(self, fleet)

    @property
    def open_clusters(self) -> npt.NDArray[np.bool_]:
        """Which clusters new clients may join."""
        return np.ones(self.K, bool)

    def labels(self, fleet: FleetView) -> Indices:
        """The cluster of each client of `fleet`; clients never seen are adopted for now, not for good."""
        assert self.assignment is not None
        labels = self.assignment[fleet.ids].copy()
        unseen = labels == UNASSIGNED
        new = np.isin(fleet.ids, self.context.new_clients)
        for at, rule in ((unseen & ~new, "labels"), (unseen & new, self.context.adoption)):
            if at.any():
                labels[at] = ADOPTION.find(rule)().assign(self, fleet.select(fleet.ids[at]))
        return labels

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.clusters[self.labels(fleet)]])

    def gradient_point(self, fleet: FleetView) -> tuple[Reference, Reference | None]:
        return super().gradient_point(fleet)[0], self.underlay

    def centre_models(self) -> list[list[Vector]]:
        under = [self.underlay] if isinstance(self.underlay, np.ndarray) else []
        return [[model, *under] for model in self.clusters.values]

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"clusters": self.clusters.values}


def lowest(losses: npt.NDArray[np.float64]) -> Indices:
    """argmin over models, ties to the lowest index; a loss that is not finite never wins.

    >>> lowest(np.array([[2.0, 1.0, 1.0], [np.nan, 5.0, 7.0]])).tolist()
    [1, 1]
    """
    return np.argmin(np.where(np.isfinite(losses), losses, np.inf), axis=1).astype(np.int64)


def bases_of(kind: type[Strategy]) -> str:
    """The registered methods of a kind, for a sentence that says which bases there are.

    >>> from archipelago.strategies.reference_clusters import FixedClusters
    >>> bases_of(FixedClusters)
    'oracle or random'
    """
    *names, last = sorted(name for name, entry in METHODS.items() if issubclass(entry.value, kind))
    return f"{', '.join(names)} or {last}" if names else last
