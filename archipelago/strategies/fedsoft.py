"""FedSoft: every client's data is a mixture of S sources; one local task per client serves all S centres.

Ruan, Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022. Line
numbers are those of Algorithm 1.

    h_k(w; c, u) = f_k(w) + (lambda / 2) sum_s u_ks ||w - c_s||^2                                        (4)

    c_s     self.clusters[s]        u_ks    self.mixture[k, s]      v_sk   v        Sel_s   the ones of `drawn`
    w_k     the client's own model  lambda  fedsoft.lam             tau    fedsoft.tau
    K       fedsoft.select          sigma   fedsoft.sigma           S      clusters

Readings

v_s
    paper   (6): normalised over the selected set, which is drawn with these very probabilities
    code    over all N
    here    over all clients that are present
Sel_s
    paper   K clients for each centre
    code    drawn without replacement
    here    as the code; a drawn client that does not deliver is left out of the mean
    option  fedsoft.select
Everyone takes part
    paper   c_s = sum_k v_sk w_k
    here    so too, with select=0 or no more clients than `select`: the plain mean of line 18 would make all centres
            equal
Where w_k starts
    code    from the client's own last model, the first time from one common random model
    here    as the code; or from sum_s u_ks c_s / sum_s u_ks, where (5) says that w_k* is centred
    option  fedsoft.init_from=mixture
u_ks
    paper   at least sigma; a centre that no sample prefers treats all clients equally
    here    not renormalised, so that (4) uses what line 11 says; such a centre draws clients by n_k
    option  fedsoft.sigma, weights=uniform
First models
    paper   Xavier normal
    code    Xavier normal for linear layers, Kaiming uniform for convolutions
    here    the network's own initialisation; the paper's start is in its experiment files
    option  model.init=xavier_normal+kaiming_uniform
Clients of a round
    paper   all are asked for u every tau rounds
    here    those of the round are asked and can be drawn; one that has no u yet is asked at once
    option  fedsoft.tau, participation.fraction
The term of (4)
    code    all parameters
    here    trainable parameters, not BatchNorm's buffers
Other rules than the mean
    here    each centre's drawn clients; where all take part, a client counts for its centre of largest weight
    option  aggregation
A client that never trained
    here    predicts with the centre of largest weight; of clients never seen u is estimated then and there
New clients without labels
    here    u counts which centre is surest of each sample, by the entropy of its prediction
    option  adoption=entropy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.core.settings import setting
from archipelago.strategies.adoption import sample_entropies
from archipelago.strategies.aggregation import Uploads
from archipelago.strategies.base import METHODS, lowest
from archipelago.strategies.expectations import ALL, Cost, Expectations, K, Known
from archipelago.strategies.interface import ClientView, FleetView, Handle
from archipelago.strategies.mixtures import MixtureModels, Weights
from archipelago.strategies.parameters import Matrix, Vector, normalised_rows
from archipelago.strategies.penalties import ProximalToMixture
from archipelago.strategies.references import (
    Indices,
    Mixture,
    Models,
    PerClient,
    Prediction,
    Private,
    Reference,
)


@dataclass
class FedSoftOptions:
    """`fedsoft.lam=...`"""

    lam: float = setting(0.1, "lambda: pull of a client's model towards the centres, Eq. (4)", at_least=0)
    tau: int = setting(2, "rounds between two estimations of the importance weights", at_least=1)
    select: int = setting(
        60,
        "K: clients that each centre draws in a round; 0, or no more clients than that: all, weighted by v",
        at_least=0,
    )
    sigma: float = setting(1e-4, "smallest importance weight", above=0, at_most=1)
    init_from: str = setting(
        "own",
        "where local training starts: the client's own last model, or the mixture of the centres",
        choices=("own", "mixture"),
    )


@METHODS.register(
    "fedsoft", "soft clusters, one proximal local task for all centres (Ruan, Joe-Wong 2022)", label="FedSoft"
)
class FedSoft(MixtureModels):
    """Estimate u, draw clients by v, train each once on h_k, average each centre's clients."""

    expects = Expectations(
        cost=Cost(down=1 + K, up=1, trainings=1),
        known=(
            Known(
                "accuracy",
                ALL,
                "clients predict with their own models, which a lambda of 0.1 hardly pulls",
                0.08,
            ),
        ),
    )

    Options = FedSoftOptions
    private = True
    compares_models = True
    state = ("clusters", "mixture", "start")
    start: Vector

    def setup(self, fleet: FleetView) -> None:
        super().setup(fleet)
        self.start = fleet.initial(1, "initial client model")[0]

    def round(self, fleet: FleetView) -> None:
        u = self.estimate(fleet)  # lines 3-14
        v = normalised_rows(u.T * self.client_weights(fleet))  # line 15, (6)
        drawn = self.draw(v)  # line 16
        trains = drawn.any(axis=0)
        w = self.train(fleet.select(fleet.ids[trains]), u[trains])  # line 17, (4)
        fed = np.asarray((drawn[:, trains] * w.arrived).any(axis=1))
        means = self.centres(w, drawn[:, trains], fleet)  # line 18
        self.clusters = self.stepped(w, self.clusters, means, fed, fleet)
        self.report["trained"] = int(trains.sum())

    def estimate(self, fleet: FleetView) -> Weights:
        """u of this round's clients: counted every tau rounds, and at once for a client that has none."""
        due = (self.number - 1) % self.options.tau == 0
        asked = fleet if due else fleet.select(fleet.ids[~self.known(fleet)])
        if len(asked.ids):
            self.remember(asked, self.measure(asked))
        u = self.mixture[fleet.ids]
        for s in np.flatnonzero((u <= self.options.sigma).all(axis=0)) if due else ():
            self.events.append(f"Centre {s} is the best one for no sample: it draws clients by their size.")
        self.record("u")
        return u

    def measure(self, fleet: FleetView) -> Weights:
        """Lines 5-12: each client counts which centre fits each of its samples best."""
        sigma = self.options.sigma
        found = fleet.map(importance, stage="importance weights", centres=self.clusters, sigma=sigma)
        return np.array(found)

    def measure_unlabelled(self, fleet: FleetView) -> Weights:
        """The same of clients without labels: the centre that is surest of each sample."""
        sigma = self.options.sigma
        found = fleet.describe(
            guessed_importance, stage="importance weights", centres=self.clusters, sigma=sigma
        )
        return np.stack(found)

    def draw(self, v: Weights) -> Weights:
        """(S, n): how much each client counts for each centre; 1 if it was drawn, v where all take part."""
        clients, count = v.shape[1], self.options.select
        if not 0 < count < clients:
            if count and self.number == 1:
                self.events.append(
                    f"fedsoft.select={count} covers all {clients} clients: every one trains, and centres are "
                    "means weighted by v."
                )
            return v
        drawn = np.zeros_like(v)
        for s in range(self.K):
            rng = generator(self.context.seed, "fedsoft selection", slot=f"centre {s}", round=self.number)
            drawn[s, rng.choice(clients, count, replace=False, p=v[s])] = 1.0
        return drawn

    def train(self, fleet: FleetView, u: Weights) -> Handle:
        """One local task: h_k of (4), with the centres held constant."""
        start: Reference = Private("model", default=self.start)
        if self.options.init_from == "mixture":
            start = Mixture(self.clusters, u)
        pull = ProximalToMixture(self.options.lam, self.clusters, PerClient(u))
        terms = [pull, *self.penalties(fleet, np.argmax(u, axis=1))]
        return fleet.train(start=start, penalties=terms, keep="model")

    def centres(self, w: Handle, drawn: Weights, fleet: FleetView) -> Models:
        """The mean of each centre's clients, or what `aggregation` names; one without clients stays."""
        if self.rule.mean:
            return w.combine(drawn, otherwise=self.clusters)
        assert self.assignment is not None
        selected, rows, seed = bool(np.isin(drawn, (0, 1)).all()), [], self.context.seed
        for s in range(self.K):  # a client may feed several centres: one aggregate for each
            feeds = drawn[s] > 0 if selected else self.assignment[w.ids] == s
            members, keep = np.where(feeds, 0, -1), Models(self.clusters.values[s : s + 1])
            made = self.rule(Uploads(w, members, drawn[s], keep, fleet.spec, seed=seed, round=self.number))
            rows.append(made[0])
        return Models(np.stack(rows))

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([Private("model", default=self.clusters[self.labels(fleet)])])


def importance(
    client: Any, state: dict[str, Any], centres: Matrix, sigma: float
) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """u_k: the share of samples that each centre fits best (ties: the lowest index), at least sigma."""
    return state, shares_of(lowest(client.sample_losses(centres)), len(centres), sigma)


def guessed_importance(client: ClientView, centres: Matrix, sigma: float) -> npt.NDArray[np.float64]:
    """The same of a client without labels: a prediction's entropy for the loss."""
    return shares_of(lowest(sample_entropies(client, centres)), len(centres), sigma)


def shares_of(best: Indices, centres: int, sigma: float) -> npt.NDArray[np.float64]:
    """The share of samples whose best centre each one is, at least sigma.

    >>> shares_of(np.array([0, 0, 2, 0]), 3, 0.01).tolist()
    [0.75, 0.01, 0.25]
    """
    return np.maximum(np.bincount(best, minlength=centres) / len(best), sigma)
