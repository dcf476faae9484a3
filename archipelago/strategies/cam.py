"""CAM: a shared global model under the cluster models of any clustered base.

Ma, Zhou, Long, Jiang, Zhang, "Structured Federated Learning through Clustered Additive Modeling", NeurIPS
2023; thesis chapter 7. Equation numbers are the paper's.

    F_i(x) = h(x; Theta_g) + f(x; Theta_c(i))  (1): logits are added

    Theta_g   self.shared          Theta_k   base.clusters[k]      c(i)   c
    theta_i   theta                theta_i^0 theta_0               beta   `warmup` x rounds

Algorithm 1 over the verbs of a clustered base: IFCA-CAM assigns by the loss of the sum (2) before training,
FeSEM-CAM and WeCFL-CAM by K-means (11) after it, and pull theta_i to its centre by lambda (12), (13).

Readings. (6) as printed moves a cluster only by its share of all data: we take the mean inside the cluster, as
the thesis (7.6) and all code do. (15) prints theta_i^0 twice: it is h(theta_i^0) + f(theta_i), thesis (7.15).
(13)'s n_i/n on the gradient alone is a slip: the optimizer steps on l + (lambda/2) ||theta_i - Theta_c||^2.
"E epochs" are the experiment's local steps. Schedules: `simultaneous` (the paper's parallel update: both
parts start from the server's models and see the other one fixed), `cluster_first` and `global_first` (one
after the other on the client, the second on top of what the first made: FedBase 0.10.3), `alternating` (the
clusters are aggregated, clients assigned again, then the global part: the paper's (i)(ii)(i)(iii)).
Warm-up: beta rounds of FedAvg for Theta_g under loss-based bases, local training of theta_i alone under
parameter-based ones; until it ends clients predict with the part that is being warmed up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import ClusteredModels, Strategy, bases_of
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices, Prediction, Private, Reference

WARM = "warm"  # a client's model of a parameter-based warm-up


@dataclass
class CAMOptions:
    """`cam.schedule=...`"""

    schedule: str = setting(
        "simultaneous",
        "how the shared and the cluster part take turns",
        choices=("simultaneous", "global_first", "cluster_first", "alternating"),
    )
    warmup: float = setting(0.3, "share of the rounds that warms one part up", at_least=0, below=1)
    lam: float = setting(
        0.01, "pull of theta_i to its centre under parameter-based bases, Eq. (12)", at_least=0
    )


@ADDONS.register(
    "cam", "a shared global model under the clusters, logits added (Ma et al. 2023)", label="CAM"
)
class CAM(Addon[ClusteredModels]):
    """F_i = h(Theta_g) + f(Theta_c(i))."""

    Options = CAMOptions
    takes_round = True
    additive = True
    state = ("shared",)
    shared: Vector

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
        return (
            dataclasses.replace(options, warmup=max(options.warmup, 1 / rounds))
            if options.warmup
            else options
        )

    def setup(self, base: ClusteredModels, fleet: FleetView) -> None:
        self.shared = fleet.initial(1, "initial shared model")[0]
        self.restored(base)

    def restored(self, base: ClusteredModels) -> None:
        base.underlay = None if self.warming(base) else self.shared

    @property
    def beta(self) -> int:
        """Rounds of warm-up."""
        return int(self.options.warmup * self.context.rounds + 1e-9)

    def warming(self, base: ClusteredModels) -> bool:
        """Whether this round is still warm-up."""
        return base.number <= self.beta and self.beta > 0

    def round(self, base: ClusteredModels, fleet: FleetView) -> None:
        if self.warming(base):
            base.underlay = None
            self.warm_up(base, fleet)
            return
        base.underlay = self.shared
        c = base.expect(fleet)  # (2), or the clusters of the last round
        if self.options.schedule == "alternating":
            theta = base.train(fleet, c)  # (5) or (13)
            base.update(fleet, theta, base.settle(fleet, theta, c))  # (6) or (11)
            c = base.expect(fleet)
            base.assign(fleet, c)  # the second assignment is the one that clients predict by
            theta_0 = self.train_shared(fleet, base.clusters[c])  # (8) or (15)
        else:
            theta, theta_0 = self.train_both(base, fleet, c)
            base.update(fleet, theta, base.settle(fleet, theta, c))  # (6) or (11)
        self.shared = base.average(theta_0, fleet, otherwise=self.shared)  # (9)
        base.underlay = self.shared

    def train_both(self, base: ClusteredModels, fleet: FleetView, c: Indices) -> tuple[Handle, Handle]:
        """Both local trainings of a client, by the schedule."""
        if self.options.schedule == "global_first":
            theta_0 = self.train_shared(fleet, base.clusters[c])
            return base.train(fleet, c, on_top_of=theta_0), theta_0
        theta = base.train(fleet, c)  # (5) or (13): Theta_g fixed
        fixed = theta if self.options.schedule == "cluster_first" else base.clusters[c]
        return theta, self.train_shared(fleet, fixed)  # (8) or (15): the cluster part fixed

    def train_shared(self, fleet: FleetView, fixed: Reference | None) -> Handle:
        """theta_i^0 from Theta_g, on top of the client's cluster part."""
        return fleet.train(start=self.shared, on_top_of=fixed, slot="shared", compared=False)

    def warm_up(self, base: ClusteredModels, fleet: FleetView) -> None:
        """FedAvg for Theta_g (loss-based bases), or local training alone for theta_i (parameter-based)."""
        if base.by_loss:
            self.shared = base.average(self.train_shared(fleet, None), fleet, otherwise=self.shared)
            return
        theta = fleet.train(start=self.own(base), keep=WARM)
        if len(fleet.ids) < len(fleet.everyone.ids):  # some will be absent in the last round of warm-up too:
            base.notice(theta)  # they are clustered by what they were when they were last seen
        if base.number == self.beta:  # extract warm clusters from the lightly trained local models
            c = base.settle(fleet, theta, np.zeros(len(fleet.ids), np.int64))
            base.update(fleet, theta, c)
            fleet.everyone.forget(WARM)

    def own(self, base: ClusteredModels) -> Private:
        """A client's own model during a parameter-based warm-up."""
        return Private(WARM, default=base.clusters[0])

    def penalties(self, base: ClusteredModels, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        if base.by_loss or not self.options.lam or c is None:
            return []
        return [Proximal(self.options.lam, base.clusters[c])]  # (12)

    def prediction(self, base: ClusteredModels, fleet: FleetView, prediction: Prediction) -> Prediction:
        return prediction if self.warming(base) else Prediction([*prediction.models, self.shared])  # (1)

    def predicts_alone(self, base: ClusteredModels, fleet: FleetView) -> Prediction | None:
        if not self.warming(base):
            return None
        if base.by_loss:
            return Prediction([self.shared])
        return None if base.number == self.beta else Prediction([self.own(base)])

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"shared": self.shared}
