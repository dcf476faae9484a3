"""Degenerate federations and clusterings: the run continues, and says so once."""

import numpy as np
import pytest

from archipelago.data import ClientData, Federation
from tests.support.experiments import run, session_of


def reported(report, words):
    return [event for event in report.events if words in event]


@pytest.mark.parametrize(
    ("clients", "groups", "sentence"),
    [
        (3, 2, "Cluster 1 has one client."),
        (5, 4, "Clusters 1, 2 and 3 have one client each."),
        (4, 2, None),
    ],
)
def test_clusters_of_one_are_reported_once_and_trained(clients, groups, sentence):
    session = session_of(
        "method=oracle", f"clients={clients}", f"data.rotations={groups}", f"clusters={groups}"
    )
    before = session.server.method.base.clusters.values.copy()
    first, second = run(session, 2)
    assert reported(first, "one client") == ([] if sentence is None else [sentence])
    assert reported(second, "one client") == []
    changed = session.server.method.base.clusters.values != before
    assert changed.any(axis=1).all() and np.isfinite(second.metrics["micro_loss"])


def test_cluster_that_comes_down_to_one_is_reported_when_it_does():
    server = session_of("method=oracle", "clients=4").server
    then, server.method.base.assignment = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    assert server._cluster_events(then) == ["Cluster 1 has one client."]
    assert server._cluster_events(server.method.base.assignment) == []


def test_clients_with_one_class_are_reported_once_in_one_sentence():
    one_class = ("partition=cluster_n_class", "partition.groups=2", "partition.classes=5",
                 "partition.classes_within=1", "data.rotations=1", "clients=10")  # fmt: skip
    first, second = run(session_of("method=fedavg", *one_class), 2)
    assert reported(first, "class") == ["10 of 10 clients train on samples of one class."]
    assert reported(second, "class") == [] and second.metrics["micro_loss"] < first.metrics["micro_loss"]
    assert reported(run(session_of("method=fedavg"), 1)[0], "class") == []


def test_who_holds_one_class_is_known_client_by_client():
    made = Federation(
        clients=tuple(
            ClientData(np.array(train), np.array([], np.int64), np.array([test]))
            for train, test in (([0, 1], 5), ([2, 3], 6), ([4], 7))
        ),
        x=np.zeros((8, 1), np.float32),
        y=np.array([1, 1, 0, 1, 2, 0, 0, 0]),
        classes=3,
        mean=(0.0,),
        std=(1.0,),
        name="tiny",
    )
    assert made.one_class.tolist() == [True, False, True]


def test_clients_with_one_batch_are_reported_once_in_one_sentence():
    session = session_of("method=fedavg", "partition=quantity", "local.batch=128")
    few = int((session.server.setup.sizes <= 128).sum())
    assert 1 < few < 8
    first, second = run(session, 2)
    sentence = f"{few} of 8 clients have no more training samples than one batch (local.batch=128)."
    assert reported(first, "batch") == [sentence] and reported(second, "batch") == []
    assert second.metrics["micro_loss"] < first.metrics["micro_loss"]
    assert reported(run(session_of("method=fedavg"), 1)[0], "batch") == []


def test_regression_has_no_classes_to_speak_of():
    session = session_of("method=fedavg", "data=synthetic", "data.rotations=1", "model=linear_regression")
    [report] = run(session, 1)
    assert session.server.setup.one_class is None and reported(report, "class") == []


def test_clients_that_never_train_are_not_counted():
    session = session_of("method=fedavg", "local.batch=1000", "holdout_clients=0.25")
    [report] = run(session, 1)
    assert reported(report, "batch") == [
        "6 of 6 clients have no more training samples than one batch (local.batch=1000)."
    ]
