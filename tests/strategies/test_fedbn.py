"""FedBN: BatchNorm stays with the clients, everything else is FedAvg."""

import numpy as np
import pytest

from archipelago.strategies.parts import batch_norms, columns_of
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, run, session_of

NORMALISED = ("model=cnn_fashion", "clients=4", "local.steps=2", "local.batch=8")


def test_fedbn_one_round_averages_all_but_batchnorm():
    session = session_of("method=fedbn", *NORMALISED, "weights=uniform")
    columns = columns_of(batch_norms(session.fleet.spec))
    shared = np.setdiff1d(np.arange(session.fleet.spec.size), columns)
    assert len(columns) and len(shared)
    run(session, 1)
    own = [state["model/personal"] for _, state in sorted(checkpoint_of(session).clients.items())]
    mean = np.mean(np.stack(own).astype(np.float64), axis=0)
    assert np.allclose(session.server.method.base.model[shared], mean[shared], atol=1e-6)
    # What client 2 predicts with: the mean everywhere, its own BatchNorm.
    session.fleet.begin(2)
    only = session.fleet.select([2])
    (found,) = only.map(take, stage="look", model=session.server.method.base.own(only))
    assert np.array_equal(found[columns], own[2][columns])
    assert np.array_equal(found[shared], session.server.method.base.model[shared])
    assert not np.array_equal(own[2][columns], own[1][columns])


def take(client, state, model):
    return state, np.array(model)


def test_fedbn_without_batchnorm_is_fedavg_to_the_last_bit():
    fedbn, fedavg = session_of("method=fedbn"), session_of("method=fedavg")
    reports, _ = run(fedbn, 2), run(fedavg, 2)
    assert np.array_equal(fedbn.server.method.base.model, fedavg.server.method.base.model)
    assert any("BatchNorm" in event for event in reports[0].events)
    assert not any("BatchNorm" in event for event in reports[1].events)


def test_fedbn_unseen_clients_have_the_mean_or_the_first_batchnorm():
    found = {}
    for unseen in ("mean", "initial"):
        session = session_of(
            "method=fedbn", *NORMALISED, f"fedbn.unseen={unseen}", "participation.fraction=0.5"
        )
        first, columns = session.server.method.base.model, columns_of(batch_norms(session.fleet.spec))
        run(session, 1)
        model = session.server.method.base.model
        assert np.array_equal(model[columns], first[columns]) == (unseen == "initial")
        found[unseen] = np.delete(model, columns)
    assert np.array_equal(found["mean"], found["initial"])


def test_fedbn_serves_clients_whose_inputs_differ_better_than_fedavg():
    # Each client has other tones (inverted, darker, both): the same shapes, other statistics.
    data = ("data.rotations=1", "data.colours=4", "model=cnn_fashion", "clients=4", "local.steps=6", "local.batch=16",
            "local.lr=0.05", "local.momentum=0.5", "clusters=1")  # fmt: skip
    ends = {
        method: run(session_of(f"method={method}", *data), 4)[-1].metrics["micro_accuracy"]
        for method in ("fedbn", "fedavg")
    }
    assert ends["fedbn"] > ends["fedavg"] + 0.05


def test_fedbn_refuses_what_moves_neurons_and_addons_that_need_one_model():
    with pytest.raises(Exception, match="reordered"):
        config_of("method=fedbn", "aggregation=matched")
    with refused("add-on", addon="prox", base="fedbn"):
        config_of("method=fedbn+prox")
    with refused("add-on", addon="finetune", base="fedbn"):
        config_of("method=fedbn+finetune")


def test_fedbn_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=fedbn", "model=cnn_fashion", "local.steps=1", "local.batch=8")
