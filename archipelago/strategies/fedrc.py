"""FedRC: a mixture of K models whose clusters tell concept shifts apart, and nothing else.

Guo, Tang, Lin, "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering", ICML
2024 (arXiv:2301.12379); code: LINs-lab/FedRC.

    theta_k   self.clusters[k]      omega_ik   self.mixture[i, k]      gamma_ijk   "q" in client i's state
    C_yk      self.shares[k, y], the share of label y in cluster k: an estimate of P(y; theta_k)

    objective   mean over i, j of ln sum_k omega_ik I(x_ij, y_ij; theta_k),  I = P(y | x; theta_k) / P(y; theta_k)   (2)
    E-step      gamma_ijk = omega_ik I_k / sum_n omega_in I_n;   omega_ik = mean_j gamma_ijk                    (3), (4)
    M-step      theta_k by local steps on sum_j gamma_ijk l(theta_k; x_ij, y_ij), then the mean over clients         (5)
    predict     sum_k omega_ik softmax(h_k(x))

Dividing by C_yk takes away what a cluster gains from its labels being unevenly spread: clients that differ in their
labels or their inputs alone do not part, clients to whom the same input means another label do.

Readings

What the paper is read from
    here    public code, abstracts and what is generally known of it: the full text was not at hand
P(y; theta_k)
    paper   C_yk = sum of gamma over samples of label y / sum of gamma
    code    the same sums of all clients, at least 1e-8
    here    sums of the round's participants, which the next round uses; uniform in the first, and at least 1e-8
Loss of a batch
    paper   sum_j gamma l / n_i
    code    weighted mean of the batch, not divided by the sum of gamma
    here    as the code
Server's mean
    paper   of the participants
    code    by samples
    here    as `weights` says
    option  weights=uniform
Batches of the models
    here    one stream each, optimizers kept; the first has FedAvg's and predicts alone where K = 1, which is FedAvg
Number of clusters
    paper   K fixed; its appendix removes clusters nobody weighs
    here    K fixed
Prediction
    code    the mixture of all models
    here    as the code
Regression
    here    there are no labels to share: I is the likelihood alone, which makes it FedEM
Clients never seen
    paper   E-steps only
    here    20 E-steps from a uniform omega
    option  fedrc.unseen_steps
New clients without labels
    here    E-steps in which the entropy of a prediction stands for its loss; C, which is of labels, is left out
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
from archipelago.strategies.expectations import Cost, Expectations, K, Known
from archipelago.strategies.interface import ClientView, FleetView, Handle
from archipelago.strategies.mixtures import MixtureModels, Weights
from archipelago.strategies.parameters import Matrix
from archipelago.strategies.references import Models, PerClient, Prediction, SampleWeights

LEAST = 1e-8  # of C_yk


@dataclass
class FedRCOptions:
    """`fedrc.unseen_steps=...`"""

    unseen_steps: int = setting(20, "E-steps of a client that never trained, before it predicts", at_least=1)


@METHODS.register(
    "fedrc", "mixtures of K models that ignore label and feature shifts (Guo et al. 2024)", label="FedRC"
)
class FedRC(MixtureModels):
    """E-step on I, weighted local training of all models, mean of each, shares of labels."""

    # What it parts are concepts, the same input with another label: no situation has any.
    expects = Expectations(
        ari=0.0,
        cost=Cost(down=K, up=K, trainings=K),
        known=(
            Known(
                "accuracy",
                "slow",
                "a model's steps are as short as its responsibilities are small",
                limit=0.33,
            ),
        ),
    )

    Options = FedRCOptions
    mixes = True
    compares_models = True
    state = ("clusters", "mixture", "shares")
    shares: Weights | None = None  # C, (K, classes); None: uniform, before the first round

    def round(self, fleet: FleetView) -> None:
        found = self.expectation(fleet)  # gamma, omega: (3), (4)
        theta = [self.maximisation(fleet, k) for k in range(self.K)]  # (5)
        means = [self.average(theta[k], fleet, otherwise=self.clusters[k]) for k in range(self.K)]
        self.clusters = Models(np.stack(means))
        self.shares = label_shares(found)

    def expectation(self, fleet: FleetView) -> list[Weights]:
        """gamma, which stays with the clients, and omega; returns each client's (K, classes) mass of labels."""
        omega = np.where(self.known(fleet)[:, None], self.mixture[fleet.ids], 1.0 / self.K)
        found = fleet.map(
            e_step, stage="the E-step", models=self.clusters, omega=PerClient(omega), shares=self.sent(fleet)
        )
        self.remember(fleet, np.array([omega for omega, _, _ in found]))
        self.record("omega")
        surprise = [value for _, _, value in found]
        self.report["clustering_objective"] = float(np.average(surprise, weights=fleet.sizes))
        return [mass for _, mass, _ in found]

    def sent(self, fleet: FleetView) -> PerClient | None:
        """C for every client: some numbers, and no models that the round's cost would count."""
        return (
            None if self.shares is None else PerClient(np.repeat(self.shares[None], len(fleet.ids), axis=0))
        )

    def maximisation(self, fleet: FleetView, k: int) -> Handle:
        """Local training of theta_k, each sample counting by gamma."""
        slot = "main" if k == 0 else f"component {k}"
        terms = self.penalties(fleet, np.full(len(fleet.ids), k))
        return fleet.train(
            start=self.clusters[k], sample_weights=SampleWeights("q", k), penalties=terms, slot=slot
        )

    def measure(self, fleet: FleetView) -> Weights:
        steps, shares = self.options.unseen_steps, self.sent(fleet)
        return np.array(fleet.map(fitted, stage="E-steps", models=self.clusters, steps=steps, shares=shares))

    def measure_unlabelled(self, fleet: FleetView) -> Weights:
        steps = self.options.unseen_steps
        return np.stack(fleet.describe(guessed, stage="E-steps", models=self.clusters, steps=steps))

    def prediction(self, fleet: FleetView) -> Prediction:
        if self.K == 1:
            return Prediction([self.clusters[0]])
        models = [self.clusters[k] for k in range(self.K)]
        return Prediction([*models], weights=self.weights(fleet), combine="probability_mean")


def posterior(
    losses: Weights, labels: npt.NDArray[Any], omega: Weights, shares: Weights | None
) -> tuple[Weights, Weights]:
    """gamma (samples, K) of (3), and -ln sum_k omega_k I_k of each sample; `losses` are -ln P(y | x; theta_k).

    >>> losses = np.log([[2.0, 4.0], [2.0, 4.0]])
    >>> gamma, _ = posterior(losses, np.array([0, 1]), np.array([0.5, 0.5]), np.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> gamma.round(6).tolist()
    [[0.5, 0.5], [0.75, 0.25]]
    """
    with np.errstate(divide="ignore"):
        scores = np.log(omega) - np.where(np.isfinite(losses), losses, np.inf)
    if shares is not None:
        scores = scores - np.log(np.maximum(shares[:, labels.astype(np.int64)].T, LEAST))
    top = scores.max(axis=1, keepdims=True)
    hopeless = np.isneginf(top[:, 0])  # no model explains the sample at all: it keeps omega
    mass = np.exp(scores - np.where(hopeless[:, None], 0.0, top))
    mass[hopeless] = omega
    total = mass.sum(axis=1, keepdims=True)
    return mass / total, -(top[:, 0] + np.log(total[:, 0]))


def label_shares(masses: list[Weights]) -> Weights | None:
    """C of the clients' masses of labels; None in a regression, and where nothing weighs anything.

    >>> label_shares([np.array([[3.0, 1.0], [0.0, 0.0]])]).tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    """
    if not masses or not masses[0].size:
        return None
    total = np.sum(masses, axis=0)
    whole = total.sum(axis=1, keepdims=True)
    return np.divide(total, whole, out=np.full_like(total, 1.0 / total.shape[1]), where=whole > 0)


def e_step(
    client: ClientView, state: dict[str, Any], models: Matrix, omega: Weights, shares: Weights | None
) -> tuple[dict[str, Any], tuple[Weights, Weights, float]]:
    """(3) and (4): omega, the (K, classes) mass of each label, and the surprise; gamma stays in the client's state."""
    losses, labels = client.sample_losses(models).astype(np.float64), client.labels()
    gamma, surprise = posterior(losses, labels, omega, shares)
    mass = np.zeros((len(models), client.classes or 0))
    if client.classes:
        np.add.at(mass.T, labels.astype(np.int64), gamma)
    return {**state, "q": gamma.astype(np.float32)}, (gamma.mean(axis=0), mass, float(surprise.mean()))


def fitted(
    client: ClientView, state: dict[str, Any], models: Matrix, steps: int, shares: Weights | None
) -> tuple[dict[str, Any], Weights]:
    """omega of a client under fixed models: E-steps from a uniform one, nothing kept."""
    losses = client.sample_losses(models).astype(np.float64)
    return state, settled(losses, client.labels(), steps, shares)


def guessed(client: ClientView, models: Matrix, steps: int) -> Weights:
    """The same of a client without labels: a prediction's entropy for the loss, and no shares to divide by."""
    losses = sample_entropies(client, models)
    return settled(losses, np.zeros(len(losses), np.int64), steps, None)


def settled(losses: Weights, labels: npt.NDArray[Any], steps: int, shares: Weights | None) -> Weights:
    """omega after so many E-steps from a uniform one."""
    omega = np.full(losses.shape[1], 1.0 / losses.shape[1])
    for _ in range(steps):
        omega = posterior(losses, labels, omega, shares)[0].mean(axis=0)
    return omega
