"""FLUX: descriptors by hand, its identities, what it finds without K, and clients without labels."""

import numpy as np
import pytest

from archipelago.strategies.base import Context
from archipelago.strategies.clustering import ClusteringTask, clustered
from archipelago.strategies.clustering_rules import DBSCANOptions, elbow
from archipelago.strategies.flux import FLUXOptions, descriptor, projection, scales
from archipelago.strategies.references import Models
from benchmarks.behaviour.situations import settings
from tests.support.experiments import digest, run, session_from, session_of
from tests.support.scalar import method_of, scalar_fleet

GOOD = ("clients=12", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "evaluation.every=2", "rounds=2")


class Client:
    """Four samples of two features, of two of three classes."""

    classes = 3

    def features(self, model):
        return np.float32([[0, 0], [2, 4], [6, 0], [6, 8]])

    def labels(self):
        return np.array([0, 0, 2, 2])

    def unlabelled(self):
        return self


def test_descriptor_by_hand():
    found = descriptor(Client(), None, seed=0, length=1, labels=True)
    (a,), (b,) = projection(2, 1, 0)
    z = np.array([0, 2 * a + 4 * b, 6 * a, 6 * a + 8 * b])
    means = [z[:2].mean(), 0, z[2:].mean()]
    deviations = [z[:2].std(), 0, z[2:].std()]
    assert found.tolist() == pytest.approx([z.mean(), z.std(), *means, *deviations])
    assert descriptor(Client(), None, seed=0, length=1, labels=False).tolist() == pytest.approx(found[:2])


def test_two_rounds_by_hand():
    """y = w x: a round of FedAvg, then inputs near 1 and near 5 are two clusters, each with a round of its own."""
    inputs, targets = [(1.0, 1.2), (1.1, 1.3), (5.0, 5.4), (5.1, 5.5)], [2.0, 2.0, -3.0, -3.0]
    fleet = scalar_fleet([[(x, y) for x in pair] for pair, y in zip(inputs, targets, strict=True)], lr=0.01)
    flux = method_of("flux", fleet, clusters=4, rounds=9, options={"flux": FLUXOptions(before=1, length=1)})
    flux.base.clusters = Models(np.zeros((1, 1), np.float32))

    def trained(w, client):
        x = np.array(inputs[client])
        return w - 0.01 * np.mean(2 * x * (w * x - targets[client]))

    w = np.mean([trained(0.0, client) for client in range(4)])
    flux.round(fleet, 1)
    assert flux.base.K == 1 and flux.base.clusters.values.ravel() == pytest.approx([w], rel=1e-5)
    fleet.begin(2)
    flux.round(fleet, 2)
    # Means 1.1, 1.2, 5.2, 5.3 and deviations 0.1, 0.1, 0.2, 0.2: eps is 1.5 times the gap, and joins neighbours alone.
    assert flux.base.assignment.tolist() == [0, 0, 1, 1] and flux.base.K == 2
    expected = [np.mean([trained(w, client) for client in pair]) for pair in ((0, 1), (2, 3))]
    assert flux.base.clusters.values.ravel() == pytest.approx(expected, rel=1e-5)


def test_parts_count_alike_whatever_their_units():
    rng = np.random.default_rng(0)
    raw = rng.standard_normal((9, 2 * 2 + 2 * 6)) * np.repeat([1, 100, 0.01, 5], [2, 2, 6, 6])
    centre, spread = scales(raw, 2)
    scaled = (raw - centre) / spread
    for part in (slice(0, 2), slice(2, 4), slice(4, 10), slice(10, None)):
        assert (scaled[:, part] ** 2).mean() == pytest.approx(1)


def test_parts_that_are_equal_up_to_rounding_count_nothing():
    rng = np.random.default_rng(0)
    means, deviations = rng.standard_normal((6, 2)), np.full((6, 2), 0.7)
    deviations += 1e-8 * rng.standard_normal((6, 2))  # of 32-bit features
    raw = np.concatenate([means, deviations, np.zeros((6, 4))], axis=1)
    centre, spread = scales(raw, 2)
    scaled = (raw - centre) / spread
    assert (scaled[:, :2] ** 2).mean() == pytest.approx(1)
    assert np.abs(scaled[:, 2:]).max() < 1e-6


def test_with_cam_clients_are_described_by_the_shared_model_that_the_warm_up_trained():
    kept = [each for each in GOOD if not each.startswith("rounds=")]
    session = session_of(
        "method=flux+cam", *kept, "data.rotations=2", "clusters=4", "rounds=4", "cam.warmup=0.5"
    )
    reports = run(session, 3)
    assert session.server.method.base.divided and reports[-1].metrics["ari"] == 1.0


def test_flux_with_cam_finds_rotations_although_its_model_has_trained_on_both():
    # Clients are 17 to 20 from their nearest then, 27 and more from any of the other group.
    session = session_from(settings("flux+cam", "rotations", 0))
    report = run(session, 8)[-1]
    assert report.metrics["ari"] == 1.0 and report.metrics["cluster_sizes"] == [10, 10]


def test_dbscan_by_hand():
    # Nearest distances are 1, 1, 1, 1, 1, 20: the elbow is the last of the ones.
    points = np.array([[0.0], [1.0], [2.0], [50.0], [51.0], [71.0]])
    assert elbow(np.array([1.0, 1, 1, 1, 1, 20])) == 4
    found = {scale: clustered("dbscan", ClusteringTask(points, 6, seed=0), Context(clients=6),
                              DBSCANOptions(scale=scale)).labels.tolist() for scale in (1.0, 20.0, 60.0)}  # fmt: skip
    assert found == {1.0: [0, 0, 0, 1, 1, 2], 20.0: [0, 0, 0, 1, 1, 1], 60.0: [0] * 6}


def test_one_cluster_is_fedavg():
    one, fedavg = session_of("method=flux", "clusters=1"), session_of("method=fedavg", "clusters=1")
    run(one, 3), run(fedavg, 3)
    assert np.array_equal(one.server.method.base.clusters.values[0], fedavg.server.method.base.model)


@pytest.mark.parametrize("shift", ["data.rotations=4", "data.label_swaps=4"])
def test_groups_and_their_number_are_found(shift):
    shifts = {"data.rotations=1", shift} if shift != "data.rotations=4" else {shift}
    report = run(session_of("method=flux", *GOOD, *sorted(shifts), "clusters=9"), 2)[-1]
    assert report.metrics["cluster_sizes"] == [3, 3, 3, 3] and report.metrics["ari"] == 1.0


def test_clients_without_labels_are_placed(monkeypatch):
    session = session_of("method=flux", *GOOD, "data.rotations=4", "clusters=9", "holdout_clients=0.25")
    run(session, 2)
    groups, base = session.server.setup.groups, session.server.method.base
    known = {groups[i]: base.assignment[i] for i in session.server.population}
    from actors.client_views import LocalView

    monkeypatch.setattr(LocalView, "labels", lambda view: pytest.fail("labels were read"))
    where = base.adopt_unlabelled(session.fleet.measuring().select(session.server.held_out))
    assert [known[groups[i]] for i in session.server.held_out] == where.tolist()


def test_descriptors_cost_what_they_hold():
    session = session_of("method=flux", "rounds=3", "clusters=2")
    sent = [report.metrics["cost_models_up"] for report in run(session, 3)]
    assert sent == pytest.approx([1, 1 + 2 * 16 * 11 / session.fleet.spec.size, 1])


@pytest.mark.parametrize("change", ["flux.before=0", "flux.length=2", "flux.labels=false", "flux.scale=0.3",
                                    "flux.distance=cosine", "flux.clustering=agglomerative"])  # fmt: skip
def test_options_reach_the_numbers(change):
    setting = (
        "method=flux",
        "partition=dirichlet",
        "partition.alpha=0.5",
        "clusters=5",
        "clients=10",
        "rounds=2",
    )
    plain, other = session_of(*setting), session_of(*setting, change)
    assert digest(run(plain, 2)) != digest(run(other, 2))
