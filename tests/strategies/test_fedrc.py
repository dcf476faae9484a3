"""FedRC: its posterior with two clients by hand, its identities, and what its clusters tell apart."""

import numpy as np
import pytest
from scipy.special import softmax

from archipelago.core.settings import ModelSettings
from archipelago.strategies.fedrc import label_shares, posterior
from archipelago.strategies.references import Models
from tests.support.experiments import digest, run, session_of
from tests.support.scalar import method_of, scalar_fleet


def test_posterior_of_two_clients_by_hand():
    # P(y | x) under two models, and shares of the labels 0 and 1 in each cluster.
    likelihood = np.array([[0.6, 0.3], [0.2, 0.4]])
    shares = np.array([[0.9, 0.1], [0.5, 0.5]])
    # Client 0 has a sample of label 0: 0.5 * 0.6 / 0.9 and 0.5 * 0.3 / 0.5, so 0.333 : 0.3. FedEM would say 0.6 : 0.3.
    gamma, surprise = posterior(-np.log(likelihood[:1]), np.array([0]), np.array([0.5, 0.5]), shares)
    assert gamma[0].tolist() == pytest.approx([10 / 19, 9 / 19])
    assert np.exp(-surprise[0]) == pytest.approx(1 / 3 + 0.3)
    # Client 1 has one of label 1 and weighs the models 1 : 3: 0.25 * 0.2 / 0.1 and 0.75 * 0.4 / 0.5, so 0.5 : 0.6.
    gamma, _ = posterior(-np.log(likelihood[1:]), np.array([1]), np.array([0.25, 0.75]), shares)
    assert gamma[0].tolist() == pytest.approx([5 / 11, 6 / 11])
    # Without shares it is FedEM's.
    gamma, _ = posterior(-np.log(likelihood[:1]), np.array([0]), np.array([0.5, 0.5]), None)
    assert gamma[0].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_two_rounds_by_hand():
    """Softmax regression on one number: (3), (4), (5) and C in numpy; the second round divides by C of the first."""
    samples = [[(1.0, 0), (2.0, 1)], [(-1.0, 1), (0.5, 0), (3.0, 1)]]
    fleet = scalar_fleet(samples, lr=0.1, model=ModelSettings(name="linear"), classes=2)
    method = method_of("fedrc", fleet, clusters=2)
    models = np.float32([[1.0, -1.0, 0.2, 0.0], [-0.5, 0.5, 0.0, 0.1]])  # weights and biases of both classes
    method.base.clusters = Models(models)
    theta, omega, shares = models.astype(np.float64), np.full((2, 2), 0.5), None
    for number in (1, 2):
        fleet.begin(number)
        method.round(fleet, number)
        fleet.commit()
        trained, mass = [], np.zeros((2, 2))
        for i, pairs in enumerate(samples):
            x, y = np.array([[x] for x, _ in pairs]), np.array([y for _, y in pairs])
            p = np.array(
                [softmax(x * model[:2] + model[2:], axis=1) for model in theta]
            )  # (K, samples, classes)
            likely = p[:, np.arange(len(y)), y] / (1.0 if shares is None else shares[:, y])
            gamma = omega[i][:, None] * likely
            gamma /= gamma.sum(axis=0)
            omega[i] = gamma.mean(axis=1)
            np.add.at(mass.T, y, gamma.T)
            wrong = gamma[:, :, None] * (p - np.eye(2)[y])  # the gradient of the weighted loss by the logits
            step = np.concatenate([(wrong * x).mean(axis=1), wrong.mean(axis=1)], axis=1)
            trained.append(theta - 0.1 * step)
        theta = np.average(trained, axis=0, weights=[2, 3])
        shares = mass / mass.sum(axis=1, keepdims=True)
        assert method.base.mixture == pytest.approx(omega, rel=1e-4)
        assert method.base.clusters.values == pytest.approx(theta, rel=1e-4)
        assert method.base.shares == pytest.approx(shares, rel=1e-4)


def test_shares_are_of_all_clients_and_an_empty_cluster_has_even_ones():
    masses = [np.array([[2.0, 0.0], [0.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 0.0]])]
    assert label_shares(masses).tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert label_shares([np.zeros((2, 0))]) is None


def test_regression_is_fedem():
    samples = [[(1.0, 2.0), (1.0, 3.0)], [(1.0, -2.0)]]
    values = {}
    for method in ("fedrc", "fedem"):
        fleet = scalar_fleet(samples, lr=0.1)
        made = method_of(method, fleet, clusters=2)
        made.base.clusters = Models(np.float32([[0.5], [-0.5]]))
        for number in (1, 2):
            fleet.begin(number)
            made.round(fleet, number)
        values[method] = made.base.clusters.values
    assert np.array_equal(values["fedrc"], values["fedem"])


def test_one_cluster_is_fedavg():
    one, fedavg = session_of("method=fedrc", "clusters=1"), session_of("method=fedavg", "clusters=1")
    reports, plain = run(one, 3), run(fedavg, 3)
    assert np.array_equal(one.server.method.base.clusters.values[0], fedavg.server.method.base.model)
    assert digest(reports[-1].clients["accuracy"]) == digest(plain[-1].clients["accuracy"])


def test_first_round_is_fedems_and_the_next_is_not():
    rc, em = (session_of(f"method={name}", "partition=dirichlet", "partition.alpha=0.3", "data.rotations=1")
              for name in ("fedrc", "fedem"))  # fmt: skip
    run(rc, 1), run(em, 1)
    assert np.array_equal(rc.server.method.base.clusters.values, em.server.method.base.clusters.values)
    assert rc.server.method.base.shares.sum(axis=1) == pytest.approx([1, 1])
    run(rc, 1, first=2), run(em, 1, first=2)
    assert not np.array_equal(rc.server.method.base.clusters.values, em.server.method.base.clusters.values)


def test_concept_shifts_part_clients():
    """Labels that mean something else to half of the clients are found (seeds 0, 1, 2: after 12, 4 and 3 rounds)."""
    session = session_of(
        "method=fedrc", "seed=2", "data.rotations=1", "data.label_swaps=2", "local.steps=10", "local.lr=0.1",
        "model.hidden=[32]", "evaluation.every=6",
    )  # fmt: skip
    assert run(session, 6)[-1].metrics["ari"] == 1.0


def test_unseen_steps_reach_held_out_clients():
    setting = ("method=fedrc", "data.label_swaps=2", "holdout_clients=0.25", "evaluation.every=3")
    plain, other = (run(session_of(*setting, *more), 3)[-1].clients["loss"]
                    for more in ((), ("fedrc.unseen_steps=1",)))  # fmt: skip
    assert (plain != other).sum() == 2  # held-out clients alone


def test_cost_grows_with_the_clusters():
    for report in run(session_of("method=fedrc", "clusters=3"), 2):
        assert report.metrics["cost_models_down"] == pytest.approx(3)
        assert report.metrics["cost_models_up"] == pytest.approx(3)
