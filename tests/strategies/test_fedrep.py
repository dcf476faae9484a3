"""FedRep: heads first, then the representation under them."""

import numpy as np
import pytest

from archipelago.strategies.parts import columns_of, last_layers
from archipelago.strategies.references import Merged, Private
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, run, session_of

SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2", "clusters=1")
LAST = "fedrep.layers=1"


def heads(session):
    return columns_of(last_layers(session.fleet.spec, 1))


def test_fedrep_one_round_is_two_trainings_one_after_the_other():
    session, by_hand = (
        session_of(f"method={name}", *SKEWED, *extra)
        for name, extra in (("fedrep", (LAST, "fedrep.head_steps=5")), ("fedavg", ()))
    )
    start, fleet, columns = session.server.method.base.model, by_hand.fleet, heads(session)
    run(session, 1)
    fleet.begin(1)
    names = [entry.name for entry in last_layers(fleet.spec, 1)]
    others = [entry.name for entry in fleet.spec.entries if entry.name not in names]
    first = fleet.train(start, only=names, slot="head", steps=5, restart=True)
    second = fleet.train(first, only=others, restart=True)
    one, two = first.gather(), second.gather()
    body = np.setdiff1d(np.arange(len(start)), columns)
    # In the first phase the head alone moves, in the second all but the head.
    assert np.array_equal(one[:, body], np.tile(start[body], (8, 1))) and not np.array_equal(one[0], start)
    assert (
        np.array_equal(two[:, columns], one[:, columns]) and (two[:, body] != one[:, body]).any(axis=1).all()
    )
    assert first.steps.tolist() == [5.0] * 8 and second.steps.tolist() == [3.0] * 8
    own = checkpoint_of(session).clients
    assert all(np.array_equal(own[client]["model/personal"], two[client]) for client in range(8))
    model = session.server.method.base.model
    n = fleet.sizes / fleet.sizes.sum()
    assert np.allclose(model[body], n @ two[:, body].astype(np.float64), atol=1e-6)
    assert np.array_equal(model[columns], start[columns])
    assert not [key for key in own[0] if key.startswith("optimizer/")]


def test_fedrep_without_steps_on_the_head_trains_the_representation_under_the_first_one():
    session = session_of("method=fedrep", *SKEWED, LAST, "fedrep.head_steps=0")
    start, columns = session.server.method.base.model, heads(session)
    run(session, 2)
    for state in checkpoint_of(session).clients.values():
        assert np.array_equal(state["model/personal"][columns], start[columns])
    assert not np.array_equal(session.server.method.base.model, start)


def test_fedrep_head_steps_and_layers_change_the_numbers():
    ends = []
    for more in ((LAST,), (LAST, "fedrep.head_steps=1"), ("fedrep.layers=2",)):
        session = session_of("method=fedrep", *SKEWED, "model.hidden=[8,8]", *more)
        run(session, 2)
        ends.append(session.server.method.base.model)
    assert not any(np.array_equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_fedrep_whose_network_is_all_head_is_local_training():
    same = (*SKEWED, "local.batch=2000", "local.momentum=0")  # whole batches: both phases draw their own
    fedrep, local = session_of("method=fedrep", *same), session_of("method=local", *same)
    run(fedrep, 2), run(local, 2)
    own, alone = checkpoint_of(fedrep).clients, checkpoint_of(local).clients
    for client, state in own.items():
        assert np.allclose(state["model/personal"], alone[client]["model/model"], rtol=0, atol=1e-6)


def test_fedrep_weight_decay_leaves_what_is_held_still():
    session = session_of("method=fedrep", *SKEWED, LAST, "fedrep.head_steps=0", "local.weight_decay=0.1")
    start, columns = session.server.method.base.model, heads(session)
    run(session, 1)
    assert np.array_equal(checkpoint_of(session).clients[0]["model/personal"][columns], start[columns])


def test_fedrep_serves_skewed_clients_better_than_fedavg():
    more = ("local.steps=10", "local.lr=0.1", "model.hidden=[32]", "local.momentum=0.5")
    rep = run(session_of("method=fedrep", *SKEWED, LAST, *more), 5)[-1].metrics["macro_accuracy"]
    avg = run(session_of("method=fedavg", *SKEWED, *more), 5)[-1].metrics["macro_accuracy"]
    assert rep > avg + 0.1


def test_fedrep_clients_that_never_took_part_learn_a_head_before_they_predict():
    found = {}
    for new in ("true", "false"):
        settings = ("method=fedrep", *SKEWED, LAST, "participation.fraction=0.25", f"fedrep.new_heads={new}")
        session = session_of(*settings, "local.steps=10", "local.lr=0.1")
        report = session.run_round(1)
        seen = session.server.method.base.seen
        assert seen.sum() == 2
        found[new] = report.clients["accuracy"]
        states = checkpoint_of(session).clients
        assert [("model/personal" in states[client]) for client in range(8)] == (seen == 1).tolist()
    assert np.array_equal(found["true"][seen == 1], found["false"][seen == 1])
    assert found["true"][seen == 0].mean() > found["false"][seen == 0].mean() + 0.2


def test_fedrep_costs_two_trainings_and_moves_what_fedavg_moves():
    session = session_of("method=fedrep", *SKEWED, LAST, "local.batch=16", "fedrep.head_steps=6")
    found = run(session, 2)[-1].metrics
    assert (found["cost_models_down"], found["cost_models_up"], found["cost_models_stored"]) == (
        1.0,
        1.0,
        2.0,
    )
    assert found["cost_gradients"] == (6 + 3) * 16 and found["cost_computation"] == 3.0


def test_fedrep_says_when_there_is_nothing_to_share():
    session = session_of("method=fedrep", *SKEWED)  # an mlp is all head
    start = session.server.method.base.model
    report = session.run_round(1)
    assert any("shares nothing" in event for event in report.events)
    assert np.array_equal(session.server.method.base.model, start)
    assert len(checkpoint_of(session).clients[0]["model/personal"]) == len(start)


@pytest.mark.parametrize("engine", ["stacked", "trainer"])
def test_fedrep_holds_tensors_still_in_every_engine(engine):
    settings = ("method=fedrep", *SKEWED, LAST, "local.weight_decay=0.01")
    loop, other = session_of(*settings), session_of(*settings, f"local.engine={engine}")
    run(loop, 2)
    run(other, 2)
    mine, theirs = (each.server.method.base.model for each in (loop, other))
    tolerance = 0.0 if engine == "trainer" else 1e-4
    assert np.allclose(mine, theirs, rtol=0, atol=tolerance)


def test_fedrep_falls_back_to_loop_in_the_compiled_engine_and_says_so():
    loop, compiled = (
        session_of("method=fedrep", *SKEWED, LAST, f"local.engine={each}") for each in ("loop", "compiled")
    )
    run(loop, 1)
    reports = run(compiled, 1)
    assert np.allclose(loop.server.method.base.model, compiled.server.method.base.model, rtol=0, atol=1e-5)
    assert any("loop" in event for event in reports[0].events)


def test_fedrep_refuses_addons_that_need_one_model():
    with refused("add-on", addon="prox", base="fedrep"):
        config_of("method=fedrep+prox")
    with pytest.raises(Exception, match="reordered"):
        config_of("method=fedrep", "aggregation=matched")


def test_fedrep_predicts_with_the_representation_under_its_own_head():
    session = session_of("method=fedrep", *SKEWED, LAST)
    run(session, 1)
    base = session.server.method.base
    session.fleet.begin(2)
    reference = Merged(base.model, Private("personal", default=base.model), heads(session))
    expected = session.fleet.everyone.derive(reference, slot="look").gather()
    found = session.fleet.everyone.derive(
        base.prediction(session.fleet.everyone).models[0], slot="own"
    ).gather()
    assert np.array_equal(expected, found)


def test_fedrep_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=fedrep", LAST, "participation.stragglers=0.5")
