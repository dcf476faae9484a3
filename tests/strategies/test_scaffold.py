"""SCAFFOLD, by hand, by its identities, and where its correction pays."""

import numpy as np
import pytest

from archipelago.strategies.scaffold import ScaffoldOptions
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once: gradient 2 (w - 2). Client 1 holds (2, -2) three times: gradient 8 (w + 1).
TWO = [[(1.0, 2.0)], [(2.0, -2.0)] * 3]


def scaffold_on(fleet, control="drift", **context):
    options = {"scaffold": ScaffoldOptions(control=control)}
    method = method_of("scaffold", fleet, options=options, **context)
    method.base.model = np.float32([1.0])
    return method.base


def rounds(scaffold, fleet, count, first=1):
    for number in range(first, first + count):
        scaffold.round(fleet)
        fleet.commit()
        fleet.begin(number + 1)


def controls(fleet):
    return [float(state["model/control"][0]) for _, state in sorted(fleet.snapshot()[0].items())]


def test_scaffold_two_rounds_by_hand():
    fleet = scalar_fleet(TWO, lr=0.01, steps=2)
    scaffold = scaffold_on(fleet, lr=0.01)
    rounds(scaffold, fleet, 1)
    # No controls yet. Client 0: -2, 1.02; -1.96, 1.0396. Client 1: 16, 0.84; 14.72, 0.6928.
    assert scaffold.model.tolist() == pytest.approx([(1.0396 + 3 * 0.6928) / 4], rel=1e-6)  # 0.7795
    # (4), option II: (1 - 1.0396) / (2 * 0.01) = -1.98, the mean of both gradients; (1 - 0.6928) / 0.02 = 15.36.
    assert controls(fleet) == pytest.approx([-1.98, 15.36], rel=1e-5)
    assert scaffold.control.tolist() == pytest.approx([(-1.98 + 3 * 15.36) / 4], rel=1e-5)  # 11.025
    rounds(scaffold, fleet, 1, first=2)
    # Client 0, correction 11.025 + 1.98 = 13.005, at 0.7795: -2.441 + 13.005 = 10.564, 0.67386;
    #   -2.65228 + 13.005 = 10.35272, 0.5703328.
    # Client 1, correction -4.335: 14.236 - 4.335 = 9.901, 0.68049; 13.44392 - 4.335 = 9.10892, 0.5894008.
    assert scaffold.model.tolist() == pytest.approx([(0.5703328 + 3 * 0.5894008) / 4], rel=1e-6)
    # c_i+: the mean of its own gradients again, (-2.441 - 2.65228) / 2 and (14.236 + 13.44392) / 2.
    assert controls(fleet) == pytest.approx([-2.54664, 13.83996], rel=1e-5)
    assert scaffold.control.tolist() == pytest.approx([(-2.54664 + 3 * 13.83996) / 4], rel=1e-5)


def test_scaffold_option_one_is_the_gradient_at_the_received_model():
    fleet = scalar_fleet(TWO, lr=0.01, steps=2)
    scaffold = scaffold_on(fleet, "gradient", lr=0.01)
    rounds(scaffold, fleet, 1)
    assert controls(fleet) == pytest.approx([-2.0, 16.0], rel=1e-6)
    assert scaffold.control.tolist() == pytest.approx([11.5], rel=1e-6)


def test_scaffold_controls_with_momentum_are_means_of_gradients():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.01, steps=2, momentum=0.5)
    scaffold = scaffold_on(fleet, lr=0.01, momentum=0.5)
    rounds(scaffold, fleet, 1)
    # Gradients -2 at 1 and -1.96 at 1.02, the first counting 1 + 0.5 times: (1.5 * -2 - 1.96) / 2.5.
    assert controls(fleet) == pytest.approx([-1.984], rel=1e-5)


def test_scaffold_controls_follow_the_learning_rate_of_the_round():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.01, steps=2)
    fleet.begin(1, rate=0.5)
    scaffold = scaffold_on(fleet, lr=0.01, rates=lambda number: 0.5)
    scaffold.round(fleet)
    fleet.commit()
    assert controls(fleet) == pytest.approx([(-2.0 - 1.98) / 2], rel=1e-4)  # at 1 and at 1.01


def test_scaffold_absent_clients_keep_their_controls_and_the_mean_moves_by_the_share():
    fleet = scalar_fleet(TWO, lr=0.01, steps=2)
    scaffold = scaffold_on(fleet, lr=0.01)
    some = fleet.select([0])
    scaffold.round(some)
    fleet.commit()
    states = fleet.snapshot()[0]
    assert "model/control" in states[0] and "model/control" not in states[1]
    assert scaffold.control.tolist() == pytest.approx([0.25 * -1.98], rel=1e-5)  # n_0 / (n_0 + n_1) = 1 / 4


def test_scaffold_first_round_is_fedavg_to_the_last_bit():
    same = ("local.keep_optimizer=false", "partition=dirichlet", "partition.alpha=0.5")
    scaffold, fedavg = session_of("method=scaffold", *same), session_of("method=fedavg", *same)
    run(scaffold, 1)
    run(fedavg, 1)
    assert np.array_equal(scaffold.server.method.base.model, fedavg.server.method.base.model)
    run(scaffold, 1, first=2)
    run(fedavg, 1, first=2)
    assert not np.allclose(scaffold.server.method.base.model, fedavg.server.method.base.model, atol=1e-5)


def test_scaffold_with_one_client_is_fedavg():
    # c = c_0 after every round: the correction cancels.
    one = [[(1.0, 2.0), (2.0, 1.0)]]
    ends = []
    for method in ("scaffold", "fedavg"):
        fleet = scalar_fleet(one, lr=0.02, steps=3)
        made = method_of(method, fleet, lr=0.02).base
        made.model = np.float32([1.0])
        rounds(made, fleet, 4)
        ends.append(made.model.tolist())
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.parametrize("control", ["drift", "gradient"])
def test_scaffold_finds_the_minimum_that_fedavg_drifts_from(control):
    # F_0 = (w - 2)^2 and F_1 = 4 (w + 1)^2 with equal weights: minimum at w = -0.4.
    clients = [[(1.0, 2.0)], [(2.0, -2.0)]]
    fleet = scalar_fleet(clients, lr=0.05, steps=10)
    scaffold = scaffold_on(fleet, control, lr=0.05)
    rounds(scaffold, fleet, 40)
    alone = scalar_fleet(clients, lr=0.05, steps=10)
    fedavg = method_of("fedavg", alone).base
    fedavg.model = np.float32([1.0])
    rounds(fedavg, alone, 40)
    assert float(scaffold.model[0]) == pytest.approx(-0.4, abs=1e-3)
    assert abs(float(fedavg.model[0]) + 0.4) > 0.2


def test_scaffold_with_half_of_the_clients_still_beats_the_drift():
    clients = [[(1.0, 2.0)], [(2.0, -2.0)], [(1.0, 3.0)], [(2.0, -4.0)]]
    best = (2 * 2 + 8 * -1 + 2 * 3 + 8 * -2) / 20
    ends = {}
    for method in ("scaffold", "fedavg"):
        fleet = scalar_fleet(clients, lr=0.02, steps=10)
        made = method_of(method, fleet, lr=0.02).base
        made.model = np.float32([1.0])
        away = []
        for number in range(2, 62):
            made.round(fleet.select([number % 2, 2 + (number // 2) % 2]))
            fleet.commit()
            fleet.begin(number)
            away.append(abs(float(made.model[0]) - best))
        ends[method] = np.mean(away[-20:])
    assert ends["scaffold"] < 0.1 * ends["fedavg"]


@pytest.mark.full
def test_scaffold_learns_skewed_digits_no_worse_than_fedavg():
    data = ("data.rotations=1", "partition=n_class", "partition.classes=2", "local.steps=10", "local.momentum=0",
            "local.lr=0.1", "model.hidden=[32]", "clusters=1")  # fmt: skip
    found = {}
    for method in ("scaffold", "fedavg"):
        found[method] = run(session_of(f"method={method}", *data), 8)[-1].metrics["micro_accuracy"]
    assert found["scaffold"] > 0.6 and found["scaffold"] > found["fedavg"] - 0.02


def test_scaffold_a_client_that_blows_up_keeps_its_control_and_the_others_continue():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1)
    scaffold = scaffold_on(fleet, lr=0.1)
    rounds(scaffold, fleet, 1)
    assert scaffold.model.tolist() == pytest.approx([1.2], rel=1e-6)
    assert "model/control" not in fleet.snapshot()[0][1]
    assert scaffold.control.tolist() == pytest.approx([0.5 * -2.0], rel=1e-6)


def test_scaffold_takes_prox_and_finetune_and_refuses_what_makes_no_sense():
    session = session_of("method=scaffold+prox+finetune", "prox.mu=0.5", "rounds=2")
    run(session, 2)
    plain = session_of("method=scaffold+finetune", "rounds=2")
    run(plain, 2)
    assert not np.array_equal(session.server.method.base.model, plain.server.method.base.model)
    with refused("local-optimizer", optimizer="adam"):
        config_of("method=scaffold", "local.optimizer=adam")
    config_of("method=scaffold", "local.optimizer=adam", "scaffold.control=gradient")


def test_scaffold_clients_trained_as_one_batch_get_their_own_corrections():
    settings = ("method=scaffold", "data.rotations=2", "participation.stragglers=0.5")
    loop, batched = session_of(*settings), session_of(*settings, "local.engine=stacked")
    run(loop, 3)
    run(batched, 3)
    for name in ("model", "control"):
        mine, theirs = (getattr(each.server.method.base, name) for each in (loop, batched))
        assert np.allclose(mine, theirs, rtol=0, atol=2e-4), name
    mine, theirs = checkpoint_of(loop).clients, checkpoint_of(batched).clients
    assert np.allclose(mine[3]["model/control"], theirs[3]["model/control"], rtol=0, atol=2e-3)


def test_scaffold_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=scaffold", "participation.stragglers=0.5")
