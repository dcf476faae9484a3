"""APFL, by hand, by alpha = 0 and alpha = 1, and in every engine."""

import numpy as np
import pytest

from archipelago.strategies.apfl import APFLOptions
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, run, session_of
from tests.support.ruled import TWO, assert_engine_agrees, personal, rounds
from tests.support.scalar import method_of, scalar_fleet

SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2", "clusters=1")


def apfl_on(fleet, momentum=0.0, **options):
    context = {"lr": 0.1, "momentum": momentum}
    made = method_of("apfl", fleet, options={"apfl": APFLOptions(**options)}, **context).base
    made.model = np.float32([1.0])
    return made


def test_apfl_two_rounds_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1, steps=2)
    apfl = apfl_on(fleet, adaptive=True)
    rounds(apfl, fleet, 1)
    # w_0: 1.2, 1.36. v_0: at the mixture 1 the gradient is -2, halved by alpha: 1.1; at (1.1 + 1.2) / 2: 1.185.
    # w_1: 0.4, -0.08. v_1: 6 halved: 0.7; at (0.7 + 0.4) / 2 5.1 halved: 0.445.
    assert personal(fleet) == pytest.approx([1.185, 0.445], rel=1e-5)
    assert apfl.model.tolist() == pytest.approx([0.28], rel=1e-5)  # FedAvg's
    assert apfl.alpha.tolist() == [0.5, 0.5]  # v = w at the beginning: nothing to learn
    mixtures = fleet.derive(apfl.prediction(fleet).models[0], slot="look").gather()
    assert mixtures[:, 0].tolist() == pytest.approx([(1.185 + 0.28) / 2, (0.445 + 0.28) / 2], rel=1e-5)
    rounds(apfl, fleet, 1, first=2)
    # 0.5 - 0.1 (1.185 - 0.28) 2 (0.7325 - 2) and 0.5 - 0.1 (0.445 - 0.28) 2 (0.3625 + 2)
    assert apfl.alpha.tolist() == pytest.approx([0.7294175, 0.4220375], rel=1e-5)


def test_apfl_momentum_of_the_personal_model_starts_from_zero_in_every_round():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, steps=2, momentum=0.5)
    rounds(apfl_on(fleet, momentum=0.5), fleet, 1)
    # Half of -2: 1.1. Then w is 1.2, the mixture 1.15, half of -1.7 plus half of the -1 before: 1.1 + 0.135.
    assert personal(fleet) == pytest.approx([1.235], rel=1e-5)


def test_apfl_the_global_model_is_that_of_fedavg_to_the_last_bit():
    apfl, fedavg = session_of("method=apfl", *SKEWED), session_of("method=fedavg", *SKEWED)
    run(apfl, 3)
    run(fedavg, 3)
    assert np.array_equal(apfl.server.method.base.model, fedavg.server.method.base.model)


def test_apfl_alpha_zero_is_fedavg_and_alpha_one_local_training():
    same = (*SKEWED, "local.momentum=0")
    fedavg, local = (run(session_of(f"method={name}", *same), 3)[-1] for name in ("fedavg", "local"))
    for alpha, other in ((0.0, fedavg), (1.0, local)):
        report = run(session_of("method=apfl", f"apfl.alpha={alpha}", *same), 3)[-1]
        assert report.clients["loss"].tolist() == pytest.approx(other.clients["loss"].tolist(), rel=1e-4)
    assert fedavg.clients["loss"].mean() != pytest.approx(local.clients["loss"].mean(), rel=1e-2)


@pytest.mark.full
def test_apfl_clients_that_differ_learn_a_larger_alpha():
    more = ("apfl.adaptive=true", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "local.momentum=0.5")
    alike = session_of("method=apfl", "data.rotations=1", "clusters=1", *more)
    skewed = session_of("method=apfl", *SKEWED, *more)
    run(alike, 5)
    run(skewed, 5)
    assert skewed.server.method.base.alpha.mean() > alike.server.method.base.alpha.mean() + 0.05


def test_apfl_serves_skewed_clients_better_than_fedavg():
    more = ("local.steps=10", "local.lr=0.1", "model.hidden=[32]", "local.momentum=0.5")
    own = run(session_of("method=apfl", *SKEWED, *more), 4)[-1].metrics["macro_accuracy"]
    avg = run(session_of("method=fedavg", *SKEWED, *more), 4)[-1].metrics["macro_accuracy"]
    assert own > avg + 0.1


def test_apfl_a_client_that_never_took_part_predicts_with_the_global_model():
    session = session_of("method=apfl", "participation.fraction=0.25")
    report = session.run_round(1)
    states = checkpoint_of(session).clients
    assert sum("model/personal" in state for state in states.values()) == 2
    fedavg = session_of("method=fedavg", "participation.fraction=0.25").run_round(1)
    for client, state in states.items():
        same = report.clients["loss"][client] == pytest.approx(fedavg.clients["loss"][client], rel=1e-5)
        assert same == ("model/personal" not in state)


def test_apfl_prox_enters_both_gradients_and_finetune_is_refused():
    plain, pulled = session_of("method=apfl", *SKEWED), session_of("method=apfl+prox", "prox.mu=2", *SKEWED)
    run(plain, 1)
    run(pulled, 1)
    one, two = (checkpoint_of(each).clients[0]["model/personal"] for each in (plain, pulled))
    assert not np.array_equal(one, two)
    with refused("add-on", addon="finetune", base="apfl"):
        config_of("method=apfl+finetune")


@pytest.mark.parametrize("engine", ["stacked", "trainer", "compiled"])
def test_apfl_in_every_engine(engine):
    assert_engine_agrees(engine, "method=apfl", "apfl.adaptive=true", "local.momentum=0.5")


def test_apfl_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=apfl", "apfl.adaptive=true", "participation.stragglers=0.5")
