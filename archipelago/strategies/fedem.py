"""FedEM: every client's data is a mixture of M components, learned by expectation maximisation.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS
2021 (Algorithm 1, the client-server version).

    E-step   q_t(i, m) = pi_tm exp(-l(h_m(x_i), y_i)) / sum of the same over m
    M-step   pi_tm = mean over i of q_t(i, m);   theta_tm = LocalSolver of sum_i q_t(i, m) l(h_m(x_i), y_i)
    server   theta_m = sum_t (n_t / n) theta_tm
    predict  sum_m pi_tm softmax(h_m(x)); in a regression sum_m pi_tm h_m(x)

    theta_m   self.clusters[m]     pi_tm   self.mixture[t, m]     q_t   "q" in the client's state     M   clusters

Readings

pi
    paper   starts anywhere in the simplex
    code    starts uniform, updated before local training; evaluation has it with the models averaged afterwards
    here    as the code; a pi_tm of exactly 0 stays 0
Loss of a batch
    paper   sum_i q l
    code    sum q l / batch size, not divided by the sum of q
    here    as the code; the E-step covers all training samples, in evaluation mode
Server's mean
    paper   n_t / n, over all clients
    code    so too: stale copies of absent clients are averaged in
    here    n_t over the participants of the round, not the mass sum_i q
    option  weights=uniform
Batches of the components
    code    one stream each, optimizers kept
    here    as the code; the first has FedAvg's and predicts alone where M = 1, which is FedAvg, bit by bit
Regression
    here    l is the squared error: each component is a Gaussian of variance 1/2
A sample that no component explains (all losses infinite)
    here    keeps pi as its responsibilities
What a client predicts with
    paper   the mixture; FedSoft's comparison: the component of largest pi_tm
    code    the mixture
    here    the mixture
    option  fedem.predict=largest
Where pi_t is kept
    paper   with the clients
    here    in a table of the server too: prediction and figures need it
Clients never seen
    paper   E-steps only
    code    one at every log, kept in between
    here    20 E-steps from a uniform pi
    option  fedem.unseen_steps
New clients without labels
    here    E-steps in which the entropy of a prediction stands for its loss
    option  adoption=entropy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.adoption import sample_entropies
from archipelago.strategies.base import METHODS
from archipelago.strategies.expectations import ALL, Cost, Expectations, K, Known
from archipelago.strategies.interface import ClientView, FleetView, Handle
from archipelago.strategies.mixtures import MixtureModels, Weights
from archipelago.strategies.parameters import Matrix
from archipelago.strategies.references import Models, PerClient, Prediction, SampleWeights


@dataclass
class FedEMOptions:
    """`fedem.unseen_steps=...`"""

    unseen_steps: int = setting(20, "E-steps of a client that never trained, before it predicts", at_least=1)
    predict: str = setting(
        "mixture", "what a client predicts with: the mixture of all components, or the one of largest weight alone",
        choices=("mixture", "largest"),
    )  # fmt: skip


@METHODS.register("fedem", "mixtures of M models, learned by EM (Marfoq et al. 2021)", label="FedEM")
class FedEM(MixtureModels):
    """E-step, weighted local training of all components, mean of each."""

    expects = Expectations(
        cost=Cost(down=K, up=K, trainings=K),
        known=(
            Known(
                "accuracy",
                "slow",
                "a component's steps are as short as its responsibilities are small",
                limit=0.33,
            ),
            Known(
                "accuracy",
                "twice_clusters",
                "a component's steps are as short as its responsibilities are small",
                limit=0.06,
            ),
            Known(
                "groups",
                ALL,
                "nothing in the likelihood asks that a client has one component: two may share a group's samples",
                limit=-0.06,
            ),
        ),
    )

    Options = FedEMOptions
    mixes = True
    compares_models = True

    def round(self, fleet: FleetView) -> None:
        self.expectation(fleet)  # q_t and pi_t
        theta = [self.maximisation(fleet, m) for m in range(self.K)]
        means = [self.average(theta[m], fleet, otherwise=self.clusters[m]) for m in range(self.K)]
        self.clusters = Models(np.stack(means))
        self.report_objective(fleet, theta)

    def expectation(self, fleet: FleetView) -> None:
        """Responsibilities, which stay with the clients, and mixture weights."""
        pi = np.where(self.known(fleet)[:, None], self.mixture[fleet.ids], 1.0 / self.K)
        found = fleet.map(e_step, stage="the E-step", components=self.clusters, pi=PerClient(pi))
        self.remember(fleet, np.array([pi for pi, _ in found]))
        self.record("pi")
        surprise = [value for _, value in found]
        self.report["clustering_objective"] = float(np.average(surprise, weights=fleet.sizes))

    def maximisation(self, fleet: FleetView, m: int) -> Handle:
        """Local training of component m, each sample counting by its responsibility."""
        slot = "main" if m == 0 else f"component {m}"
        terms = self.penalties(fleet, np.full(len(fleet.ids), m))
        weights = SampleWeights("q", m)
        return fleet.train(start=self.clusters[m], sample_weights=weights, penalties=terms, slot=slot)

    def report_objective(self, fleet: FleetView, theta: list[Handle]) -> None:
        """What the clients minimised: the sum over components of their weighted losses."""
        total = np.sum([handle.objective for handle in theta], axis=0)
        arrived = np.isfinite(total)
        if arrived.any():
            mean = np.average(total[arrived], weights=fleet.sizes[arrived])
            self.report["federated_objective"] = float(mean)

    def measure(self, fleet: FleetView) -> Weights:
        steps = self.options.unseen_steps
        return np.array(fleet.map(fitted, stage="E-steps", components=self.clusters, steps=steps))

    def measure_unlabelled(self, fleet: FleetView) -> Weights:
        steps = self.options.unseen_steps
        return np.stack(fleet.describe(guessed, stage="E-steps", components=self.clusters, steps=steps))

    def prediction(self, fleet: FleetView) -> Prediction:
        if self.K == 1:
            return Prediction([self.clusters[0]])
        if self.options.predict == "largest":
            return Prediction([self.clusters[self.labels(fleet)]])
        components = [self.clusters[m] for m in range(self.K)]
        return Prediction([*components], weights=self.weights(fleet), combine="probability_mean")


def responsibilities(losses: Weights, pi: Weights) -> tuple[Weights, Weights]:
    """q (samples, M), rows summing to 1, and -log sum_m pi_m exp(-loss_m) of each sample.

    >>> q, surprise = responsibilities(np.array([[0.0, np.log(2.0)]]), np.array([0.5, 0.5]))
    >>> q.round(6).tolist(), float(np.exp(-surprise[0]).round(6))
    ([[0.666667, 0.333333]], 0.75)
    """
    with np.errstate(divide="ignore"):  # a weight of 0 is a logarithm of -inf
        scores = np.log(pi) - np.where(np.isfinite(losses), losses, np.inf)
    top = scores.max(axis=1, keepdims=True)
    hopeless = np.isneginf(top[:, 0])  # no component explains the sample at all
    mass = np.exp(scores - np.where(hopeless[:, None], 0.0, top))
    mass[hopeless] = pi
    total = mass.sum(axis=1, keepdims=True)
    return mass / total, -(top[:, 0] + np.log(total[:, 0]))


def e_step(
    client: Any, state: dict[str, Any], components: Matrix, pi: npt.NDArray[np.float64]
) -> tuple[dict[str, Any], tuple[Weights, float]]:
    """One E-step and the new pi; the responsibilities stay in the client's state."""
    q, surprise = responsibilities(client.sample_losses(components).astype(np.float64), pi)
    return {**state, "q": q.astype(np.float32)}, (q.mean(axis=0), float(surprise.mean()))


def fitted(
    client: Any, state: dict[str, Any], components: Matrix, steps: int
) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """pi of a client under fixed components: E-steps from a uniform pi, nothing kept."""
    return state, settled(client.sample_losses(components).astype(np.float64), steps)


def guessed(client: ClientView, components: Matrix, steps: int) -> npt.NDArray[np.float64]:
    """The same of a client without labels: a prediction's entropy for the loss."""
    return settled(sample_entropies(client, components), steps)


def settled(losses: Weights, steps: int) -> npt.NDArray[np.float64]:
    """pi after so many E-steps from a uniform one."""
    pi = np.full(losses.shape[1], 1.0 / losses.shape[1])
    for _ in range(steps):
        pi = responsibilities(losses, pi)[0].mean(axis=0)
    return pi
