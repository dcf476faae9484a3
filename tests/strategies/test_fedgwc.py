"""FedGWC: a round by hand, its identities, every option, and groups whose losses differ."""

from dataclasses import fields

import numpy as np
import pytest

from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.fedgwc import FedGWCOptions, affinity, embedding, gaussian_weights
from archipelago.strategies.references import Models
from tests.support.experiments import checkpoint_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet


def fedgwc_of(targets, clusters=4, **options):
    """y = w x from w = 0 with x = 1: client i's loss in the first step is targets[i]^2."""
    fleet = scalar_fleet([[(1.0, y)] for y in targets], lr=0.1)
    method = method_of("fedgwc", fleet, clusters=clusters, options={"fedgwc": FedGWCOptions(**options)})
    method.base.clusters = Models(np.zeros((1, 1), np.float32))
    return method, fleet


def test_one_round_by_hand():
    """Losses 1, 1, 4 of one set of three: m = 2, sigma^2 = 2, rewards e^-1/4, e^-1/4, e^-1."""
    method, fleet = fedgwc_of([1.0, 1.0, 2.0], sample=0)
    method.round(fleet, 1)
    near, far = np.exp(-0.25), np.exp(-1.0)
    w = np.array([near, near, far]) / (2 * near + far)
    assert np.allclose(method.base.W, w[:, None], rtol=1e-5)
    # W began at 0: the mean squared change is all of its mean square, and the cluster is not at rest.
    assert method.report["interaction_change"] == pytest.approx([1.0])
    # FedAvg: each w_i is 0.2 y_i, their mean 0.2 * 4 / 3.
    assert method.base.clusters.values.ravel() == pytest.approx([0.2 * 4 / 3], rel=1e-5)
    # In the second round everything is seen again: W is the mean of both, so half of the difference is new.
    before = method.base.W
    fleet.begin(2)
    losses = (np.array([1.0, 1.0, 2.0]) - 0.8 / 3) ** 2
    method.round(fleet, 2)
    again = gaussian_weights(losses, np.ones(3))[:, None]
    assert np.allclose(method.base.W, (before + again) / 2, rtol=1e-4)
    change = np.mean((again - before) ** 2) / 4
    assert method.report["interaction_change"] == pytest.approx(
        [change / np.mean(method.base.W**2)], rel=1e-3
    )


def test_reward_is_low_for_a_loss_far_from_the_mean_and_large_clients_move_it():
    assert gaussian_weights(np.array([1.0, 1.0, 1.0]), np.ones(3)) == pytest.approx(np.full(3, 1 / 3))
    heavy = gaussian_weights(np.array([0.0, 1.0]), np.array([1.0, 3.0]))  # m = 3/4, sigma^2 = 3/16
    assert heavy[1] / heavy[0] == pytest.approx(np.exp((9 - 1) / 16 / (2 * 3 / 16)))


def test_spectral_division_by_hand():
    """Two companies in W: whom a client is typical of is seen in the columns of the others."""
    W = np.full((6, 6), 0.1)
    W[:3, :3] = W[3:, 3:] = 0.5
    alike = affinity(W, beta=0.25)
    # Scaled to 0 and 1, columns of one company are equal, others differ in all but their own entries.
    assert alike[0, 1] == pytest.approx(1.0) and alike[0, 4] == pytest.approx(np.exp(-0.25 * 4))
    points = embedding(alike, 2)
    assert np.allclose(points[:3], points[0]) and np.allclose(points[3:], points[3])
    assert not np.allclose(points[0], points[3])
    method, _ = fedgwc_of([0.0] * 6)
    labels, score = method.base.best_division(alike, 4)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1] and score == pytest.approx(0.0, abs=1e-6)


def resting(clusters, company=3, **options):
    """A method whose six clients are in companies of three, or of two, about to be divided."""
    method, fleet = fedgwc_of([1.0] * 6, clusters, **{"sample": 2, **options})
    method.round(fleet, 1)
    base = method.base
    together = np.arange(6) // company
    base.W = np.where(together[:, None] == together, 0.5, 0.1)
    base.met, base.mse, base.calm = np.full((6, 6), 1e9), np.zeros(1), np.array([9])
    fleet.begin(2)
    method.round(fleet, 2)
    return method


def test_cluster_at_rest_is_divided_and_its_parts_continue_from_its_model():
    method = resting(4)
    base = method.base
    assert base.K == 2 and base.assignment.tolist() == [0, 0, 0, 1, 1, 1]
    # The parts are averaged on their own in that round: all want 1, from 0.2 the step leads to 0.36.
    assert base.clusters.values.ravel() == pytest.approx([0.36, 0.36], rel=1e-5)
    assert method.events == ["Cluster 0 was divided: 3, 3 clients (Davies-Bouldin 0.00)."]
    assert base.mse.tolist() == [1.0, 1.0] and not base.met.any()
    assert resting(1).base.K == 1  # `clusters` is the most there may be
    assert resting(4, min_size=4).base.K == 1
    assert [resting(4, company=2, parts=parts).base.K for parts in (2, 3)] == [2, 3]
    assert resting(4, company=2, sample=3).base.K == 2  # six clients are two sets of three
    assert resting(4, eps=1e-30).base.K == 1  # W is not at rest


def test_where_all_are_compared_at_once_nobody_can_be_told_from_anybody():
    """The released code with all clients in every round: all columns of W are equal, and no cluster is divided."""
    method, fleet = fedgwc_of([1.0, 1.0, 1.0, 5.0, 5.0, 5.0], sample=0)
    for round in range(1, 9):
        fleet.begin(round)
        method.round(fleet, round)
    W = method.base.W
    assert np.allclose(W, W[:, :1]) and method.base.K == 1


def test_groups_whose_losses_differ_are_found():
    """Ground truth: one half wants 1, the other 3 or -3, so that losses at the mean model are low or high."""
    method, fleet = fedgwc_of([0.1, -0.1] * 4 + [3.0, -3.0] * 4, clusters=2)
    for round in range(1, 31):
        fleet.begin(round)
        method.round(fleet, round)
    assert method.base.K == 2
    assert method.base.assignment.tolist() == [0] * 8 + [1] * 8


def test_divisions_have_the_same_bits_on_any_layout_and_after_a_resume():
    settings = (
        "method=fedgwc",
        "clusters=3",
        "fedgwc.sample=2",
        "fedgwc.eps=100",
        "rounds=3",
        "evaluation.every=3",
    )
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 3))
    assert whole.server.method.base.K > 1
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]], checkpoint=checkpoint_of(first))
    assert outcome(second, reports + run(second, 1, first=3)) == expected


def test_one_cluster_is_fedavg():
    one, fedavg = session_of("method=fedgwc", "clusters=1"), session_of("method=fedavg", "clusters=1")
    run(one, 3), run(fedavg, 3)
    assert np.array_equal(one.models()["models"]["clusters"][0], fedavg.models()["models"]["global"])


def test_every_option_changes_the_numbers():
    found = {}
    plain = {"sample": 3, "eps": 0.5}  # in a set of two both are as far from the mean
    for name, options in {
        "plain": {}, "sample": {"sample": 4}, "draws": {"draws": 5}, "alpha": {"alpha": 0.5}, "eps": {"eps": 1e-9},
        "beta": {"beta": 40.0}, "min_size": {"min_size": 5}, "parts": {"parts": 2},
        "clustering": {"clustering": "agglomerative"},
    }.items():  # fmt: skip
        targets = np.random.default_rng(3).normal(0.0, 2.0, 24)
        method, fleet = fedgwc_of(targets, clusters=8, **{**plain, **options})
        for round in range(1, 9):
            fleet.begin(round)
            method.round(fleet, round)
        found[name] = (method.base.W.tobytes(), method.base.assignment.tobytes())
    same = [name for name, each in found.items() if name != "plain" and each == found["plain"]]
    assert same == []
    assert set(found) == {"plain", *(each.name for each in fields(FedGWCOptions))}


def test_clients_that_never_took_part_are_in_no_cluster_and_join_by_loss():
    session = session_of("method=fedgwc", "clusters=2", "participation.fraction=0.5", "rounds=1")
    run(session, 1)
    base = session.server.method.base
    never = np.flatnonzero(base.assignment == UNASSIGNED)
    assert len(never) == 4 and not base.W[never].any()
    fleet = session.server.fleet.everyone
    base.K, base.clusters = 2, Models(np.concatenate([base.clusters.values, 100 * base.clusters.values]))
    losses = fleet.select(never).losses(base.clusters)
    assert np.array_equal(base.labels(fleet)[never], losses.argmin(axis=1))
