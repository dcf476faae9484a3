"""pFedMe, by hand, by its limits, and in every engine."""

import numpy as np
import pytest

from archipelago.strategies.pfedme import PFedMeOptions
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, run, session_of
from tests.support.ruled import TWO, assert_engine_agrees, personal, rounds
from tests.support.scalar import method_of, scalar_fleet

SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2", "clusters=1")


def pfedme_on(fleet, **options):
    made = method_of("pfedme", fleet, options={"pfedme": PFedMeOptions(**options)}, lr=0.1).base
    made.model = np.float32([1.0])
    return made


def test_pfedme_one_round_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1, steps=2)
    pfedme = pfedme_on(fleet, lam=5.0, inner=2, eta=0.1)
    rounds(pfedme, fleet, 1)
    # Client 0, lr lambda = eta lambda = 0.5:
    #   theta: (1 + 0.2 + 0.5 * 1) / 1.5 = 1.133333, (1.133333 + 0.173333 + 0.5) / 1.5 = 1.204444; w = 1.102222
    #   theta: (1.204444 + 0.159111 + 0.551111) / 1.5 = 1.276444, (1.276444 + 0.144711 + 0.551111) / 1.5 = 1.314844;
    #   w = 1.102222 + 0.5 (1.314844 - 1.102222) = 1.208533
    # Client 1: theta: (1 - 0.6 + 0.5) / 1.5 = 0.6, (0.6 - 0.52 + 0.5) / 1.5 = 0.386667; w = 0.693333
    #   theta: (0.386667 - 0.477333 + 0.346667) / 1.5 = 0.170667, (0.170667 - 0.434133 + 0.346667) / 1.5 = 0.055467;
    #   w = 0.693333 + 0.5 (0.055467 - 0.693333) = 0.3744
    assert personal(fleet) == pytest.approx([1.3148444, 0.0554667], rel=1e-5)
    assert pfedme.model.tolist() == pytest.approx([(1.2085333 + 3 * 0.3744) / 4], rel=1e-5)


def test_pfedme_beta_is_how_far_the_server_goes():
    ends = []
    for beta in (1.0, 0.25, 2.0):
        fleet = scalar_fleet(TWO, lr=0.1, steps=2)
        pfedme = pfedme_on(fleet, beta=beta)
        rounds(pfedme, fleet, 1)
        ends.append(float(pfedme.model[0]) - 1.0)
    assert ends[1] == pytest.approx(0.25 * ends[0], rel=1e-5) and ends[2] == pytest.approx(
        2 * ends[0], rel=1e-5
    )


def test_pfedme_without_lambda_personal_models_are_local_training_and_the_global_one_stays():
    fleet, alone = scalar_fleet(TWO, lr=0.1, steps=2), scalar_fleet(TWO, lr=0.1, steps=6)
    pfedme, local = pfedme_on(fleet, lam=0.0, inner=3), method_of("local", alone).base
    local.start = np.float32([1.0])
    rounds(pfedme, fleet, 1)
    rounds(local, alone, 1)
    own = [float(state["model/model"][0]) for state in alone.snapshot()[0].values()]
    assert personal(fleet) == pytest.approx(own, rel=1e-6) and pfedme.model.tolist() == [1.0]


def test_pfedme_a_huge_lambda_keeps_personal_models_at_the_copy():
    fleet = scalar_fleet(TWO, lr=0.1, steps=2)
    rounds(pfedme_on(fleet, lam=1e6), fleet, 1)
    assert personal(fleet) == pytest.approx([1.0, 1.0], abs=1e-3)


def test_pfedme_knobs_change_the_numbers():
    ends = []
    for more in ((), ("pfedme.lam=5",), ("pfedme.inner=2",), ("pfedme.eta=0.005",), ("local.lr=0.01",)):
        session = session_of("method=pfedme", *SKEWED, *more)
        run(session, 1)
        ends.append(checkpoint_of(session).clients[0]["model/personal"])
    assert not any(np.array_equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_pfedme_personal_models_serve_skewed_clients_better_than_fedavg():
    more = ("local.steps=10", "local.lr=0.1", "model.hidden=[32]")
    own = run(session_of("method=pfedme", *SKEWED, *more), 4)[-1].metrics["macro_accuracy"]
    avg = run(session_of("method=fedavg", *SKEWED, *more), 4)[-1].metrics["macro_accuracy"]
    assert own > avg + 0.1


def test_pfedme_a_client_that_blows_up_keeps_no_personal_model():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1)
    pfedme = pfedme_on(fleet)
    rounds(pfedme, fleet, 1)
    assert fleet.snapshot()[0][1] == {} and np.isfinite(pfedme.model).all() and pfedme.model[0] > 1.0


def test_pfedme_refuses_addons_that_make_no_sense():
    for addon in ("prox", "finetune"):
        with refused("add-on", addon=addon, base="pfedme"):
            config_of(f"method=pfedme+{addon}")


@pytest.mark.parametrize("engine", ["stacked", pytest.param("trainer", marks=pytest.mark.full), "compiled"])
def test_pfedme_in_every_engine(engine):
    assert_engine_agrees(engine, "method=pfedme")


def test_pfedme_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=pfedme", "pfedme.inner=2", "participation.stragglers=0.5")
