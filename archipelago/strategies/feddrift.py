"""FedDrift: clusters that follow concepts as they drift, by local drift detection and hierarchical merging.

Jothimurugesan, Hsieh, Wang, Joshi, Gibbons, "Federated Learning under Distributed Concept Drift", AISTATS 2023
(Algorithms 1 and 2); released code: microsoft/FedDrift.

    h_m      self.clusters[m]                          w_c^(tau)   cluster of client c at time step tau
    l_c(h)   mean training loss of client c under h    delta       `delta`, what counts as a drift
    L_ij     loss of model i on the data of cluster j  delta'      `merge`, how far apart merged clusters may be
    tau      a time step: `time_step` rounds           W           `isolation`, time steps that a new cluster is alone

At the start of a time step every client compares the models: it takes the best one, unless even that is worse by more
than delta than the best one was at the time step before. Then its concept has drifted: it gets a new cluster of its own
(FedDrift), or all such clients share one (FedDrift-Eager). A new cluster is left alone for W time steps, so that its
model can learn. After that, clusters whose models do equally well on each other's data are of one concept, and are
merged: D(i, j) = max(L_ij - L_jj, L_ji - L_ii, 0), complete linkage, up to delta'. Between these, FedAvg in every
cluster.

Readings

What models are compared by
    paper   loss
    code    accuracy, on training data
    here    loss on training data
Distance of clusters
    paper   max(L_ij - L_ii, L_ji - L_jj, 0): each model on its own and on the other's data
    code    either that, or both models on the same data
    here    both models on the same data, so that data which is harder for everybody keeps no clusters apart
    option  feddrift.distance=own
Data of a cluster
    paper   what its clients held at all time steps at which they were in it
    code    the same; clients whose concept has just drifted have left it
    here    what its clients hold now, without clients that have just drifted: nobody keeps samples of former concepts
The loss that a drift is measured against
    paper   the last time step's
    code    that of the best model at the beginning of the last time step, not renewed while a client is alone
    here    as the code
Time steps
    paper   new data arrives at every one, and clients train for many rounds
    here    every `time_step` rounds, whether or not data has changed
    option  feddrift.time_step
Where a new cluster starts
    paper   a new model
    code    the best model there is; one initialised anew is commented out
    here    as the paper
    option  feddrift.start=nearest is the code's
Number of clusters
    paper   not limited
    code    as many models as there are; beyond them no new one is made, or the least recently used is given up
    here    `clusters` is the most that are left after merging, which continues past delta' if it must; new clusters,
            which are alone, are not counted
    option  clusters
A cluster without clients
    paper   keeps its model: its concept may come back
    here    the same; it cannot be compared, so it is never merged, and the first to go where there are too many
Which client a new cluster is for
    paper   FedDrift: each by itself; FedDrift-Eager: all that drift at a time step together
    here    the same
    option  feddrift.eager
Clients that do not take part at the start of a time step
    here    stay in their cluster, unless it was merged, until the next one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS, UNASSIGNED, ClusteredModels, lowest
from archipelago.strategies.expectations import ALL, Cost, Expectations, K, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Matrix
from archipelago.strategies.references import Indices, Models

Losses = npt.NDArray[np.float64]
NEVER = 0  # isolation that is over


@dataclass
class FedDriftOptions:
    """`feddrift.delta=...`"""

    delta: float = setting(0.5, "increase of a client's loss that counts as a drift", above=0)
    merge: float = setting(
        0.5, "clusters are merged whose models do so little worse on each other's data", above=0
    )
    time_step: int = setting(5, "rounds of a time step: drifts are looked for at its start", at_least=1)
    isolation: int = setting(1, "time steps that a new cluster is left alone", at_least=0)
    eager: bool = setting(False, "one new cluster at a time step for all clients that drift (FedDrift-Eager)")
    start: str = setting("initial", "where a new cluster starts: a new model, or the best one that there is",
                         choices=("initial", "nearest"))  # fmt: skip
    distance: str = setting("same", "what D compares: two models on the same data, or each on its own and the other's",
                            choices=("same", "own"))  # fmt: skip


@METHODS.register(
    "feddrift",
    "new clusters where the loss jumps, merged where models agree, up to `clusters` (Jothimurugesan et al. 2023)",
    label="FedDrift",
)
class FedDrift(ClusteredModels):
    """FedAvg in clusters, which clients leave when their concept drifts."""

    expects = Expectations(
        # Clusters come of drifts, and no situation has one: tests/strategies/test_feddrift.py has.
        ari=0.0,
        cost=Cost(down=1 + K, up=1, trainings=1),
        known=(Known("accuracy", ALL, "FedAvg until the loss of a client jumps", limit=0.1),),
    )

    Options = FedDriftOptions
    grows = True
    compares_models = True
    state = ("clusters", "K", "until", "before")
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "before": np.inf}
    until: Indices  # by cluster: the round at which it is no longer alone; NEVER of the others
    before: Losses  # by client: l_c at the last time step

    def setup(self, fleet: FleetView) -> None:
        self.K = 1
        super().setup(fleet)
        self.until = np.array([NEVER], np.int64)
        self.before = np.full(self.context.clients, np.inf)

    def expect(self, fleet: FleetView) -> Indices:
        if self.frozen or (self.number - 1) % self.options.time_step:
            return self.labels(fleet)
        self.until = np.where(self.until <= self.number, NEVER, self.until)  # models leave isolation
        losses = fleet.losses(self.clusters, on_top_of=self.underlay)  # l_c(h_m)
        c, best = self.choose(fleet, losses)
        settled = np.isfinite(best) & ~self.alone(c)
        drifted = settled & (
            best > self.before[fleet.ids] + self.options.delta
        )  # l_c^(tau) > l_c^(tau-1) + delta
        self.before = self.before.copy()
        self.before[fleet.ids[settled]] = best[settled]
        nearest = self.clusters.values[c]
        c = self.merge(fleet, losses, c, ~drifted)
        return self.isolate(fleet, c, drifted, nearest)

    def alone(self, c: Indices) -> npt.NDArray[np.bool_]:
        """Which of some clusters are left alone still."""
        return self.until[c] != NEVER

    def choose(self, fleet: FleetView, losses: Losses) -> tuple[Indices, Losses]:
        """The best of the models that are not alone, and its loss; clients of clusters that are alone stay there."""
        assert self.assignment is not None
        shared = np.where(self.until != NEVER, np.inf, np.where(np.isfinite(losses), losses, np.inf))
        c, best = lowest(shared), shared.min(axis=1)
        last = self.assignment[fleet.ids]
        stays = (last != UNASSIGNED) & self.alone(np.maximum(last, 0))
        return np.where(stays, last, c), best

    def isolate(
        self, fleet: FleetView, c: Indices, drifted: npt.NDArray[np.bool_], nearest: Matrix
    ) -> Indices:
        """New clusters for clients whose concept has drifted: one for each, or (eager) one for all.

        `nearest`: the model of least loss of each client of `fleet`.
        """
        if not drifted.any():
            return c
        c, who = c.copy(), np.flatnonzero(drifted)
        parties = [who] if self.options.eager else [np.array([at]) for at in who]
        for party in parties:
            model = nearest[party[0]]
            if self.options.start == "initial":
                model = fleet.initial(1, f"new cluster, round {self.number}")[0]
            self.clusters = Models(np.concatenate([self.clusters.values, model[None]]))
            ends = self.number + self.options.isolation * self.options.time_step
            self.until = np.append(self.until, ends if self.options.isolation else NEVER)
            c[party] = self.K
            self.K += 1
        self.events.append(
            f"Round {self.number}: the concept of client{'s' if len(who) > 1 else ''} "
            f"{', '.join(map(str, fleet.ids[who]))} has drifted; {self.K} clusters."
        )
        return c

    def merge(self, fleet: FleetView, losses: Losses, c: Indices, stays: npt.NDArray[np.bool_]) -> Indices:
        """Merge the clusters of one concept; `c`, this round's clusters of `fleet`, come back by their new numbers.

        A cluster is compared on the data of the clients that stay in it.
        """
        n = self.client_weights(fleet) * stays
        weight = np.bincount(c, weights=n, minlength=self.K).astype(np.float64)
        fed = np.flatnonzero((weight > 0) & (self.until == NEVER))
        if len(fed) > 1:
            distance = self.distances(losses, c, n, fed)
            concept = self.concepts(distance, len(fed))
        else:
            concept = np.arange(len(fed))
        parties = [fed[concept == number] for number in range(int(concept.max(initial=-1)) + 1)]
        idle = [m for m in range(self.K) if self.until[m] == NEVER and m not in fed]
        spare = max(self.context.clusters - len(parties), 0)
        kept = [*(idle[-spare:] if spare else []), *np.flatnonzero(self.until != NEVER).tolist()]
        parties += [np.array([m]) for m in kept]
        number = self.renumber(sorted(parties, key=lambda party: int(party[0])), weight)
        found: Indices = number[c]
        return found

    def distances(self, losses: Losses, c: Indices, n: Losses, fed: Indices) -> Losses:
        """D(i, j) of the clusters `fed`: how much worse their models do on each other's data."""
        finite = np.where(np.isfinite(losses), losses, np.finfo(np.float32).max)
        L = np.stack(
            [np.average(finite[c == j], axis=0, weights=n[c == j])[fed] for j in fed], axis=1
        )  # L_ij
        own = np.diag(L)
        # On the same data: L_ij - L_jj. Each on its own: L_ij - L_ii.
        excess = L - (own[None, :] if self.options.distance == "same" else own[:, None])
        found: Losses = np.maximum(np.maximum(excess, excess.T), 0.0)
        np.fill_diagonal(found, 0.0)
        return found

    def concepts(self, distance: Losses, count: int) -> Indices:
        """Complete linkage up to `merge`, and on until no more than `clusters` are left; numbers from 0 on."""
        tree = linkage(squareform(distance, checks=False), "complete")
        concept = fcluster(tree, self.options.merge, "distance")
        if concept.max() > self.context.clusters:
            concept = fcluster(tree, self.context.clusters, "maxclust")
        _, first = np.unique(concept, return_index=True)
        order = {int(concept[at]): number for number, at in enumerate(sorted(first))}
        return np.array([order[int(each)] for each in concept], np.int64)

    def renumber(self, parties: list[Indices], weight: Losses) -> Indices:
        """Each party of clusters becomes one, the mean of its models by the samples behind them; the new numbers."""
        assert self.assignment is not None
        number = np.full(self.K + 1, UNASSIGNED, np.int64)  # the last row is what UNASSIGNED points at
        for new, party in enumerate(parties):
            number[party] = new
            if len(party) > 1:
                merged = ", ".join(map(str, party))
                self.events.append(
                    f"Round {self.number}: clusters {merged} are of one concept and were merged."
                )
        if len(parties) == self.K:
            return number
        values = [
            np.average(
                self.clusters.values[party].astype(np.float64),
                axis=0,
                weights=weight[party] if weight[party].sum() else None,
            )
            for party in parties
        ]
        self.clusters = Models(np.stack(values).astype(np.float32))
        self.until = np.array([self.until[party[0]] for party in parties], np.int64)
        self.assignment, self.K = number[self.assignment], len(parties)
        self.steps.state.clear()  # a server optimizer's states are of models that are no more
        return number

    @property
    def open_clusters(self) -> npt.NDArray[np.bool_]:
        """New clients join no cluster that is left alone."""
        return self.until == NEVER

    def adopt(self, fleet: FleetView) -> Indices:
        """The cluster of least loss among those that are open."""
        losses = fleet.losses(self.clusters, on_top_of=self.underlay)
        return lowest(np.where(self.open_clusters, losses, np.inf))
