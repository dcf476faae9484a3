"""FedSoft, by hand, by its identities, and on FedSoft's own synthetic mixtures."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from archipelago.core.settings import AggregationSettings
from archipelago.strategies.fedsoft import FedSoftOptions, importance
from archipelago.strategies.penalties import ProximalToMixture
from archipelago.strategies.references import Mixture, Models, Prediction
from tests.support.experiments import checkpoint_of, digest, outcome, run, session_of
from tests.support.mixtures import error_up_to_permutation, mixed_session, ten_ninety
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds three samples, two of which want w = 2; client 1 has one that wants w = -2.
TWO = [[(1.0, 2.0), (1.0, 2.0), (1.0, -2.0)], [(1.0, -2.0)]]


def fedsoft_of(fleet, centres=(-1.0, 1.0), start=0.5, **options):
    options = {"lam": 0.6, "select": 0, **options}
    made = method_of("fedsoft", fleet, clusters=len(centres), options={"fedsoft": FedSoftOptions(**options)})
    made.base.clusters = Models(np.float32([[centre] for centre in centres]))
    made.base.start = np.float32([start])
    return made


def a_round(fedsoft, fleet, number=1):
    fleet.begin(number)
    fedsoft.round(fleet, number)
    fleet.commit()


def own_models(fleet):
    return {
        i: float(state["model/model"][0])
        for i, state in fleet.snapshot()[0].items()
        if "model/model" in state
    }


def test_two_rounds_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1)
    fedsoft = fedsoft_of(fleet)
    a_round(fedsoft, fleet)
    # Squared errors of y = 2 are 9 and 1, of y = -2 they are 1 and 9; client 1 has none nearest to centre 1.
    assert fedsoft.base.mixture == pytest.approx(np.array([[1 / 3, 2 / 3], [1.0, 1e-4]]))
    assert fedsoft.base.assignment.tolist() == [1, 0]
    # Client 0: f' = 2 (0.5 - 2/3) = -1/3, pull 0.6 (1/3 * 1.5 - 2/3 * 0.5) = 0.1, w = 0.5 + 0.0233333.
    # Client 1: f' = 2 (0.5 + 2) = 5, pull 0.6 (1 * 1.5 - 1e-4 * 0.5) = 0.89997, w = 0.5 - 0.589997.
    assert own_models(fleet) == pytest.approx({0: 0.5233333, 1: -0.089997}, rel=1e-5)
    # u_ks n_k: centre 0 has 1/3 * 3 = 1 and 1 * 1 = 1, centre 1 has 2 and 1e-4.
    expected = [(0.5233333 - 0.089997) / 2, (2 * 0.5233333 - 1e-4 * 0.089997) / 2.0001]
    assert fedsoft.base.clusters.values.ravel().tolist() == pytest.approx(expected, rel=1e-5)
    assert fedsoft.records["u"]["client"].tolist() == [0, 1]
    assert fedsoft.records["u"]["u_1"].tolist() == pytest.approx([2 / 3, 1e-4])
    c = fedsoft.base.clusters.values.ravel().astype(float)
    a_round(fedsoft, fleet, 2)
    # tau = 2: u is last round's. Client 0 continues from its own 0.5233333, towards the new centres.
    assert fedsoft.base.mixture == pytest.approx(np.array([[1 / 3, 2 / 3], [1.0, 1e-4]]))
    w = 0.5233333
    gradient = 2 * (w - 2 / 3) + 0.6 * (1 / 3 * (w - c[0]) + 2 / 3 * (w - c[1]))
    assert own_models(fleet)[0] == pytest.approx(w - 0.1 * gradient, rel=1e-5)
    a_round(fedsoft, fleet, 3)
    # Counted anew, with the same outcome: the lower centre is still nearer to -2, the higher one to 2.
    assert fedsoft.base.mixture == pytest.approx(np.array([[1 / 3, 2 / 3], [1.0, 1e-4]]))


def test_drawn_centre_is_the_plain_mean_of_its_clients_and_each_client_trains_once():
    # Client 0 is all for centre 1, clients 1 and 2 all for centre 0: with a tiny sigma the draw is no chance.
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)] * 3, [(1.0, -4.0)]], lr=0.1)
    fedsoft = fedsoft_of(fleet, select=1, sigma=1e-12, lam=0.0)
    a_round(fedsoft, fleet)
    own = own_models(fleet)
    assert len(own) == 2 and fedsoft.report["trained"] == 2
    drawn = 1 if 1 in own else 2
    assert fedsoft.base.clusters.values.ravel().tolist() == pytest.approx([own[drawn], own[0]], rel=1e-6)
    # Two of three each: the union is everyone, centre 0 the plain mean of clients 1 and 2 although n differs.
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)] * 3, [(1.0, -4.0)]], lr=0.1)
    fedsoft = fedsoft_of(fleet, select=2, sigma=1e-12, lam=0.0)
    a_round(fedsoft, fleet)
    own = own_models(fleet)
    assert len(own) == 3 and fedsoft.base.clusters[0][0] == pytest.approx((own[1] + own[2]) / 2, rel=1e-6)


@pytest.mark.parametrize("select", [0, 3])
def test_median_takes_the_drawn_clients_or_those_that_weigh_the_centre_most(select):
    # Clients 0 to 2 are all for centre 0, client 3 for centre 1; a step of 0.1 from 0 goes to 0.2 y.
    fleet = scalar_fleet([[(1.0, -1.0)], [(1.0, -2.0)], [(1.0, -90.0)], [(1.0, 5.0)]], lr=0.1)
    fedsoft = method_of(
        "fedsoft",
        fleet,
        clusters=2,
        aggregation=AggregationSettings(name="median"),
        options={"fedsoft": FedSoftOptions(select=select, sigma=1e-12, lam=0.0)},
    )
    fedsoft.base.clusters, fedsoft.base.start = Models(np.float32([[-1.0], [1.0]])), np.float32([0.0])
    a_round(fedsoft, fleet)
    found = fedsoft.base.clusters.values.ravel().tolist()
    assert found[0] == pytest.approx(-0.4)
    if select == 0:
        assert found[1] == pytest.approx(1.0)
    else:  # client 3 and two of the others: the middle one is the higher of those two
        assert found[1] in (pytest.approx(-0.2), pytest.approx(-0.4))


def test_clients_are_drawn_without_replacement_by_v():
    fleet = scalar_fleet(TWO)
    fedsoft = fedsoft_of(fleet, select=2)
    v = np.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    counts = np.zeros_like(v)
    for number in range(1, 601):
        fedsoft.base.number = number
        drawn = fedsoft.base.draw(v)
        assert (drawn.sum(axis=1) == 2).all() and set(np.unique(drawn)) == {0.0, 1.0}
        counts += drawn
    # P(0 among two) = 0.7 + 3 * 0.1 * 0.7 / 0.9; 600 draws have a standard deviation of about 0.011.
    assert counts[0, 0] / 600 == pytest.approx(0.7 + 0.3 * 0.7 / 0.9, abs=0.05)
    assert counts[1] / 600 == pytest.approx(np.full(4, 0.5), abs=0.09)


def test_importance_counts_samples_breaks_ties_low_and_ignores_losses_that_are_not_finite():
    losses = np.float32([[1, 1, 2], [5, 4, 3], [np.nan, 9, np.inf], [0, 7, 7]])
    client = SimpleNamespace(size=4, sample_losses=lambda centres: losses)
    state, u = importance(client, {"kept": 1}, np.zeros((3, 1), np.float32), 0.01)
    assert u.tolist() == [0.5, 0.25, 0.25] and state == {"kept": 1}
    _, u = importance(client, {}, np.zeros((4, 1), np.float32), 0.01)
    assert u.tolist() == [0.5, 0.25, 0.25, 0.01]


def test_one_centre_has_u_one_and_v_by_size(monkeypatch):
    fleet, seen = scalar_fleet(TWO), []
    fedsoft = fedsoft_of(fleet, centres=(0.3,))
    monkeypatch.setattr(fedsoft.base, "draw", lambda v: seen.append(v) or v)
    a_round(fedsoft, fleet)
    assert fedsoft.base.mixture.tolist() == [[1.0], [1.0]] and seen[0].tolist() == [[0.75, 0.25]]


def test_one_centre_started_from_itself_is_fedprox_and_without_pull_fedavg():
    for other, lam in (("fedprox", 0.7), ("fedavg", 0.0)):
        more = ["fedprox.mu=0.7"] if other == "fedprox" else []
        plain = session_of(f"method={other}", "clusters=1", *more)
        soft = session_of(
            "method=fedsoft",
            "clusters=1",
            f"fedsoft.lam={lam}",
            "fedsoft.init_from=mixture",
            "fedsoft.select=0",
        )
        run(plain, 3)
        run(soft, 3)
        assert digest(soft.server.method.base.clusters[0]) == digest(plain.server.method.base.model)


def test_without_pull_the_own_models_are_those_of_local_training():
    soft, local = session_of("method=fedsoft", "fedsoft.lam=0"), session_of("method=local")
    soft.server.method.base.start = local.server.method.base.start
    run(soft, 3)
    run(local, 3)
    models = [
        {i: state["model/model"] for i, state in checkpoint_of(session).clients.items()}
        for session in (soft, local)
    ]
    assert digest(models[0]) == digest(models[1])


def test_permuting_the_centres_permutes_the_result():
    straight, turned = session_of("method=fedsoft"), session_of("method=fedsoft")
    strategy = turned.server.method
    strategy.base.clusters = Models(strategy.base.clusters.values[::-1].copy())
    run(straight, 3)
    run(turned, 3)
    assert np.array_equal(straight.server.method.base.mixture, strategy.base.mixture[:, ::-1])
    assert straight.server.method.base.clusters.values == pytest.approx(
        strategy.base.clusters.values[::-1], abs=1e-5
    )


@pytest.mark.parametrize(
    "option", [{"lam": 0.9}, {"sigma": 0.3}, {"tau": 1}, {"select": 1}, {"init_from": "mixture"}]
)
def test_every_option_changes_the_numbers(option):
    found = []
    for options in ({}, option):
        fleet = scalar_fleet([[(1.0, y) for y in (2.0, 0.8, 0.6, 0.3, -2.0)], [(1.0, -2.0)]], lr=0.2)
        fedsoft = fedsoft_of(fleet, centres=(-0.2, 3.0), **options)
        for number in (1, 2, 3):
            a_round(fedsoft, fleet, number)
        found.append(fedsoft.base.clusters.values.ravel().tolist())
    assert found[0] != pytest.approx(found[1], rel=1e-6)


def test_gradient_of_the_penalty_is_its_finite_difference():
    theta = torch.linspace(-1, 2, 5, dtype=torch.float64).requires_grad_()
    centres = torch.stack([torch.linspace(3, 0, 5), torch.ones(5)]).double()
    anchors = {"centres": centres, "importance": torch.tensor([0.2, 0.9], dtype=torch.float64)}
    penalty = ProximalToMixture(0.7, None, None)
    (gradient,) = torch.autograd.grad(penalty.value(theta, anchors), theta)
    # (5): lambda (sum_s u_s theta - sum_s u_s c_s)
    by_hand = 0.7 * (1.1 * theta - 0.2 * centres[0] - 0.9 * centres[1])
    assert gradient.tolist() == pytest.approx(by_hand.tolist())
    step = 1e-6
    for i in range(5):
        move = torch.zeros(5, dtype=torch.float64)
        move[i] = step
        slope = (penalty.value(theta + move, anchors) - penalty.value(theta - move, anchors)) / (2 * step)
        assert float(slope.detach()) == pytest.approx(float(gradient[i]), rel=1e-6)
    assert float(gradient.abs().min()) > 0


def test_mixture_of_the_centres_is_a_weighted_mean():
    fleet = scalar_fleet([[(1.0, 0.0)], [(1.0, 0.0)]], lr=0.1)
    centres = Models(np.float32([[1.0], [5.0]]))
    theta = fleet.train(start=Mixture(centres, np.array([[1.0, 1.0], [0.0, 1.0]])))
    assert theta.gather().ravel().tolist() == pytest.approx([3.0 * 0.8, 5.0 * 0.8])  # w - 0.1 * 2 w


def test_batched_training_gives_the_same_numbers():
    loop, batched = (session_of("method=fedsoft", f"local.engine={name}") for name in ("loop", "stacked"))
    run(loop, 2)
    run(batched, 2)
    found, expected = (s.server.method.base.clusters.values for s in (batched, loop))
    assert np.abs(found - expected).max() < 1e-4


def test_no_two_clients_or_centres_share_a_model():
    session = session_of("method=fedsoft", "clusters=3", "fedsoft.select=3")
    run(session, 4)
    own = [s["model/model"] for s in checkpoint_of(session).clients.values() if "model/model" in s]
    values = [*own, *session.server.method.base.clusters.values, session.server.method.base.start]
    assert len(own) > 3 and len({value.tobytes() for value in values}) == len(values)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(values) for b in values[:i])


def test_centre_that_no_sample_prefers_draws_by_size_and_says_so(monkeypatch):
    fleet, seen = scalar_fleet(TWO), []
    fedsoft = fedsoft_of(fleet, centres=(0.0, 500.0))
    monkeypatch.setattr(fedsoft.base, "draw", lambda v: seen.append(v) or v)
    a_round(fedsoft, fleet)
    assert seen[0][1].tolist() == pytest.approx([0.75, 0.25])
    assert any("Centre 1 is the best one for no sample" in event for event in fedsoft.events)
    assert np.isfinite(fedsoft.base.clusters.values).all() and fedsoft.base.clusters[1][0] < 5


def test_drawing_more_clients_than_there_are_weighs_everyone_and_says_so():
    all_of_them, informed = session_of("method=fedsoft", "fedsoft.select=0"), session_of("method=fedsoft")
    first, second = run(all_of_them, 2), run(informed, 2)
    assert outcome(all_of_them, first) == outcome(informed, second)
    assert any("covers all 8 clients" in event for event in second[0].events)
    assert not any("covers all" in event for event in [*first[0].events, *second[1].events])


def test_client_that_blows_up_feeds_no_centre_and_predicts_with_one():
    fleet = scalar_fleet([*TWO, [(1e25, 1.0)]], lr=0.1)
    fedsoft = fedsoft_of(fleet)
    a_round(fedsoft, fleet)
    assert np.isfinite(fedsoft.base.clusters.values).all() and set(own_models(fleet)) == {0, 1}
    fleet.begin(2)
    assert np.isfinite(fleet.evaluate(fedsoft.prediction(fleet))["mse"][:2]).all()


def test_clients_never_seen_predict_with_the_centre_of_largest_weight():
    session = session_of("method=fedsoft", "participation.fraction=0.25", "fedsoft.select=1")
    report = session.run_round(1)
    strategy, fleet = session.server.method, session.fleet
    seen = ~np.isnan(strategy.base.mixture[:, 0])
    assert seen.sum() == 2 and (strategy.base.assignment[~seen] == -1).all()
    assert strategy.records["u"]["client"].tolist() == np.flatnonzero(seen).tolist()
    fleet.begin(2)
    everyone = fleet.everyone
    weights = strategy.base.weights(everyone)
    by_hand = strategy.base.clusters[weights.argmax(axis=1)]
    accuracy = everyone.evaluate(strategy.prediction(everyone))["accuracy"]
    expected = everyone.evaluate(Prediction([by_hand]))["accuracy"]
    assert np.array_equal(accuracy[~seen], expected[~seen])
    assert digest(accuracy) == digest(report.clients["accuracy"])
    assert np.isnan(strategy.base.mixture[~seen]).all()  # measured for the moment only


def test_client_that_comes_between_two_estimations_is_asked_at_once():
    session = session_of("method=fedsoft", "participation.fraction=0.5", "fedsoft.tau=4", "fedsoft.select=2")
    session.run_round(1)
    before = session.server.method.base.mixture.copy()
    session.run_round(2)
    after = session.server.method.base.mixture
    old, new = ~np.isnan(before[:, 0]), ~np.isnan(after[:, 0])
    assert new.sum() > old.sum() and np.array_equal(before[old], after[old])


@pytest.mark.parametrize(("draws", "seeds"), [("fedsoft.select=6", (0, 1, 2)), ("fedsoft.select=0", (0,))])
def test_importance_weights_approach_the_true_mixture(draws, seeds):
    # FedSoft's 10:90 split on its synthetic data, 10 clients of 60 samples, lr 0.05, 8 steps of 20 samples.
    truth, errors = ten_ninety(10), []
    for seed in seeds:
        session = mixed_session(
            truth,
            *("method=fedsoft", f"seed={seed}", draws, "fedsoft.lam=1.0", "rounds=10", "evaluation.every=10"),
            *("local.lr=0.05", "local.momentum=0", "local.steps=8", "local.batch=20"),
        )
        first = session.run_round(1)
        start = error_up_to_permutation(session.server.method.base.mixture, truth)
        last = run(session, 9, first=2)[-1]
        errors.append(error_up_to_permutation(session.server.method.base.mixture, truth))
        assert start > 0.25 and first.round == 1 and last.metrics["ari"] == 1.0
    # Measured: 0.02 to 0.06, the samples that noise puts nearer to the wrong centre (the paper's p_epsilon).
    assert max(errors) < 0.08


def test_layout_and_a_restore_do_not_matter():
    settings = (
        "method=fedsoft",
        "fedsoft.select=3",
        "participation.fraction=0.75",
        "fedsoft.init_from=mixture",
    )
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 4))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[0, 1, 2, 3], [4, 5, 6, 7]], checkpoint=checkpoint_of(first))
    assert outcome(second, [*reports, *run(second, 2, first=3)]) == expected
