"""FeMAM: multi-level additive models, one global, some per cluster, one per client, added level by level.

Chen, Zhou, Long, Ma, Jiang, Zhang, "Multi-Level Additive Modeling for Structured Non-IID Federated Learning",
arXiv 2405.16472.

    f_i(x) = sum_l f(x; Theta^(l)_{C_l(i)})     at most one model per level: level 1 global, then clusters, last
                                                personal; only the newest level is trained, the others are fixed

    Theta^(l)_k   self.levels[l][k] (the clients' own "personal" models in the last level)
    C_l(i)        self.rows[l][i], -1 not known yet        pruned   self.pruned[l][i]
    K_l           self.plan[l]                             L_i      number of models that client i holds
    Q             the experiment's local steps or epochs

A round trains the newest level to fit what the older ones leave over,
    min_theta  CE((f(x; theta) + sum_older f) / L_i, y) + (mu / 2) ||theta - theta_start||^2,
clusters what came out by K-means on the classifier's weights and bias, averages inside each cluster, and
measures validation losses. When these no longer move, each client keeps the level only if it has lowered its
loss, and the next round adds a level that starts as a copy of the global model.

Readings. The paper's text was not at hand: where its abstract is silent, the released code is the source.
- `loss_scale=mean` divides the summed logits by L_i, as the code does in training and validation: only then is a
  copied level neutral (with one level before it). Predictions are the mean too: it has the argmax of the sum, and
  the loss that was trained. `loss_scale=sum`: plain sums everywhere.
- mu = 0.02: the code has 0.01 without the 1/2.
- K-means sees vectors of length one; the code divides by the absolute sum of the entries, which can be close to 0
  (`normalise=sum`). It starts from K-means++ (the code: random points). Clustering differences instead of
  parameters, an option of the code that is off, is not offered.
- A level has converged when the standard deviation of the last `window` mean validation losses falls below
  `threshold` times their mean. The code compares that of 50 losses, first filled up with 999, with 1, which comes
  to a fixed schedule: `schedule=[400,50,50,50,50] window=50`.
- A pruned client drops the model and L_i shrinks; in the code it keeps using it (`prune=bookkeeping`). Pruning
  compares means over the last `window` rounds with those of the last level the client kept. The newest level is
  judged at the end of the run at the latest; after that, only clients that kept it continue to train.
- Personal models stay with their clients: the average of one model is that model.
- The code's plain SGD, new every round, is `local.momentum=0 local.keep_optimizer=false`.
- Clients that did not take part in a level yet join, level by level, the model of least training loss, or none
  where all of them would raise it (`prune=real`); they have no personal model.
- Level 1 draws the batches of FedAvg, so that one level is FedProx with mu = 0.02, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, Context, Strategy, lowest
from archipelago.strategies.clustering import CLUSTERING, ClusteringTask, clustered, match_labels, normalised
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices, Models, Prediction, Private, Reference

NOTHING = -2  # of a level whose model a client dropped, or never had
PERSONAL = "personal"


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
    window: int = setting(
        5, "validation losses that say whether a level has converged or is pruned", at_least=2
    )
    threshold: float = setting(0.05, "converged: these losses spread (std / mean) by less than this", above=0)
    min_rounds: int = setting(5, "rounds that a level trains at least", at_least=1)
    loss_scale: str = setting(
        "mean", "local objective on the mean or the sum of a client's logits", choices=("mean", "sum")
    )
    mu: float = setting(0.02, "pull towards the model that the round started from", at_least=0)
    normalise: str = setting(
        "l2",
        "K-means on classifiers divided by their length, |sum of entries| or 1",
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
                f"{list(self.levels)}: write it as in [1,5,5]."
            )
        count = len(self.levels) + self.personal
        if self.schedule and not count - 1 <= len(self.schedule) <= count:
            raise UserError(
                f"Expected femam.schedule to give the rounds of {count - 1} levels (all of {count} but the last) "
                f"or of all {count}, got {list(self.schedule)}: femam.levels and femam.personal make the levels."
            )


@METHODS.register(
    "femam", "levels of models, global to personal, whose outputs add up (Chen et al. 2024)", label="FeMAM"
)
class FeMAM(Strategy):
    """Train, cluster and average the newest level on top of the older ones; add the next when it has converged."""

    Options = FeMAMOptions
    private = True
    additive = True
    reads_clusters = True
    per_client: ClassVar[dict[str, float]] = {
        "assignment": UNASSIGNED, "rows": UNASSIGNED, "pruned": 0, "history": np.nan, "reference": np.nan,
    }  # fmt: skip
    state = ("levels", "rows", "pruned", "history", "reference", "trained", "closed", "K")
    levels: list[Models | None]  # None: the personal level, which the clients hold
    rows: list[Indices]
    pruned: list[npt.NDArray[np.bool_]]
    history: list[npt.NDArray[np.float64]]  # the newest level's validation losses by client id, latest last
    reference: npt.NDArray[np.float64] | None  # the same of the last level each client kept, a mean

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.plan = [k or context.clusters for k in self.options.levels]
        self.plan += [context.clients] if self.options.personal else []

    @classmethod
    def check(cls, options: FeMAMOptions, context: Context) -> None:
        CLUSTERING.find(options.clustering)

    def setup(self, fleet: FleetView) -> None:
        self.levels, self.rows, self.pruned = [], [], []
        self.reference = None
        self.K = 1
        self.open(fleet.initial(1))

    def round(self, fleet: FleetView) -> None:
        if self.closed and self.newest + 1 < len(self.plan):
            assert self.levels[0] is not None
            self.open(self.levels[0])  # a copy of the global model
            self.events.append(f"Level {self.newest + 1} of {len(self.plan)} is added.")
        if self.number == 1 and not self.context.has_validation and self.watches:
            self.events.append(
                "There are no validation samples (partition.validation=0): FeMAM adds and prunes levels by "
                "training losses."
            )
        training = fleet.select(fleet.ids[~self.dropped(self.newest)[fleet.ids]])
        if len(training.ids):
            theta = self.train(training)
            self.settle(training, theta)
        self.judge(fleet.everyone)
        self.describe(fleet.everyone)

    # --- levels -----------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The level that is trained."""
        return len(self.levels) - 1

    def is_personal(self, level: int) -> bool:
        """Whether the clients hold this level themselves."""
        return level == len(self.options.levels)

    def open(self, start: Models) -> None:
        """A new level: one model for all, until the first clustering."""
        level = len(self.levels)
        m = self.context.clients
        self.levels.append(None if self.is_personal(level) else Models(start.values.copy()))
        self.rows.append(np.full(m, 0 if level == 0 else UNASSIGNED, np.int64))
        self.pruned.append(np.zeros(m, bool))
        self.history, self.trained, self.closed = [], 0, False

    def dropped(self, level: int) -> npt.NDArray[np.bool_]:
        """Which client ids do without this level."""
        return self.pruned[level] & (self.options.prune == "real")

    def structure(self, fleet: FleetView, count: int) -> list[Indices]:
        """C_l(i) of the first `count` levels: the model each client holds, negative where it holds none."""
        held: list[Indices] = []
        for level in range(count):
            rows = self.rows[level][fleet.ids].copy()
            rows[self.dropped(level)[fleet.ids]] = NOTHING
            unseen = rows == UNASSIGNED
            if unseen.any():
                new = fleet.select(fleet.ids[unseen])
                below = [older[unseen] for older in held]
                rows[unseen] = self.adopt(new, level, below, may_skip=self.options.prune == "real")
            held.append(rows)
        return held

    def adopt(self, fleet: FleetView, level: int, below: list[Indices], may_skip: bool) -> Indices:
        """What clients that the level has not seen get of it: the model of least loss, for now."""
        models = self.levels[level]
        if models is None:
            return np.full(len(fleet.ids), NOTHING, np.int64)
        if level == 0:  # the global model, which everyone has
            return np.zeros(len(fleet.ids), np.int64)
        older = self.references(below)
        losses = np.stack(
            [self.training_loss(fleet, [*older, models[k]]) for k in range(len(models))], axis=1
        )
        c = lowest(losses)
        if may_skip:
            c[losses[np.arange(len(c)), c] > self.training_loss(fleet, older)] = NOTHING
        return c

    def references(self, held: list[Indices]) -> list[Reference]:
        """The models of these levels as references, levels that nobody holds left out."""
        found: list[Reference] = []
        for level, rows in enumerate(held):
            models = self.levels[level]
            if (rows >= 0).any():
                found.append(Private(PERSONAL) if models is None else models[rows])
        return found

    def training_loss(self, fleet: FleetView, models: list[Reference]) -> npt.NDArray[np.float64]:
        """Each client's training loss under the added models."""
        found = fleet.evaluate(Prediction(models, combine=self.combine), "train")
        return np.asarray(found["loss"], np.float64)

    # --- a round ----------------------------------------------------------------------------------------

    def train(self, fleet: FleetView) -> Handle:
        """Local training of the newest level on what the older ones leave over."""
        older = self.structure(fleet, self.newest)
        models = self.levels[self.newest]
        start: Reference
        if models is None:
            assert self.levels[0] is not None
            start = Private(PERSONAL, default=self.levels[0][0])
        else:
            c = self.rows[self.newest][fleet.ids].copy()
            unseen = c == UNASSIGNED
            if unseen.any():
                below = [rows[unseen] for rows in older]
                c[unseen] = self.adopt(fleet.select(fleet.ids[unseen]), self.newest, below, may_skip=False)
            start = models[c]
        under = self.references(older)
        # Clients keep what no longer changes; the level that was closed last comes with the first round of this one.
        new = self.trained == 0 and bool(older) and bool((older[-1] >= 0).any())
        L = 1 + sum((rows >= 0).astype(np.int64) for rows in older)
        pull: list[Penalty] = [Proximal(self.options.mu, start)] if self.options.mu else []
        return fleet.train(
            start=start,
            on_top_of=under,
            held=len(under) - new,
            scale=np.broadcast_to(1.0 / L, fleet.ids.shape) if self.options.loss_scale == "mean" else None,
            penalties=[*pull, *self.penalties(fleet)],
            slot="main" if self.newest == 0 else f"level {self.newest + 1}",
            keep=PERSONAL if models is None else None,
        )

    def settle(self, fleet: FleetView, theta: Handle) -> None:
        """Cluster what came out and average inside each cluster; a personal model is its own average."""
        arrived = np.flatnonzero(theta.arrived)
        models, K = self.levels[self.newest], self.plan[self.newest]
        rows = self.rows[self.newest].copy()
        if models is None:
            rows[theta.ids[arrived]] = theta.ids[arrived]
        elif len(arrived):
            c = np.full(len(theta.ids), UNASSIGNED, np.int64)
            c[arrived] = self.cluster(fleet, theta, arrived, K)
            rows[theta.ids[arrived]] = c[arrived]
            # Clusters that nobody is in yet keep the level's start.
            keep = models if len(models) == K else Models(np.repeat(models.values, K, axis=0))
            self.levels[self.newest] = self.aggregated(theta, fleet, c, otherwise=keep)
            if K > 1:
                self.assignment, self.K = rows.copy(), K
        self.rows[self.newest] = rows

    def cluster(self, fleet: FleetView, theta: Handle, arrived: Indices, K: int) -> Indices:
        """K-means on the classifiers of the clients that delivered, ids kept as far as possible."""
        if K == 1:
            return np.zeros(len(arrived), np.int64)
        points = normalised(theta.gather(fleet.spec.last_layer())[arrived], self.options.normalise)
        slot = f"level {self.newest + 1}"
        draw = generator(self.context.seed, "k-means", slot=slot, round=self.number).integers(2**31)
        task = ClusteringTask(points, K, int(draw), starts=self.options.starts)
        found = clustered(self.options.clustering, task, self.context)
        if found.distinct < K and self.trained == 0:
            self.events.append(
                f"Level {self.newest + 1}: only {found.distinct} distinct models for {K} clusters, the rest stays "
                "empty."
            )
        ids, before = theta.ids[arrived], self.rows[self.newest]
        if (before == UNASSIGNED).all() and self.assignment is not None:
            before = self.assignment  # of the level before
        self.report["clustering_objective"] = found.objective
        return match_labels(before[ids], found.labels, K)[found.labels]

    # --- when a level is done ---------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether validation losses decide anything."""
        return not self.options.schedule or self.options.prune != "none"

    def judge(self, everyone: FleetView) -> None:
        """Measure the newest level; when it has converged, or the run ends, close it and prune."""
        if self.closed:
            return
        self.trained += 1
        if self.watches:
            self.history = [*self.history, self.validate(everyone)][-self.options.window :]
            means = np.array([np.nanmean(losses) for losses in self.history])
            self.report["stage_loss"] = float(means[-1])
            with np.errstate(all="ignore"):  # a diverged client's loss may be infinite: not converged
                self.report["stage_spread"] = float(np.std(means) / max(float(np.mean(means)), 1e-12))
        if self.converged() or self.number >= self.context.rounds:
            self.closed = True
            self.prune()
        missing = len(self.plan) - len(self.levels)
        if self.number >= self.context.rounds and missing:
            self.events.append(
                f"{missing} of {len(self.plan)} levels were never added: level {self.newest + 1} was still being "
                "trained; ask for more rounds, or set femam.schedule."
            )

    def validate(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        """Validation losses by client id, NaN for clients without samples."""
        split = "validation" if self.context.has_validation else "train"
        found = fleet.evaluate(self.prediction(fleet), split)
        losses = np.full(self.context.clients, np.nan)
        measured = np.where(np.isnan(found["loss"]), np.inf, found["loss"])
        losses[fleet.ids] = np.where(found["samples"] > 0, measured, np.nan)
        return losses

    def converged(self) -> bool:
        """Whether the newest level has trained enough."""
        schedule = self.options.schedule
        if schedule:
            return self.newest < len(schedule) and self.trained >= schedule[self.newest]
        enough = self.trained >= max(self.options.min_rounds, self.options.window)
        return enough and bool(self.report["stage_spread"] < self.options.threshold)

    def prune(self) -> None:
        """Each client keeps the level only if it has lowered its loss below that of the last level it kept."""
        if not self.watches:
            return
        loss = np.mean(self.history, axis=0)
        if self.reference is None:  # the global level, which everyone keeps
            self.reference = loss
            return
        level, seen = self.newest, self.rows[self.newest] >= 0
        useless = seen & (loss >= self.reference) & (self.options.prune != "none")
        self.pruned[level] = useless
        self.reference = np.where(useless, self.reference, loss)
        if useless.any():
            kept = "would drop it, and keep using it (bookkeeping)"
            what = "drop it" if self.options.prune == "real" else kept
            self.events.append(
                f"Level {level + 1} did not lower the loss of {int(useless.sum())} of {int(seen.sum())} clients: "
                f"they {what}."
            )

    # --- what others see --------------------------------------------------------------------------------

    @property
    def combine(self) -> str:
        """How outputs add up; the mean has the argmax of the sum and the loss that was trained."""
        return "logit_mean" if self.options.loss_scale == "mean" else "logit_sum"

    def prediction(self, fleet: FleetView) -> Prediction:
        held = self.structure(fleet, len(self.levels))
        holds = np.stack([rows >= 0 for rows in held if (rows >= 0).any()], axis=1)
        # A dropped personal model is still in the client's hands: only a weight of 0 keeps it out.
        weights = holds.astype(np.float64) if self.dropped(self.newest)[fleet.ids].any() else None
        return Prediction(self.references(held), weights, self.combine)

    def describe(self, everyone: FleetView) -> None:
        """The structure, for the metrics table and the figures."""
        rows, pruned = np.stack(self.rows), np.stack(self.pruned)
        holds = (rows >= 0) & ~(pruned & (self.options.prune == "real"))
        self.report["levels"] = int(holds.any(axis=1).sum())
        self.report["models_per_client"] = float(holds.sum(axis=0)[everyone.ids].mean())
        levels, m = rows.shape
        self.records["levels"] = {
            "level": np.repeat(np.arange(1, levels + 1), m),
            "client": np.tile(np.arange(m), levels),
            "cluster": rows.ravel(),
            "pruned": pruned.ravel(),
        }

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {
            f"level{level + 1}": models.values
            for level, models in enumerate(self.levels)
            if models is not None
        }
