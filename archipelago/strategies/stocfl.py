"""StoCFL: clients that are sampled bit by bit are merged into clusters by the direction of an update from one anchor.

Zeng, Hu, Liu, Yu, Wang, Xu, "Stochastic Clustered Federated Learning", arXiv:2303.00897, 2023; code: dunzeng/StoCFL.

    omega     self.model, the global model            theta_k   self.clusters[k]
    Psi(D_i)  self.psi[i], what a local training from the anchor adds to it: the client's representation
    tau       `tau`, the least cosine of two clusters that are merged      lambda   `lam`, pull of theta_k towards omega

Each round: clients not seen before compute Psi and are clusters of their own; clusters in the round whose mean Psi have
a cosine of at least tau are merged; then two local trainings, of theta_k with (lambda / 2) ||theta - omega||^2 in the
objective, and of omega.

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
The anchor
    paper   a model that never changes
    code    the first model, and a training of its own length
    here    the first model, and the experiment's local training
Psi
    paper   of the whole model
    code    the same; the server keeps all of them
    here    the same
    option  stocfl.features=classifier|head
The mean Psi of a cluster
    paper   over its clients
    code    over those of its clients that take part in the round
    here    over all of its clients that were ever seen
Which clusters are compared
    paper   those of the round's clients
    code    the same; pairs by falling cosine, and what is merged through a third cluster is merged
    here    as the code
The model of merged clusters
    paper   theirs are averaged
    code    that of the larger one; a cluster that never trained has omega's
    here    as the code; of equally large ones that of the lower number
Number of clusters
    paper   found
    here    found; if more than `clusters` are left, the most similar are merged on
    option  clusters
lambda, tau
    code    0.05; 0.3
    here    0.05; 0.5, between what clients of one kind reach (0.6 and more on embedded data) and others (0.4 and less)
    option  stocfl.lam, stocfl.tau
Means
    code    uniform
    here    as `weights` says
    option  weights=uniform
New clients
    paper   Psi, then the most similar cluster, or omega if none reaches tau
    here    as the paper
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels
from archipelago.strategies.descriptors import PARTS
from archipelago.strategies.distances import Points, between, pairwise
from archipelago.strategies.expectations import Cost, Expectations, Known
from archipelago.strategies.interface import FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty, Proximal
from archipelago.strategies.references import Indices, Models, Prediction


@dataclass
class StoCFLOptions:
    """`stocfl.tau=...`"""

    tau: float = setting(0.5, "least cosine of two clusters that are merged", at_least=-1, at_most=1)
    lam: float = setting(0.05, "lambda: pull of a cluster's model towards the global one", at_least=0)
    features: str = setting("parameters", "the part of the model that Psi is of", choices=PARTS)


@METHODS.register(
    "stocfl", "clusters merged by the cosine of updates from one anchor (Zeng et al. 2023)", label="StoCFL"
)
class StoCFL(ClusteredModels):
    """Represent, merge, train cluster models beside a global one."""

    # The dearest round is the first: Psi, theta and omega.
    expects = Expectations(
        cost=Cost(down=3, up=3, trainings=3),
        known=(
            Known("groups", "one_class", "the client of one class is a cluster of its own", limit=-0.05),
            Known(
                "cost",
                "stragglers",
                "a training to compare clients by is whole, also at a straggler",
                limit=3.5,
            ),
        ),
    )

    Options = StoCFLOptions
    grows = True
    by_loss = False
    state = ("clusters", "K", "model", "psi")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "psi": np.nan}
    model: Vector
    psi: npt.NDArray[np.float32] | None = None  # (clients, d), a row by client id; NaN: never seen

    def setup(self, fleet: FleetView) -> None:
        self.K = 1  # nobody is in it: the first round makes the clusters
        super().setup(fleet)
        self.model = self.clusters[0]

    def expect(self, fleet: FleetView) -> Indices:
        """Psi of clients not seen before, then the merged clusters."""
        if not self.frozen:
            self.observe(fleet)
            self.merge(fleet)
        c = self.labels(fleet)
        return np.where(c == UNASSIGNED, 0, c)  # held still before they came, and like no cluster

    def observe(self, fleet: FleetView) -> None:
        """Make every client that was never seen a cluster of its own, which starts from omega."""
        assert self.assignment is not None
        known = self.represented()
        new = fleet.select(fleet.ids[~known[fleet.ids]])
        if not len(new.ids):
            return
        seen, psi = self.represent(new)
        if self.psi is None:
            self.psi = np.full((self.context.clients, psi.shape[1]), np.nan, np.float32)
        self.psi = self.psi.copy()
        self.psi[seen] = psi
        self.assignment = np.where(known, self.assignment, UNASSIGNED)
        count = int(self.assignment.max()) + 1
        self.assignment[seen] = count + np.arange(len(seen))
        models = [*self.clusters.values[:count], *[self.model] * len(seen)]
        self.K, self.clusters = max(len(models), 1), Models(np.stack(models or [self.model]))

    def represented(self) -> npt.NDArray[np.bool_]:
        """Which clients have a Psi."""
        if self.psi is None:
            return np.zeros(self.context.clients, np.bool_)
        return np.asarray(np.isfinite(self.psi).all(axis=1))

    def represent(self, fleet: FleetView) -> tuple[Indices, npt.NDArray[np.float32]]:
        """The clients whose training from the anchor arrived, and their Psi."""
        anchor = fleet.initial(1)[0]
        theta = fleet.train(start=anchor, slot="anchor", fresh=True, sends=True, compared=False)
        columns = fleet.spec.columns(self.options.features)
        return theta.ids[theta.arrived], (theta.gather(columns) - anchor[columns])[theta.arrived]

    def merge(self, fleet: FleetView) -> None:
        """Merge the clusters of this round's clients by tau, then number those that are left from 0."""
        assert self.assignment is not None
        here = np.unique(self.assignment[fleet.ids])
        here = here[here != UNASSIGNED]
        if not len(here):
            return
        together = np.arange(self.K)
        together[here] = here[united(self.means()[here], self.options.tau)]
        self.rename(together)
        if self.context.clusters < self.K:
            self.events.append(
                f"{self.K} clusters at stocfl.tau={self.options.tau:g}, more than clusters={self.context.clusters}: "
                "the most similar were merged on."
            )
        while self.context.clusters < self.K:
            alike = 1.0 - pairwise(self.means(), "cosine") - 3.0 * np.eye(self.K)
            i, j = sorted(np.unravel_index(alike.argmax(), alike.shape))
            together = np.arange(self.K)
            together[j] = i
            self.rename(together)

    def means(self) -> Points:
        """(K, d): the mean Psi of each cluster."""
        assert self.psi is not None and self.assignment is not None
        members = [self.psi[self.assignment == k].astype(np.float64) for k in range(self.K)]
        return np.stack([rows.mean(axis=0) for rows in members])

    def rename(self, together: Indices) -> None:
        """Clusters with equal entries of `together` become one, with the model of the largest; numbered in order."""
        assert self.assignment is not None
        sizes = np.bincount(self.assignment[self.assignment >= 0], minlength=self.K)
        used, new = np.unique(together, return_inverse=True)
        kept = np.array(
            [max(np.flatnonzero(together == k), key=lambda each: (sizes[each], -each)) for k in used]
        )
        self.clusters = Models(self.clusters.values[kept])
        self.steps.keep("main", kept)
        self.assignment = np.where(self.assignment >= 0, new[self.assignment], UNASSIGNED).astype(np.int64)
        self.K = len(used)

    def penalties(self, fleet: FleetView, c: Indices | None = None) -> list[Penalty]:
        terms = super().penalties(fleet, c)
        return [*terms, Proximal(self.options.lam, self.model)] if self.options.lam else terms

    def update(self, fleet: FleetView, theta: Handle, c: Indices) -> None:
        super().update(fleet, theta, c)
        omega = fleet.train(start=self.model, slot="global", compared=False)
        self.model = self.average(omega, fleet, otherwise=self.model)

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster most similar to what the client makes of the anchor; none (omega) if it does not reach tau."""
        found = np.full(len(fleet.ids), UNASSIGNED, np.int64)
        if self.psi is None:
            return found
        ids, psi = self.represent(fleet)
        if len(ids):
            alike = 1.0 - between(psi, self.means(), "cosine")
            nearest = np.where(alike.max(axis=1) >= self.options.tau, alike.argmax(axis=1), UNASSIGNED)
            found[np.searchsorted(fleet.ids, ids)] = nearest
        return found

    def prediction(self, fleet: FleetView) -> Prediction:
        """The model of the own cluster, or omega."""
        c = self.labels(fleet)
        if not (c == UNASSIGNED).any():
            return Prediction([self.clusters[c]])
        models = Models(np.concatenate([self.clusters.values, self.model[None]]))
        return Prediction([models[np.where(c == UNASSIGNED, self.K, c)]])

    def proximity(self, ids: Indices) -> tuple[Indices, Points] | None:
        seen = ids[self.represented()[ids]]
        if self.psi is None:
            return None
        return seen, pairwise(self.psi[seen], "cosine")

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {**super().models(), "global": self.model}


def united(means: Points, tau: float) -> Indices:
    """For each cluster the lowest one that it is merged with: all that a chain of cosines of at least tau connects.

    >>> united(np.array([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [-1.0, 0.0]]), 0.7).tolist()
    [0, 1, 0, 3]
    """
    alike = 1.0 - pairwise(means, "cosine") >= tau - 1e-12
    found = np.arange(len(means))
    for i, j in zip(*np.nonzero(np.triu(alike, 1)), strict=True):
        low, high = sorted((found[i], found[j]))
        found[found == high] = low
    return found
