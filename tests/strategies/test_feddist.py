"""FedDist and FedDWS, by hand; a whole step is FedAvg."""

import numpy as np
import pytest

from archipelago.strategies.feddist import ReptileOptions
from tests.support.equality import assert_same_bits_everywhere
from tests.support.experiments import outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2) once, client 1 holds (1, -2) three times: one step from w = 1 gives 1.2 and 0.4.
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
UNEQUAL = ("partition=dirichlet", "partition.alpha=1.0")  # clients of different sizes


def after_one_round(method, samples=TWO, options=None, **context):
    fleet = scalar_fleet(samples, lr=0.1)
    strategy = method_of(method, fleet, options={} if options is None else {method: options}, **context)
    strategy.base.model = np.float32([1.0])
    strategy.base.round(fleet)
    return strategy.base.model.tolist()


def test_one_round_by_hand():
    # Plain mean 0.8: 1 + 0.6 (0.8 - 1) = 0.88. Weighted mean (1.2 + 3 * 0.4) / 4 = 0.6: 1 + 0.6 (0.6 - 1) = 0.76.
    assert after_one_round("feddist") == pytest.approx([0.88], rel=1e-6)
    assert after_one_round("feddws") == pytest.approx([0.76], rel=1e-6)


def test_epsilon_changes_the_numbers():
    quarter = ReptileOptions(epsilon=0.25)
    assert after_one_round("feddist", options=quarter) == pytest.approx([0.95], rel=1e-6)
    assert after_one_round("feddws", options=quarter) == pytest.approx([0.9], rel=1e-6)


def test_whole_step_of_feddist_is_uniform_fedavg():
    dist = session_of("method=feddist", "feddist.epsilon=1", *UNEQUAL)
    uniform = session_of("method=fedavg", "weights=uniform", *UNEQUAL)
    sized = session_of("method=fedavg", *UNEQUAL)
    expected = outcome(uniform, run(uniform, 3))
    assert outcome(dist, run(dist, 3)) == expected != outcome(sized, run(sized, 3))


def test_whole_step_of_feddws_is_fedavg():
    dws, fedavg = (
        session_of("method=feddws", "feddws.epsilon=1", *UNEQUAL),
        session_of("method=fedavg", *UNEQUAL),
    )
    assert outcome(dws, run(dws, 3)) == outcome(fedavg, run(fedavg, 3))


def test_with_uniform_weights_both_are_one_and_feddist_ignores_the_setting():
    made = [
        session_of(*settings, *UNEQUAL)
        for settings in (("method=feddist",), ("method=feddist", "weights=uniform"),
                         ("method=feddws", "weights=uniform"), ("method=feddws",))
    ]  # fmt: skip
    dist, dist_uniform, dws_uniform, dws = [outcome(session, run(session, 2)) for session in made]
    assert dist == dist_uniform == dws_uniform != dws


@pytest.mark.parametrize("method", ["feddist", "feddws"])
def test_server_goes_that_share_of_the_way(method):
    whole, part = (session_of(f"method={method}", f"{method}.epsilon={e}", *UNEQUAL) for e in (1, 0.3))
    start = whole.server.method.base.model
    run(whole, 1)
    run(part, 1)
    ratio = (part.server.method.base.model - start) / (whole.server.method.base.model - start)
    moved = np.abs(whole.server.method.base.model - start) > 1e-3
    assert moved.any() and np.allclose(ratio[moved], 0.3, atol=1e-3)
    assert not np.shares_memory(part.server.method.base.model, start)


@pytest.mark.parametrize("method", ["feddist", "feddws"])
def test_it_learns_iid_digits(method):
    session = session_of(
        f"method={method}", "data.rotations=1", "local.steps=10", "local.lr=0.1", "model.hidden=[32]"
    )
    reports = run(session, 10)
    assert reports[-1].metrics["micro_accuracy"] > 0.85 > reports[0].metrics["micro_accuracy"]


@pytest.mark.parametrize("method", ["feddist", "feddws"])
def test_lost_clients_pull_nothing(method):
    lost = [(1e30, 1.0)] * 9
    assert after_one_round(method, [[(1.0, 2.0)], lost]) == pytest.approx([1.12], rel=1e-6)  # 1 + 0.6 * 0.2
    assert after_one_round(method, [lost, lost]) == [1.0]


@pytest.mark.parametrize("method", ["feddist", "feddws"])
def test_same_bits_everywhere(method):
    assert_same_bits_everywhere(f"method={method}")
