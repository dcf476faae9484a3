"""FedSGD, by hand; it is FedAvg of one full-batch step without momentum."""

import numpy as np
import pytest

from archipelago.core.errors import ClientFailure
from archipelago.core.settings import AggregationSettings
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once, client 1 holds (1, -2) three times: gradients 2 (w - 2) and 2 (w + 2).
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
LOST = [[(1.0, 2.0)], [(1e30, 1.0)]]  # client 1's loss overflows


def after_one_round(samples, **context):
    fleet = scalar_fleet(samples)
    fedsgd = method_of("fedsgd", fleet, **context)
    fedsgd.base.model = np.float32([1.0])
    fedsgd.base.round(fleet)
    return fedsgd


def test_one_round_by_hand():
    # g_0 = 2 (1 - 2) = -2, g_1 = 2 (1 + 2) = 6, mean (1 * -2 + 3 * 6) / 4 = 4, w = 1 - 0.1 * 4 = 0.6
    fedsgd = after_one_round(TWO, lr=0.1)
    assert fedsgd.base.model.tolist() == pytest.approx([0.6], rel=1e-6)
    # losses (1 - 2)^2 = 1 and (1 + 2)^2 = 9: (1 * 1 + 3 * 9) / 4
    assert fedsgd.report["federated_objective"] == pytest.approx(7.0, rel=1e-6)


def test_weights_and_learning_rate_count():
    assert after_one_round(TWO, lr=0.05).base.model.tolist() == pytest.approx([0.8], rel=1e-6)
    # uniform: mean (-2 + 6) / 2 = 2
    assert after_one_round(TWO, lr=0.1, weights="uniform").base.model.tolist() == pytest.approx(
        [0.8], rel=1e-6
    )


def test_it_is_fedavg_of_one_full_batch_step_without_momentum():
    data = ("partition=dirichlet", "partition.alpha=1.0", "local.lr=0.5")
    sgd = session_of("method=fedsgd", *data)
    avg = session_of("method=fedavg", *data, "local.steps=1", "local.batch=2000", "local.momentum=0")
    start = sgd.server.method.base.model
    run(sgd, 3)
    run(avg, 3)
    assert np.allclose(sgd.server.method.base.model, avg.server.method.base.model, rtol=0, atol=1e-6)
    assert np.abs(sgd.server.method.base.model - start).max() > 0.01


def test_rule_for_odd_clients_applies_to_the_gradients():
    # Gradients at w = 1: -2, 6 and 2 (1 - 100) = -198; their median moves to 1.2, their mean to 1 + 0.1 * 194 / 3.
    three = [[(1.0, 2.0)], [(1.0, -2.0)], [(1.0, 100.0)]]
    median = after_one_round(three, lr=0.1, aggregation=AggregationSettings(name="median"))
    assert median.base.model.tolist() == pytest.approx([1.2], rel=1e-6)
    assert after_one_round(three, lr=0.1).base.model.tolist() == pytest.approx([7.4666667], rel=1e-6)


def test_length_of_a_training_does_not_matter():
    plain = session_of("method=fedsgd")
    other = session_of("method=fedsgd", "local.steps=7", "local.batch=3")  # what costs are multiples of
    run(plain, 2)
    run(other, 2)
    assert np.array_equal(plain.server.method.base.model, other.server.method.base.model)


def test_other_local_settings_are_refused() -> None:
    with refused("unread", says="method=fedsgd", setting="local.momentum"):
        session_of("method=fedsgd", "local.momentum=0.5")


def test_it_descends_on_digits():
    reports = run(session_of("method=fedsgd", "data.rotations=1", "model.hidden=[32]", "local.lr=0.5"), 12)
    objective = [report.metrics["federated_objective"] for report in reports]
    assert objective == sorted(objective, reverse=True) and objective[-1] < 0.8 * objective[0]
    assert reports[-1].metrics["micro_accuracy"] > 0.5


def test_gradient_that_is_not_finite_is_dropped_by_name():
    fleet = scalar_fleet(LOST)
    fedsgd = method_of("fedsgd", fleet, lr=0.1)
    fedsgd.base.model = np.float32([1.0])
    fedsgd.base.round(fleet)
    assert fedsgd.base.model.tolist() == pytest.approx([1.2], rel=1e-6)  # client 0 alone: 1 + 0.1 * 2
    assert fleet.dropped == {1}
    assert fleet.events == [
        "Round 1: dropped client 1 from the gradients: its loss or its gradient was not finite."
    ]


def test_gradient_that_is_not_finite_stops_the_run_where_the_setting_says_so():
    fleet = scalar_fleet(LOST)
    fleet.not_finite = "stop"
    fedsgd = method_of("fedsgd", fleet, lr=0.1)
    with pytest.raises(ClientFailure, match=r"Client 1 failed in round 1 during the gradients: .*not finite"):
        fedsgd.base.round(fleet)


def test_model_stays_where_it_is_if_nobody_delivers():
    fedsgd = after_one_round([LOST[1], LOST[1]])
    assert fedsgd.base.model.tolist() == [1.0] and "federated_objective" not in fedsgd.report


def test_batch_norm_keeps_its_first_statistics_and_the_run_says_so():
    session = session_of("method=fedsgd", "model=cnn_fashion", "clients=4", "partition.min_size=1")
    start = session.server.method.base.model
    reports = run(session, 2)
    buffers = session.fleet.spec.columns("buffers")
    assert np.array_equal(session.server.method.base.model[buffers], start[buffers])
    assert not np.array_equal(session.server.method.base.model, start)
    assert "running statistics" in reports[0].events[0] and reports[1].events == []


def test_what_makes_no_sense_with_gradients_is_refused():
    fleet = scalar_fleet(TWO)
    with refused("aggregation", says="method=fedsgd", rule="matched"):
        method_of("fedsgd", fleet, aggregation=AggregationSettings(name="matched"))
    with refused("add-on", addon="prox", base="fedsgd"):
        method_of("fedsgd+prox", fleet).round(fleet)


def test_models_are_values_that_nobody_can_write_to():
    fedsgd = after_one_round(TWO)
    with pytest.raises(ValueError, match="read-only"):
        fedsgd.base.model[0] = 3.0


def test_same_bits_everywhere():
    assert_same_bits_everywhere("method=fedsgd")
