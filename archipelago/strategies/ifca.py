"""IFCA (HypCluster): K cluster models; each client joins the one with the least loss on its data.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020; Mansour et al.,
"Three Approaches for Personalization with Applications to Federated Learning", 2020; thesis (3.1a), (3.1b).

    H_k   self.clusters[k]     r_i   c (cluster of client i)     L   mean loss on the client's training data

Readings

Data of the K losses
    paper   the client's empirical loss F_i
    code    MNIST: all of it; FedBase: other batches for each model that is compared
    here    all local training data, the same for all K; ties go to the lowest index
First models
    paper   a good start is assumed; drawn again until balanced (CIFAR), or one pre-trained backbone (FEMNIST)
    code    FedBase: K independent draws
    here    K independent draws
    option  ifca.init=perturbed|balanced, ifca.share_backbone
Mean inside a cluster
    paper   MNIST uniform, FEMNIST by samples
    here    as `weights` says
    option  weights=uniform
An empty cluster
    code    keeps its model
    here    as the code
Test
    code    MNIST: the cluster of least loss on the test data
    here    the cluster of the round; a client that has not taken part yet joins that of least training loss
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, ClusteredModels, Context, lowest
from archipelago.strategies.expectations import Cost, Expectations, K, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.references import Indices, Models

REDRAWS = 100


@dataclass
class IFCAOptions:
    """`ifca.init=...`"""

    init: str = setting(
        "independent",
        "first models: independent draws, one draw plus noise, or drawn again until no cluster is too small",
        choices=("independent", "perturbed", "balanced"),
    )
    noise: float = setting(0.1, "init=perturbed: noise, as a share of each tensor's own spread", above=0,
                           read_with={"init": ("perturbed",)})  # fmt: skip
    balance: float = setting(
        0.1, "init=balanced: smallest share of clients a cluster must attract", above=0, at_most=1,
        read_with={"init": ("balanced",)},
    )  # fmt: skip
    share_backbone: bool = setting(False, "average everything but the head over all clients")


@METHODS.register(
    "ifca", "K cluster models, each client joins the one of least loss (Ghosh et al. 2020)", label="IFCA"
)
class IFCA(ClusteredModels):
    """Alternate r_i = argmin_k L(H_k, D_i) and FedAvg inside each cluster."""

    expects = Expectations(
        cost=Cost(down=K, up=1, trainings=1),
        known=(
            Known(
                "groups",
                ("one_class", "sizes"),
                "where one model is ahead at first, both groups may choose it",
                limit=-0.05,
            ),
        ),
    )

    Options = IFCAOptions
    compares_models = True

    @classmethod
    def check(cls, options: IFCAOptions, context: Context) -> None:
        if options.init == "balanced" and options.balance * context.clusters > 1:
            raise UserError(
                f"Expected ifca.balance <= 1 / clusters, got {options.balance:g} with clusters={context.clusters}: "
                f"set ifca.balance={1 / (2 * context.clusters):.2g} or lower.",
                code="out-of-range", setting="ifca.balance", given=options.balance,
            )  # fmt: skip
        if options.share_backbone:
            why = "heads that follow their own cluster's order of neurons do not fit a common backbone"
            refuse_reordering(context.aggregation, "ifca.share_backbone=true", why)

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        if self.options.init == "perturbed":
            self.clusters = perturbed(fleet, self.K, self.options.noise, self.context.seed)
        elif self.options.init == "balanced":
            self.clusters = self.balanced(fleet)
        if self.options.share_backbone:
            backbone = fleet.spec.columns("backbone")
            if not len(backbone):
                raise UserError(
                    "Expected a model with a backbone for ifca.share_backbone=true, got one that is all head: "
                    "choose a model with several layers, as mlp or a CNN.",
                    code="needs-backbone", setting="ifca.share_backbone",
                )  # fmt: skip
            self.clusters = _with_common(self.clusters, self.clusters[0], backbone)

    def expect(self, fleet: FleetView) -> Indices:
        if self.frozen:
            return self.labels(fleet)
        assert self.assignment is not None
        last = self.assignment[fleet.ids]
        c, loss = fleet.best(self.clusters, on_top_of=self.underlay, first=last)  # (3.1a)
        known = np.isfinite(loss)  # the others are dropped
        if known.any():
            self.report["clustering_objective"] = float(np.average(loss[known], weights=fleet.sizes[known]))
        return c

    def update(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        received = self.clusters[0]
        super().update(fleet, theta, c)  # (3.1b)
        if self.options.share_backbone:
            everyone = self.average(theta, fleet, otherwise=received)
            self.clusters = _with_common(self.clusters, everyone, fleet.spec.columns("backbone"))

    def balanced(self, fleet: FleetView) -> Models:
        """Draw K models until each attracts a share of the clients (the paper's CIFAR experiments)."""
        for draw in range(REDRAWS):
            models = fleet.initial(self.K, f"initial model, draw {draw}")
            sizes = np.bincount(lowest(fleet.losses(models)), minlength=self.K)
            if sizes.min() >= self.options.balance * len(fleet.ids):
                return models
        self.events.append(
            f"No draw of {REDRAWS} gave every cluster {self.options.balance:.0%} of the clients (ifca.balance): "
            "the last one is used."
        )
        return models


def perturbed(fleet: FleetView, count: int, noise: float, seed: int) -> Models:
    """One initial model, `count` times, each with its own noise on the trainable parameters."""
    base = fleet.initial(1)[0]
    values = np.repeat(base[None], count, axis=0)
    for k in range(count):
        rng = generator(seed, "perturbed initial model", client=k)
        for entry in fleet.spec.entries:
            if entry.kind == "parameter":
                spread = noise * float(np.std(base[entry.start : entry.stop]))
                values[k, entry.start : entry.stop] += np.float32(spread) * rng.standard_normal(
                    entry.stop - entry.start, np.float32
                )
    return Models(values)


def _with_common(models: Models, common: np.ndarray, columns: Indices) -> Models:
    values = models.values.copy()
    values[:, columns] = common[columns]
    return Models(values)
