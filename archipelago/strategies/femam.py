"""FeMAM: multi-level additive models, one global, some per cluster, one per client, added level by level.

Chen, Zhou, Long, Ma, Jiang, Zhang, "Multi-Level Additive Modeling for Structured Non-IID Federated Learning",
2024 (arXiv:2405.16472): f_i(x) = sum_l f(x; Theta^(l)_{C_l(i)}), at most one model per level.

    1   level 1 is one global model                                                                  setup
    2   each round:
    3       if the newest level has converged: add the next, a copy of the global model              open
    4       each client that has not dropped the newest level:
    5           theta_i ~ argmin CE((f(x; theta) + sum_older f(x)) / L_i, y) + (mu / 2) ||theta - start||^2     train
    6       C_l = K-means of how every client has changed the level's start (a personal level: i)     cluster
    7       Theta^(l)_k = mean of theta_i over C_l(i) = k                                            settle
    8       v_i = validation loss of f_i
    9       if the mean of v improves no longer: the newest level has converged                      judge
    10          a client whose v_i it has not lowered drops it, and L_i shrinks                      prune

    Theta^(l)_k   self.levels[l][k]        C_l(i)   self.rows[l][i]        K_l   self.plan[l]
    L_i           models that client i holds        v    self.history      older levels are fixed

Readings

Source
    paper   its abstract, a theorem and the captions of its figures were at hand, not the sections between
    here    where these are silent, the released code
Sum or mean of the logits
    paper   f_i is the sum ("sums up the outputs of models assigned to it across all levels")
    code    trains and validates on the mean, predicts with the sum
    here    the mean everywhere: only then is a copied level neutral, and it has the argmax of the sum
    option  femam.loss_scale=sum
mu
    code    0.01 without the 1/2
    here    0.02 with it
    option  femam.mu
What K-means sees
    code    classifiers divided by the absolute sum of their entries, which can be close to 0, from random starts; or,
            switched off, their change in the round
    here    all that a client has changed since the level began, at length one (at most 20,000 parameters of the model,
            the same of all), from K-means++ starts. `parameters` is the classifier, at length one; `updates` are a
            client's own changes of it in each round, added up
    option  femam.features=parameters|updates, femam.normalise, femam.clustering
Other distances, and descriptors of a client's data
    here    none: between points of length one K-means is by cosines already; and a level is to find what those below it
            left, while a descriptor would say the same at every level
The first clustering of a level
    code    after its first round
    here    when clients have trained a copy of their own `alone` times, on average: a global model that has converged
            leaves little to tell clients apart by in one round, and a poor first clustering locks in, because models
            of different clusters differ more than clients do. At most half of the level's rounds
    option  femam.alone=0
Clusters that are reported
    here    of the first level that has any; when levels are closed, of the one that most clients keep
Absent clients
    code    all take part
    here    K-means sees what is known of every client, as FeSEM's code does
When a level has converged
    paper   when the accuracy of the additive model saturates; each level until convergence (figures 2 and 3)
    code    when the standard deviation of 50 losses, first filled up with 999, is below 1: a fixed schedule
    here    when in `patience` rounds the mean validation loss gained less than `threshold` of what the level has gained
            so far. Level 1 takes at most `share` of the rounds, the others the rest in equal parts, as in the code
    option  femam.schedule=[400,50,50,50,50], femam.patience, femam.threshold, femam.share
A client whose loss a level did not lower
    paper   useless models are pruned (figure 4): at most one model per level
    code    is taken off the record and keeps using it
    here    drops it; compared with the last level that it kept, means over `window` rounds. The last level is judged at
            the end of the run, so that nobody stops training before
    option  femam.prune=bookkeeping|none
Local optimizer
    code    plain SGD, new every round
    here    the experiment's
    option  local.momentum=0 local.keep_optimizer=false
Clients that did not take part in a level yet
    here    join, level by level, the model of least training loss, or none where all would raise it; they have no
            personal model (`levels.py`)
Level 1
    code    FedAvg with the pull
    here    as the code, with FedAvg's batches: one level is FedProx with mu = 0.02, bit by bit
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, Context
from archipelago.strategies.clustering import CLUSTERING, ClusteringTask, clustered, match_labels
from archipelago.strategies.distances import normalised
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.judged_levels import JudgedLevels
from archipelago.strategies.levels import PERSONAL, Timetable, some_columns
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices, Models, Private, Reference

COMPARED = 20_000  # parameters of a model whose changes K-means sees, at most


@dataclass
class FeMAMOptions:
    """`femam.levels=...`"""

    levels: list[int] = setting(
        [1, 0, 0, 0],
        "models of each level that the server holds, 1 first; 0 stands for `clusters`",
        at_least=0,
    )
    personal: bool = setting(True, "end with a level of one model per client")
    schedule: list[int] = setting(
        [], "rounds of each level before the next is added, instead of the test for convergence", at_least=1
    )
    patience: int = setting(
        5, "converged: a level gained too little in so many rounds, which it trains at least", at_least=1
    )
    threshold: float = setting(
        0.05, "... less than this share of what the level has gained so far", at_least=0, below=1
    )
    share: float = setting(
        0.6, "most of the rounds that level 1 may take, the others the rest in equal parts; 1: no limit",
        above=0, at_most=1,
    )  # fmt: skip
    window: int = setting(5, "last validation losses of a level that decide who keeps it", at_least=1)
    loss_scale: str = setting(
        "mean", "local objective on the mean or the sum of a client's logits", choices=("mean", "sum")
    )
    mu: float = setting(0.02, "pull towards the model that the round started from", at_least=0)
    features: str = setting(
        "changes",
        "what K-means sees of a client: all that it has changed since the level began, its newest classifier, or its "
        "updates of that added up",
        choices=("changes", "parameters", "updates"),
    )
    alone: int = setting(
        5,
        "times that clients train a new level each for itself, before it is clustered first",
        at_least=0,
    )
    normalise: str = setting(
        "l2",
        "K-means on points divided by their length, |sum of entries| or 1",
        choices=("l2", "sum", "none"),
    )
    clustering: str = setting("kmeans", "clustering rule (see `list`), or an import path")
    starts: int = setting(10, "K-means++ starts, of which the best is kept", at_least=1)
    prune: str = setting(
        "real",
        "a client drops a level that did not lower its loss; bookkeeping: on record only; none: never",
        choices=("real", "bookkeeping", "none"),
    )

    def __post_init__(self) -> None:
        if not self.levels or self.levels[0] != 1:
            raise UserError(
                f"Expected femam.levels to begin with 1, the global model that new levels are copies of, got "
                f"{list(self.levels)}: write it as in [1,5,5].",
                code="wrong-form", setting="femam.levels", given=self.levels,
            )  # fmt: skip
        count = len(self.levels) + self.personal
        if self.schedule and not count - 1 <= len(self.schedule) <= count:
            raise UserError(
                f"Expected femam.schedule to give the rounds of {count - 1} levels (all of {count} but the last) "
                f"or of all {count}, got {list(self.schedule)}: femam.levels and femam.personal make the levels.",
                code="unequal-lengths", levels=self.levels, schedule=self.schedule,
            )  # fmt: skip


@METHODS.register(
    "femam", "levels of models, global to personal, whose outputs add up (Chen et al. 2024)", label="FeMAM"
)
class FeMAM(JudgedLevels):
    """Train, cluster and average the newest level on top of the older ones; add the next when it has converged."""

    Options = FeMAMOptions
    reads_clusters = True
    per_client: ClassVar[dict[str, float]] = {
        **JudgedLevels.per_client, "points": np.nan,
    }  # fmt: skip
    state = (
        *JudgedLevels.state, "points", "K", "turns",
    )  # fmt: skip
    # One level after the other. The first round of a level sends the one that was closed before it, too.
    expects = Expectations(
        ari=0.8,
        length=3,
        cost=Cost(down=3, up=1, trainings=1),
        known=(
            Known(
                "parts",
                ALL,
                "a level that most clients drop is left to the few whom it helps a little",
                limit=1e-3,
            ),
            Known(
                "groups",
                "participation",
                "clients that trained a new level once or twice are hard to tell apart",
                limit=-0.06,
            ),
            Known(
                "groups",
                "slow",
                "a level has a share of the rounds, too few at a tenth of the rate",
                limit=-0.06,
            ),
            Known(
                "accuracy",
                "slow",
                "a level has a share of the rounds, too few at a tenth of the rate",
                limit=0.08,
            ),
        ),
    )
    points: (
        npt.NDArray[np.float32] | None
    )  # what K-means sees of each client in the newest level, NaN: nothing yet
    turns: float  # how often a client has trained the newest level, on average

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.plan = [k or context.clusters for k in self.options.levels]
        self.plan += [context.clients] if self.options.personal else []
        self.timetable = Timetable(len(self.plan), context.rounds, self.options.share, self.options.schedule)

    @classmethod
    def check(cls, options: FeMAMOptions, context: Context) -> None:
        CLUSTERING.find(options.clustering)

    @property
    def combine(self) -> str:  # an option here
        """How outputs add up; the mean has the argmax of the sum and the loss that was trained."""
        return "logit_mean" if self.options.loss_scale == "mean" else "logit_sum"

    @property
    def drops(self) -> bool:  # an option here
        return bool(self.options.prune == "real")

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.reference, self.curve, self.K = None, np.full(1, np.nan), 1
        self.open(fleet.initial(1))

    def open(self, start: Models) -> None:
        """A new level: one model for all, until the first clustering; or personal ones."""
        personal = len(self.levels) == len(self.options.levels)
        self.add_level(None if personal else start)
        self.before = float(self.curve[-1]) if len(self.curve) else np.nan
        self.history, self.points, self.curve, self.closed = [], None, np.zeros(0), False
        half = self.timetable.left(self.newest, self.number) // 2
        clustered = not personal and self.plan[self.newest] > 1
        self.until = self.number + half - 1 if clustered and self.options.alone else 0
        self.turns = 0.0

    def round(self, fleet: FleetView) -> None:
        if self.closed and self.newest + 1 < len(self.plan):
            self.open(self.shared)  # a copy of the global model
            self.events.append(f"Level {self.newest + 1} of {len(self.plan)} is added.")
        training = fleet.select(fleet.ids[~self.dropped(self.newest)[fleet.ids]])
        alone = self.number <= self.until
        self.turns += len(training.ids) / self.context.clients
        if alone and self.turns > self.options.alone - 1e-9:
            self.until = self.number
        if len(training.ids):
            start = self.starts(training) if not alone else np.zeros(len(training.ids), np.int64)
            theta = self.train(training, start, alone)
            self.settle(training, theta, start)
        self.judge(fleet.everyone)
        self.describe(fleet.everyone)

    # --- a round ----------------------------------------------------------------------------------------

    def starts(self, fleet: FleetView) -> Indices:
        """The model of the newest level that each client starts from; its own in a personal level."""
        if self.levels[self.newest] is None:
            return fleet.ids
        older = self.structure(fleet, self.newest)
        return self.completed(fleet, self.newest, self.rows[self.newest][fleet.ids].copy(), older)

    def train(self, fleet: FleetView, c: Indices, alone: bool = False) -> Handle:
        """Local training of the newest level on what the older ones leave over; `alone`: of a copy of one's own."""
        older = self.structure(fleet, self.newest)
        models = self.levels[self.newest]
        own = PERSONAL if models is None else self.copy_name if alone else None
        start: Reference = (
            models[c]
            if models is not None and own is None
            else Private(own or PERSONAL, default=self.shared[0])
        )
        L = 1 + sum((rows >= 0).astype(np.int64) for rows in older)
        pull: list[Penalty] = [Proximal(self.options.mu, start)] if self.options.mu else []
        return fleet.train(
            start=start,
            on_top_of=self.references(older),
            held=self.with_clients(older, first=self.trained == 0),
            scale=np.broadcast_to(1.0 / L, fleet.ids.shape) if self.options.loss_scale == "mean" else None,
            penalties=[*pull, *self.penalties(fleet)],
            slot="main" if self.newest == 0 else f"level {self.newest + 1}",
            keep=own,
        )

    @property
    def copy_name(self) -> str:
        """A client's own copy of the newest level, before that is clustered."""
        return f"level {self.newest + 1} alone"

    def settle(self, fleet: FleetView, theta: Handle, start: Indices) -> None:
        """Cluster what came out and average inside each cluster; a personal model is its own average."""
        models, K = self.levels[self.newest], self.plan[self.newest]
        rows = self.rows[self.newest].copy()
        came = theta.ids[theta.arrived]
        if models is None:
            rows[came] = came
        elif len(came):
            if K == 1:
                rows[came] = 0
            else:
                self.notice(fleet, theta, models.values[start])
                if self.number < self.until:
                    return
                if self.number == self.until:
                    fleet.everyone.forget(self.copy_name)
                rows = self.cluster(rows, K)
                if max(self.plan[: self.newest]) == 1:  # the first level that has some
                    self.assignment, self.K = rows.copy(), K
            # Clusters that nobody is in yet keep the level's start.
            keep = models if len(models) == K else Models(np.repeat(models.values, K, axis=0))
            self.levels[self.newest] = self.aggregated(theta, fleet, rows[theta.ids], otherwise=keep)
        self.rows[self.newest] = rows

    def notice(self, fleet: FleetView, theta: Handle, start: npt.NDArray[np.float32]) -> None:
        """Remember what arrived: changes since the level began, classifiers, or the changes of these added up."""
        changes, there = self.options.features == "changes", theta.arrived
        some = some_columns(fleet.spec.parameters, COMPARED, self.context.seed)
        columns = some if changes else fleet.spec.last_layer()
        ids, found = theta.ids[there], theta.gather(columns)[there]
        if changes:
            found = found - self.shared[0][columns]  # the level began as a copy of the global model
        if self.points is None:
            self.points = np.full((self.context.clients, len(columns)), np.nan, np.float32)
        self.points = self.points.copy()
        if self.options.features == "updates":
            earlier = (
                0.0 if self.number <= self.until else np.nan_to_num(self.points[ids])
            )  # a copy has all of it
            found = earlier + (found - start[there][:, columns])
        self.points[ids] = found

    def cluster(self, rows: Indices, K: int) -> Indices:
        """The clusters of all clients that the level has seen, by K-means; ids kept as far as possible."""
        assert self.points is not None
        seen = np.flatnonzero(~np.isnan(self.points).any(axis=1) & ~self.dropped(self.newest))
        slot = f"level {self.newest + 1}"
        draw = generator(self.context.seed, "k-means", slot=slot, round=self.number).integers(2**31)
        points = normalised(self.points[seen], self.options.normalise)
        task = ClusteringTask(points, K, int(draw), starts=self.options.starts)
        found = clustered(self.options.clustering, task, self.context)
        first = bool((rows == UNASSIGNED).all())
        if found.distinct < K and first:
            self.events.append(
                f"Level {self.newest + 1}: only {found.distinct} distinct models for {K} clusters, the rest stays "
                "empty."
            )
        before = rows
        if first and self.assignment is not None:
            before = self.assignment  # of a level before
        self.report["clustering_objective"] = found.objective
        rows[seen] = match_labels(before[seen], found.labels, K)[found.labels]
        return rows
