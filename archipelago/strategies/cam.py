"""CAM: a shared global model under the cluster models of any clustered base.

Ma, Zhou, Long, Jiang, Zhang, "Structured Federated Learning through Clustered Additive Modeling", NeurIPS
2023; thesis chapter 7. Equation numbers are the paper's.

    F_i(x) = h(x; Theta_g) + f(x; Theta_c(i))  (1): logits are added

    Theta_g   self.shared          Theta_k   base.clusters[k]      c(i)   c
    theta_i   theta                theta_i^0 theta_0               beta   `warmup` x rounds

Algorithm 1 over the verbs of a clustered base: IFCA-CAM assigns by the loss of the sum (2) before training,
FeSEM-CAM and WeCFL-CAM by K-means (11) after it, and pull theta_i to its centre by lambda (12), (13).

`warm` says what the beta rounds of warm-up train; until they end clients predict with that part alone.

Readings

Eq. (6)
    paper   moves a cluster by its share of all data only
    code    the mean inside the cluster, as thesis (7.6)
    here    the mean inside the cluster
Eq. (15)
    paper   prints theta_i^0 twice
    here    h(theta_i^0) + f(theta_i), thesis (7.15)
Eq. (13)
    paper   n_i/n on the gradient alone, a slip
    code    no pull at all
    here    the optimizer steps on l + (lambda/2) ||theta_i - Theta_c||^2
    option  cam.lam=0
Epochs
    paper   E epochs
    here    the experiment's local steps
    option  local.steps, local.epochs
How the two parts take turns
    paper   side by side, each seeing the other one fixed; or (i)(ii)(i)(iii)
    code    0.10.3: the shared part, then the cluster part on top of it; 0.9.12 to 0.10.2: averaged in between
    here    the cluster part, then the shared part on top of it, by measurement (`results/cam-defaults.md`)
    option  cam.schedule=simultaneous|alternating|global_first|global_first_aggregated
Warm-up
    paper   FedAvg for Theta_g under loss-based bases, local training under the others
    here    FedAvg for Theta_g under every base, until K-means finds the same groups twice in a row in what clients
            learn, 0.3 of the rounds at most: these are the first clusters, and both parts live
            (`results/cam-defaults.md`). Under a base that begins with one cluster always 0.3: CFL then finds two
            rotations less well (ARI 0.33) than after `local` (1.0)
    option  cam.warm=base|local|clusters, cam.warmup, cam.first=kmeans
K-means
    paper   counts samples, (10)
    code    counts clients under FeSEM
    here    samples, so that FeSEM+CAM and WeCFL+CAM are one method
    option  cam.kmeans=base
First Theta_g
    paper   one for all
    code    each client draws its own: their average has a twelfth of a fresh model's norm, and never recovers
    here    one for all
    option  cam.start=own
Cluster part of a prediction
    paper   Theta_c(i) in (1), theta_i in the loss of (12)
    here    Theta_c(i)
    option  cam.predict=local
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import UNASSIGNED, ClusteredModels, Strategy, bases_of
from archipelago.strategies.clustering import ClusteringTask, clustered
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices, Prediction, Private, Reference

WARM = "warm"  # a client's model of a warm-up by local training
OWN = "theta"  # a client's own cluster part
SHARED = "shared"  # slot of the shared part
LONGEST = 0.3  # warmup=auto: share of the rounds, the paper's
SAME = 0.9  # adjusted Rand index from which two divisions are the same groups


@dataclass
class CAMOptions:
    """`cam.schedule=...`"""

    schedule: str = setting(
        "cluster_first",
        "how the shared and the cluster part take turns; simultaneous is the paper's, compat: global_first and "
        "global_first_aggregated are those of released code",
        choices=("simultaneous", "global_first", "global_first_aggregated", "cluster_first", "alternating"),
    )
    warmup: float | None = setting(
        None,
        "share of the rounds that warms one part up; auto: the shared part until K-means finds the same groups twice "
        "in a row in what clients learn, another part always, at most 0.3",
        at_least=0, below=1, auto=True,
    )  # fmt: skip
    warm: str = setting(
        "shared",
        "what the warm-up trains: the shared part (shared), the clients' own models, then K-means (local), the base "
        "alone (clusters); base: the paper's, shared under bases that assign by loss, local under the others",
        choices=("base", "shared", "local", "clusters"),
    )
    first: str = setting(
        "loss",
        "first clusters of a base that assigns by loss, after a shared warm-up or none: by Eq. (2), or K-means on what "
        "clients learn on top of the shared part from one common start",
        choices=("loss", "kmeans"),
    )
    lam: float = setting(
        0.01, "pull of theta_i to its centre under parameter-based bases, Eq. (12)", at_least=0
    )
    kmeans: str = setting(
        "size",
        "what a client counts in K-means: its samples, Eq. (10), or what the base says (released code)",
        choices=("size", "base"),
    )
    start: str = setting(
        "common",
        "compat: own gives every client its own random draw of the part that was not warmed up, until the first "
        "average (released code)",
        choices=("common", "own"),
    )
    predict: str = setting(
        "server",
        "cluster part that clients predict with: the server's, or their own theta_i as in the loss of Eq. (12)",
        choices=("server", "local"),
    )


@ADDONS.register(
    "cam", "a shared global model under the clusters, logits added (Ma et al. 2023)", label="CAM"
)
class CAM(Addon[ClusteredModels]):
    """F_i = h(Theta_g) + f(Theta_c(i))."""

    expects = Expectations(
        cost=Cost(down=2, up=2, trainings=2),  # in the round that finds the first clusters; else 1, 1, 1
        known=(
            Known("cost", "stragglers", "a training to compare clients by is whole, also at a straggler", limit=3.5),
            Known("groups", "rotations", "a base that begins with one cluster is warmed up to the end, and less of the "
                  "groups is left to it", limit=0.3, grows=True),
            Known("groups", ("slow", "one_class", "stragglers", "batchnorm"), "the shared model learns of what sets "
                  "clients apart, and less of it is left to the clusters", limit=-0.06),
        ),
    )  # fmt: skip

    Options = CAMOptions
    takes_round = True
    additive = True
    state = ("shared", "ended", "found")
    per_client: ClassVar[dict[str, float]] = {"found": UNASSIGNED}
    shared: Vector
    ended: int | None = None  # warmup=auto: its last round, once the groups were found
    found: Indices  # warmup=auto: every client's group in its last round of warm-up

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if not issubclass(base, ClusteredModels):
            return (
                "CAM adds a shared model under one cluster model per client, which this base does not have; "
                f"use a clustered base: {bases_of(ClusteredModels)}."
            )
        return None

    @classmethod
    def for_few_rounds(cls, options: CAMOptions, rounds: int) -> CAMOptions:
        """A share of few rounds may be none, and CAM is not CAM without its warm-up."""
        if options.warmup == 0 or (options.warmup is None and LONGEST * rounds >= 1):
            return options
        return dataclasses.replace(options, warmup=max(options.warmup or 0.0, 1 / rounds))

    def setup(self, base: ClusteredModels, fleet: FleetView) -> None:
        self.found = np.full(self.context.clients, UNASSIGNED, np.int64)
        self.shared = fleet.initial(1, "initial shared model")[0]
        self.restored(base)

    def restored(self, base: ClusteredModels) -> None:
        base.underlay = None if self.warming(base) else self.shared

    @property
    def beta(self) -> int:
        """Rounds of warm-up; where it ends by itself and has not yet, the most that it may take."""
        if self.ended is not None:
            return self.ended
        share = LONGEST if self.options.warmup is None else self.options.warmup
        return int(share * self.context.rounds + 1e-9)

    def kind(self, base: ClusteredModels) -> str:
        """What the warm-up trains."""
        if self.options.warm != "base":
            return str(self.options.warm)
        return "shared" if base.by_loss else "local"

    def warming(self, base: ClusteredModels) -> bool:
        """Whether this round is still warm-up."""
        return base.number <= self.beta and self.beta > 0

    def round(self, base: ClusteredModels, fleet: FleetView) -> None:
        if self.warming(base):
            base.underlay = None
            self.warm_up(base, fleet)
            return
        base.underlay = self.shared
        # (2), or the clusters of the last round
        c = self.first_clusters(base, fleet) if self.unclustered(base) else base.expect(fleet)
        if self.options.schedule == "alternating":
            theta = self.train_clusters(base, fleet, c)  # (5) or (13)
            base.update(fleet, theta, base.settle(fleet, theta, c))  # (6) or (11)
            c = base.expect(fleet)
            base.assign(fleet, c)  # the second assignment is the one that clients predict by
            theta_0 = self.train_shared(base, fleet, base.clusters[c])  # (8) or (15)
        else:
            theta, theta_0 = self.train_both(base, fleet, c)
            base.update(fleet, theta, base.settle(fleet, theta, c))  # (6) or (11)
        self.shared = base.average(theta_0, fleet, otherwise=self.shared)  # (9)
        base.underlay = self.shared

    def train_both(self, base: ClusteredModels, fleet: FleetView, c: Indices) -> tuple[Handle, Handle]:
        """Both local trainings of a client, by the schedule."""
        schedule = self.options.schedule
        if schedule == "global_first":
            theta_0 = self.train_shared(base, fleet, self.start_of_clusters(base, fleet, c))
            return self.train_clusters(base, fleet, c, on_top_of=theta_0), theta_0
        if schedule == "global_first_aggregated":
            theta_0 = self.train_shared(base, fleet, self.start_of_clusters(base, fleet, c))
            average = base.average(theta_0, fleet, otherwise=self.shared)  # (9), in the middle of the round
            return self.train_clusters(base, fleet, c, on_top_of=average), theta_0
        under = self.start_of_shared(base, fleet)
        theta = self.train_clusters(base, fleet, c, on_top_of=under)  # (5) or (13): Theta_g fixed
        fixed = theta if schedule == "cluster_first" else self.start_of_clusters(base, fleet, c)
        return theta, self.train_shared(base, fleet, fixed)  # (8) or (15): the cluster part fixed

    def train_clusters(
        self, base: ClusteredModels, fleet: FleetView, c: Indices, on_top_of: Reference | None = None
    ) -> Handle:
        """theta_i from the client's cluster model, on top of the shared part."""
        keep = OWN if self.options.predict == "local" else None
        return base.train(fleet, c, on_top_of, start=self.start_of_clusters(base, fleet, c), keep=keep)

    def train_shared(self, base: ClusteredModels, fleet: FleetView, fixed: Reference | None) -> Handle:
        """theta_i^0 from Theta_g, on top of the client's cluster part."""
        start = self.start_of_shared(base, fleet)
        return fleet.train(start=start, on_top_of=fixed, slot=SHARED, compared=False)

    # --- where both parts begin -------------------------------------------------------------------------

    def start_of_shared(self, base: ClusteredModels, fleet: FleetView) -> Reference:
        """Theta_g; compat: each client's own draw of it before its first average, unless it was warmed up."""
        if self.draws_alone(base) and not self.warms_shared(base):
            return fleet.initial(self.context.clients, "own shared model")[fleet.ids]
        return self.shared

    def start_of_clusters(self, base: ClusteredModels, fleet: FleetView, c: Indices) -> Reference:
        """Theta_c(i); compat: each client's own draw of it where the shared part was warmed up."""
        if self.draws_alone(base) and self.warms_shared(base):
            return fleet.initial(self.context.clients, "own cluster model")[fleet.ids]
        return base.clusters[c]

    def warms_shared(self, base: ClusteredModels) -> bool:
        """Whether the part that is not warmed up is that of the clusters."""
        return self.kind(base) == "shared"

    def draws_alone(self, base: ClusteredModels) -> bool:
        """compat: whether this is the first round with both parts."""
        return self.options.start == "own" and base.number == self.beta + 1

    # --- the first clusters -----------------------------------------------------------------------------

    def unclustered(self, base: ClusteredModels) -> bool:
        """Whether clients have no clusters yet, and K-means on models from one start finds the first ones."""
        assert base.assignment is not None
        by_kmeans = self.watches(base) or (base.by_loss and self.options.first == "kmeans")
        return by_kmeans and bool((base.assignment == UNASSIGNED).all())

    def first_clusters(self, base: ClusteredModels, fleet: FleetView) -> Indices:
        """K-means on what clients learn from one common start, so that no cluster wins by its random draw."""
        common = np.zeros(len(fleet.ids), np.int64)
        theta = fleet.train(start=base.clusters[common], on_top_of=base.underlay, slot="first", fresh=True)
        c = self.found[fleet.ids]  # in the warm-up, twice
        if self.ended is None or (c[theta.arrived] == UNASSIGNED).any():
            return self.cluster(base, fleet, theta)
        base.update(fleet, theta, np.where(theta.arrived, c, UNASSIGNED))
        return np.maximum(c, 0)

    def cluster(self, base: ClusteredModels, fleet: FleetView, theta: Handle) -> Indices:
        """Warm clusters of the clients' models, for bases that have no such rule themselves."""
        c = self.groups(base, fleet, theta)
        base.update(fleet, theta, c)
        return np.where(theta.arrived, c, 0)

    def groups(self, base: ClusteredModels, fleet: FleetView, theta: Handle) -> Indices:
        """K-means on the models that arrived; the others are in no group."""
        arrived = np.flatnonzero(theta.arrived)
        c = np.full(len(fleet.ids), UNASSIGNED, np.int64)
        seed = int(generator(self.context.seed, "first k-means", round=base.number).integers(2**31))
        points, weights = theta.features("classifier")[arrived], base.client_weights(fleet)[arrived]
        task = ClusteringTask(points, base.K, seed, weights, starts=20)
        c[arrived] = clustered("kmeans", task, self.context).labels
        return c

    # --- the end of a warm-up that follows from the data ------------------------------------------------

    def watches(self, base: ClusteredModels) -> bool:
        """Whether the warm-up ends when the groups are found."""
        return self.options.warmup is None and self.kind(base) == "shared"

    def watch(self, base: ClusteredModels, fleet: FleetView, theta_0: Handle) -> None:
        """End the warm-up if clients that began at one model fall into the same groups as a round before.

        Clients without groups, or whose groups drown in what all have in common, differ by their batches alone: K-means
        divides them otherwise every time.
        """
        c = self.groups(base, fleet, theta_0)
        before = self.found[fleet.ids]
        both = (c != UNASSIGNED) & (before != UNASSIGNED)
        self.found = self.found.copy()
        self.found[fleet.ids[theta_0.arrived]] = c[theta_0.arrived]
        enough = both.sum() > base.K and len(np.unique(c[both])) > 1
        if enough and alike(c[both], before[both]) >= SAME:
            self.ended = base.number
            base.events.append(
                f"cam.warmup=auto: the warm-up ends, K-means finds the same groups as a round before ({both.sum()} "
                "clients)."
            )

    def warm_up(self, base: ClusteredModels, fleet: FleetView) -> None:
        """FedAvg for Theta_g, the base on its own, or local training for theta_i and then K-means."""
        kind = self.kind(base)
        if kind == "shared":
            theta_0 = fleet.train(start=self.shared, slot=SHARED, compared=False)
            self.shared = base.average(theta_0, fleet, otherwise=self.shared)
            if self.watches(base):
                self.watch(base, fleet, theta_0)
            return
        if kind == "clusters":
            base.round(fleet)
            return
        theta = fleet.train(start=self.own(base), keep=WARM)
        if len(fleet.ids) < len(fleet.everyone.ids):  # some will be absent in the last round of warm-up too:
            base.notice(theta)  # they are clustered by what they were when they were last seen
        if base.number == self.beta:  # extract warm clusters from the lightly trained local models
            if base.by_loss:
                self.cluster(base, fleet, theta)
            else:
                c = base.settle(fleet, theta, np.zeros(len(fleet.ids), np.int64))
                base.update(fleet, theta, c)
            fleet.everyone.forget(WARM)

    def own(self, base: ClusteredModels) -> Private:
        """A client's own model during a warm-up by local training."""
        return Private(WARM, default=base.clusters[0])

    # --- what the base asks for, and what others see ----------------------------------------------------

    def penalties(self, base: ClusteredModels, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        if base.by_loss or not self.options.lam or c is None or self.warming(base):
            return []
        return [Proximal(self.options.lam, base.clusters[c])]  # (12)

    def point_weights(self, base: ClusteredModels, fleet: FleetView) -> npt.NDArray[np.float64] | None:
        return base.client_weights(fleet) if self.options.kmeans == "size" else None  # (10)

    def prediction(self, base: ClusteredModels, fleet: FleetView, prediction: Prediction) -> Prediction:
        if self.warming(base):
            return prediction
        cluster, *others = prediction.models
        if self.options.predict == "local":
            cluster = Private(OWN, default=cluster)
        models, slots = [cluster, *others, self.shared], [*prediction.trained_in, SHARED]
        names = ["cluster", SHARED] if not others else None
        return dataclasses.replace(prediction, models=models, slots=slots, names=names)  # (1)

    def predicts_alone(self, base: ClusteredModels, fleet: FleetView) -> Prediction | None:
        if not self.warming(base):
            return None
        kind = self.kind(base)
        if kind == "shared":
            return Prediction([self.shared], slots=[SHARED])
        if kind == "clusters" or base.number == self.beta:
            return None
        return Prediction([self.own(base)])

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"shared": self.shared}


def alike(one: Indices, other: Indices) -> float:
    """Adjusted Rand index of two divisions: 1 the same groups, about 0 by chance.

    >>> alike(np.array([0, 0, 1, 1]), np.array([2, 2, 0, 0]))
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(one, other))
