"""FedPer, by hand; all private is local training, nothing private is FedAvg."""

import numpy as np
import pytest

from archipelago.core.schema import composed
from archipelago.core.settings import AggregationSettings, ModelSettings
from archipelago.strategies import fedper as module
from archipelago.strategies.fedper import FedPerOptions, private_columns
from archipelago.strategies.parameters import ModelEntry, ModelSpec
from archipelago.strategies.references import Merged, Prediction
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once, client 1 holds (1, -2) three times.
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
LAST = {"fedper": FedPerOptions(layers=1)}
SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2")


def two_layers(samples):
    """h relu(w x + b) + c, as the vector (w, b, h, c); h and c are private."""
    fleet = scalar_fleet(samples, lr=0.1, model=composed(ModelSettings)(name="mlp", hidden=[1]))
    fedper = method_of("fedper", fleet, options=LAST)
    fedper.base.model = np.float32([1.0, 0.0, 1.0, 0.0])
    return fleet, fedper


def test_two_rounds_by_hand():
    fleet, fedper = two_layers(TWO)
    fedper.base.round(fleet)
    fleet.commit()
    # Client 0: output 1, d = 2 (1 - 2) = -2, all four gradients -2: (1.2, 0.2, 1.2, 0.2).
    # Client 1: d = 2 (1 + 2) = 6: (0.4, -0.6, 0.4, -0.6).
    # W_B = ((1.2 + 3 * 0.4) / 4, (0.2 - 3 * 0.6) / 4) = (0.6, -0.4); the first head stays where it was.
    assert fedper.base.model.tolist() == pytest.approx([0.6, -0.4, 1.0, 0.0], rel=1e-5)
    fleet.begin(2)
    losses = fleet.evaluate(fedper.base.prediction(fleet))["loss"]
    # relu(0.6 - 0.4) = 0.2: 1.2 * 0.2 + 0.2 = 0.44 and 0.4 * 0.2 - 0.6 = -0.52; (0.44 - 2)^2, (-0.52 + 2)^2
    assert losses.tolist() == pytest.approx([2.4336, 2.1904], rel=1e-5)
    fedper.base.round(fleet)
    # Client 0: d = -3.12: w = 0.6 + 0.1 * 3.12 * 1.2 = 0.9744, b = -0.0256.
    # Client 1: d = 2.96: w = 0.6 - 0.1 * 2.96 * 0.4 = 0.4816, b = -0.5184.
    assert fedper.base.model.tolist() == pytest.approx([0.6048, -0.3952, 1.0, 0.0], rel=1e-5)
    fleet.commit()
    states = fleet.snapshot()[0]
    # h = 1.2 + 0.1 * 3.12 * 0.2, c = 0.2 + 0.312; h = 0.4 - 0.1 * 2.96 * 0.2, c = -0.6 - 0.296
    assert states[0]["model/personal"][2:].tolist() == pytest.approx([1.2624, 0.512], rel=1e-5)
    assert states[1]["model/personal"][2:].tolist() == pytest.approx([0.3408, -0.896], rel=1e-5)


def test_private_part():
    def entry(name, at, part, kind="parameter"):
        return ModelEntry(name, (1,), at, at + 1, kind, part)

    spec = ModelSpec((
        entry("conv.weight", 0, "backbone"), entry("fc1.weight", 1, "head"), entry("fc1.bias", 2, "head"),
        entry("norm.weight", 3, "head"), entry("fc2.weight", 4, "head"),
        entry("bn.running_mean", 5, "backbone", "buffer"), entry("norm.running_mean", 6, "head", "buffer"),
    ))  # fmt: skip
    assert private_columns(spec, None).tolist() == [1, 2, 3, 4, 6]
    assert private_columns(spec, 1).tolist() == [4]
    assert private_columns(spec, 2).tolist() == [3, 4, 6]  # statistics go with their layer
    assert private_columns(spec, 99).tolist() == [0, 1, 2, 3, 4, 6]


def test_network_that_is_all_head_trains_alone_and_the_run_says_so():
    session, local = session_of("method=fedper"), session_of("method=local")  # an mlp
    reports, alone = run(session, 3), run(local, 3)
    mine, theirs = checkpoint_of(session).clients, checkpoint_of(local).clients
    for client in range(8):
        assert np.array_equal(mine[client]["model/personal"], theirs[client]["model/model"])
    assert np.array_equal(reports[-1].clients["loss"], alone[-1].clients["loss"])
    assert "fedper shares nothing" in reports[0].events[0] and reports[1].events == []


def test_nothing_private_is_fedavg_and_the_run_says_so(monkeypatch):
    monkeypatch.setattr(module, "private_columns", lambda spec, layers: np.zeros(0, np.int64))
    session, fedavg = session_of("method=fedper"), session_of("method=fedavg")
    reports, plain = run(session, 3), run(fedavg, 3)
    assert np.array_equal(session.server.method.base.model, fedavg.server.method.base.model)
    assert np.array_equal(reports[-1].clients["loss"], plain[-1].clients["loss"])
    assert "fedper keeps nothing private" in reports[0].events[0]


def test_first_backbone_is_that_of_fedavg_and_the_first_head_stays():
    session = session_of("method=fedper", "fedper.layers=1", *SKEWED)
    fedavg = session_of("method=fedavg", *SKEWED)
    start = session.server.method.base.model
    run(session, 1)
    run(fedavg, 1)
    head = private_columns(session.fleet.spec, 1)
    backbone = np.setdiff1d(np.arange(session.fleet.spec.size), head)
    mine, theirs = session.server.method.base.model, fedavg.server.method.base.model
    assert np.array_equal(mine[backbone], theirs[backbone]) and np.array_equal(mine[head], start[head])
    assert not np.array_equal(theirs[head], start[head])
    run(session, 1, first=2)
    assert np.array_equal(session.server.method.base.model[head], start[head])


def test_more_private_layers_change_the_numbers():
    two = session_of("method=fedper", "fedper.layers=1", "model.hidden=[8,8]")
    three = session_of("method=fedper", "fedper.layers=2", "model.hidden=[8,8]")
    run(two, 2)
    run(three, 2)
    assert not np.array_equal(two.server.method.base.model, three.server.method.base.model)


def test_private_heads_serve_skewed_clients_better_than_one_for_all():
    settings = (*SKEWED, "local.steps=10", "local.lr=0.1", "model.hidden=[32]")
    fedper, fedavg = (
        session_of("method=fedper", "fedper.layers=1", *settings),
        session_of("method=fedavg", *settings),
    )
    ours, theirs = run(fedper, 5)[-1], run(fedavg, 5)[-1]
    assert ours.metrics["micro_accuracy"] > theirs.metrics["micro_accuracy"] + 0.1


def test_head_of_the_network_is_private_by_default():
    session = session_of("method=fedper", "model=cnn_digits", "clients=4")
    report = session.run_round(1)
    start = session.fleet.initial(1)[0]
    changed = np.flatnonzero(session.server.method.base.model != start)
    assert np.isin(changed, session.fleet.spec.columns("backbone")).all() and len(changed)
    assert report.events == []


def test_client_that_never_took_part_trains_a_head_before_it_predicts():
    fleet = scalar_fleet(TWO, lr=0.1, model=composed(ModelSettings)(name="mlp", hidden=[1]))
    fedper = method_of("fedper", fleet, options={"fedper": FedPerOptions(layers=1, unseen_rounds=1)}).base
    fedper.model = np.float32([1.0, 0.0, 1.0, 0.0])
    fedper.round(fleet.select([0]))  # W_B = (1.2, 0.2)
    # Client 1: relu(1.4) under the head (1, 0), d = 2 (1.4 + 2) = 6.8: h = 1 - 0.68 * 1.4, c = -0.68; then W_B again:
    # 0.048 * 1.4 - 0.68 = -0.6128, (-0.6128 + 2)^2
    for _ in range(2):  # nothing is learned from one prediction to the next
        losses = fleet.evaluate(fedper.prediction(fleet))["loss"]
        assert losses[1] == pytest.approx(1.92432, rel=1e-4)
    assert fedper.model.tolist() == pytest.approx(
        [1.2, 0.2, 1.0, 0.0], rel=1e-5
    )  # the server does not hear of it
    fleet.commit()
    fleet.begin(2)
    fedper.round(fleet)
    fleet.commit()
    assert not [key for key in fleet.snapshot()[0][1] if "new head" in key]


def test_head_trained_for_a_new_client_is_far_better_than_the_first_one():
    settings = (
        "method=fedper",
        "fedper.layers=1",
        *SKEWED,
        "holdout_clients=0.25",
        "model.hidden=[32]",
        "local.lr=0.1",
    )
    trained, first = session_of(*settings), session_of(*settings, "fedper.unseen_rounds=0")
    ours, theirs = run(trained, 4)[-1].metrics, run(first, 4)[-1].metrics
    assert ours["holdout_micro_accuracy"] > theirs["holdout_micro_accuracy"] + 0.2
    assert np.array_equal(trained.server.method.base.model, first.server.method.base.model)


def test_without_such_a_training_it_has_the_first_head_on_the_current_backbone():
    session = session_of(
        "method=fedper", "fedper.layers=1", "fedper.unseen_rounds=0", "participation.fraction=0.25"
    )
    start = session.server.method.base.model
    report = run(session, 2)[-1]
    seen = {client for client, state in checkpoint_of(session).clients.items() if "model/personal" in state}
    head = private_columns(session.fleet.spec, 1)
    session.fleet.begin(3)
    given = session.fleet.everyone.evaluate(
        Prediction([Merged(session.server.method.base.model, start, head)])
    )
    assert 2 <= len(seen) <= 4
    for client in range(8):
        same = report.clients["loss"][client] == given["loss"][client]
        assert same == (client not in seen)


def test_client_that_blows_up_keeps_no_head_and_is_not_averaged():
    fleet, fedper = two_layers([[(1.0, 2.0)], [(1e30, 1.0)]])
    fedper.base.round(fleet)
    fleet.commit()
    assert fedper.base.model.tolist() == pytest.approx([1.2, 0.2, 1.0, 0.0], rel=1e-6)
    assert "model/personal" not in fleet.snapshot()[0][1]


def test_matched_averaging_is_refused():
    with refused("aggregation", says="method=fedper", rule="matched"):
        method_of("fedper", scalar_fleet(TWO), aggregation=AggregationSettings(name="matched"))


def test_no_two_models_share_storage():
    session = session_of("method=fedper", "fedper.layers=1")
    run(session, 2)
    models = [state["model/personal"] for state in checkpoint_of(session).clients.values()]
    models.append(session.server.method.base.model)
    assert len({model.tobytes() for model in models}) == len(models) == 9
    assert not any(np.shares_memory(a, b) for i, a in enumerate(models) for b in models[:i])


def test_same_bits_everywhere():
    assert_same_bits_everywhere("method=fedper", "fedper.layers=1")
