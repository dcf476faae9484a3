"""FedEM, by hand, by its identities, and on FedSoft's synthetic mixtures."""

import numpy as np
import pytest

from archipelago.strategies.fedem import FedEMOptions, responsibilities
from archipelago.strategies.references import Models, Prediction
from lightning_modules.engines.objective import outputs_of
from tests.support.experiments import checkpoint_of, digest, outcome, run, session_of
from tests.support.mixtures import error_up_to_permutation, mixed_session, ten_ninety
from tests.support.scalar import method_of, scalar_fleet

TWO = [[(1.0, 0.0), (1.0, 1.0)], [(1.0, -1.0)]]


def fedem_of(fleet, components=(-1.0, 1.0), **options):
    made = method_of("fedem", fleet, clusters=len(components), options={"fedem": FedEMOptions(**options)})
    made.base.clusters = Models(np.float32([[value] for value in components]))
    return made


def a_round(fedem, fleet, number=1):
    fleet.begin(number)
    fedem.round(fleet, number)
    fleet.commit()


def test_one_round_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1)
    fedem = fedem_of(fleet)
    a_round(fedem, fleet)
    # Client 0: y = 0 costs 1 and 1, so q = 1/2, 1/2; y = 1 costs 4 and 0, so q = e^-4 / (1 + e^-4) = e, 1 - e.
    e = 0.01798621
    q = [fleet.snapshot()[0][i]["state/q"] for i in (0, 1)]
    assert q[0] == pytest.approx(np.array([[0.5, 0.5], [e, 1 - e]]), rel=1e-5)
    assert q[1] == pytest.approx(np.array([[1 - e, e]]), rel=1e-5)
    assert fedem.base.mixture == pytest.approx(np.array([[0.258993, 0.741007], [1 - e, e]]), rel=1e-5)
    assert fedem.base.assignment.tolist() == [1, 0]
    # Component 0, client 0: g = (0.5 * 2 (-1 - 0) + e * 2 (-1 - 1)) / 2 = -0.5 - 2 e; client 1: g = 0.
    # Component 1, client 0: g = (0.5 * 2 (1 - 0) + 0) / 2 = 0.5; client 1: g = e * 2 (1 + 1) = 4 e.
    first = (2 * (-1 + 0.1 * (0.5 + 2 * e)) + 1 * -1) / 3
    second = (2 * (1 - 0.1 * 0.5) + 1 * (1 - 0.1 * 4 * e)) / 3
    assert fedem.base.clusters.values.ravel().tolist() == pytest.approx([first, second], rel=1e-6)
    # What was minimised: client 0: (0.5 * 1 + e * 4) / 2 + 0.5 / 2, client 1: 0 + e * 4.
    assert fedem.report["federated_objective"] == pytest.approx((2 * (0.5 + 2 * e) + 4 * e) / 3, rel=1e-5)
    # -log(e^-1) = 1 and -log((1 + e^-4) / 2) = 0.675, twice: means 0.8375 (n = 2) and 0.675 (n = 1).
    assert fedem.report["clustering_objective"] == pytest.approx((1 + 2 * 0.6749977) / 3, rel=1e-5)
    assert fedem.records["pi"]["pi_0"].tolist() == pytest.approx([0.258993, 1 - e], rel=1e-5)
    # A regression predicts the mean of the mixture: 0.258993 first + 0.741007 second, on y = 0 and y = 1.
    fleet.begin(2)
    w = 0.258993 * first + 0.741007 * second
    found = fleet.evaluate(fedem.prediction(fleet))
    assert found["mse"][0] == pytest.approx((w**2 + (w - 1) ** 2) / 2, rel=1e-5)
    assert found["loss"][0] == pytest.approx(found["mse"][0], rel=1e-6)


def test_second_e_step_starts_from_the_first_ones_pi():
    fleet = scalar_fleet(TWO, lr=0.1)
    fedem = fedem_of(fleet)
    a_round(fedem, fleet)
    pi, (a, b) = fedem.base.mixture[0], fedem.base.clusters.values.ravel().astype(float)
    a_round(fedem, fleet, 2)
    scores = np.array(
        [[pi[0] * np.exp(-((a - y) ** 2)), pi[1] * np.exp(-((b - y) ** 2))] for y in (0.0, 1.0)]
    )
    q = scores / scores.sum(axis=1, keepdims=True)
    assert fedem.base.mixture[0] == pytest.approx(q.mean(axis=0), rel=1e-5)


def test_responsibilities_that_have_nothing_to_go_by():
    pi = np.array([0.25, 0.75, 0.0])
    losses = np.array([[np.inf, np.nan, 0.0], [1e9, 1e9, 1e9], [np.inf, 2.0, 0.0]])
    q, surprise = responsibilities(losses, pi)
    assert q == pytest.approx(np.array([[0.25, 0.75, 0.0], [0.25, 0.75, 0.0], [0.0, 1.0, 0.0]]), abs=1e-7)
    assert surprise.tolist() == pytest.approx([np.inf, 1e9, 2.0 - np.log(0.75)])


def test_one_component_is_fedavg_bit_by_bit():
    one, fedavg = session_of("method=fedem", "clusters=1"), session_of("method=fedavg", "clusters=1")
    reports, plain = run(one, 3), run(fedavg, 3)
    assert digest(one.server.method.base.clusters[0]) == digest(fedavg.server.method.base.model)
    for name in ("accuracy", "loss"):
        assert digest(reports[-1].clients[name]) == digest(plain[-1].clients[name])
    assert reports[-1].metrics["federated_objective"] == plain[-1].metrics["federated_objective"]
    assert one.server.method.base.mixture.tolist() == [[1.0]] * 8


def test_responsibilities_sum_to_one_and_pi_lies_in_the_simplex():
    session = session_of("method=fedem", "clusters=3")
    run(session, 3)
    for state in checkpoint_of(session).clients.values():
        assert state["state/q"].sum(axis=1) == pytest.approx(1.0, abs=1e-6) and state["state/q"].min() >= 0
    pi = session.server.method.base.mixture
    assert pi.shape == (8, 3) and pi.min() >= 0 and pi.sum(axis=1) == pytest.approx(1.0, abs=1e-12)
    assert np.array_equal(session.server.method.base.assignment, pi.argmax(axis=1))


def test_permuting_the_components_permutes_the_result():
    found = []
    for components in ((-1.0, 1.0, 3.0), (3.0, -1.0, 1.0)):
        fleet = scalar_fleet(TWO, lr=0.1)
        fedem = fedem_of(fleet, components=components)
        for number in (1, 2, 3):
            a_round(fedem, fleet, number)
        found.append((fedem.base.clusters.values[:, 0], fedem.base.mixture))
    assert found[1][0] == pytest.approx(np.roll(found[0][0], 1), rel=1e-5)
    assert found[1][1] == pytest.approx(np.roll(found[0][1], 1, axis=1), rel=1e-5)


def test_prediction_is_the_mixture_of_probabilities_and_its_loss_the_logarithm():
    session = session_of("method=fedem", "clusters=3")
    report = run(session, 2)[-1]
    strategy, block = session.server.method, session.fleet.blocks[0]
    for client in range(8):
        index = block.clients[client].test
        logits = [
            outputs_of(block.model, block.samples, strategy.base.clusters[m], index)
            .numpy()
            .astype(np.float64)
            for m in range(3)
        ]
        softmax = [np.exp(z - z.max(axis=1, keepdims=True)) for z in logits]
        mixed = sum(
            strategy.base.mixture[client, m] * p / p.sum(axis=1, keepdims=True) for m, p in enumerate(softmax)
        )
        y = block.samples.batch(index)[1].numpy()
        loss = -np.log(mixed[np.arange(len(y)), y]).mean()
        assert report.clients["accuracy"][client] == pytest.approx((mixed.argmax(axis=1) == y).mean())
        assert report.clients["loss"][client] == pytest.approx(loss, rel=1e-4)


def test_component_of_largest_weight_predicts_alone_where_asked():
    mixture, largest = (
        session_of("method=fedem", "clusters=3", f"fedem.predict={how}") for how in ("mixture", "largest")
    )
    reports = run(mixture, 2)[-1], run(largest, 2)[-1]
    base = largest.server.method.base
    assert np.array_equal(
        base.clusters.values, mixture.server.method.base.clusters.values
    )  # training is the same
    fleet = largest.fleet.everyone
    alone = fleet.evaluate(Prediction([base.clusters[base.mixture.argmax(axis=1)]]))
    assert np.array_equal(reports[1].clients["loss"], alone["loss"])
    assert not np.array_equal(reports[0].clients["loss"], reports[1].clients["loss"])


def test_components_draw_their_own_batches_and_keep_their_own_momentum():
    session = session_of("method=fedem", "clusters=2")
    strategy = session.server.method
    strategy.base.clusters = Models(np.repeat(strategy.base.clusters.values[:1], 2, axis=0))
    run(session, 1)
    # Equal components share every sample evenly; only their batches tell them apart.
    assert strategy.base.mixture == pytest.approx(0.5)
    assert not np.array_equal(strategy.base.clusters[0], strategy.base.clusters[1])
    state = checkpoint_of(session).clients[0]
    assert {"optimizer/main", "optimizer/component 1"} <= set(state)
    assert not np.shares_memory(strategy.base.clusters[0], strategy.base.clusters[1])


def test_batched_training_gives_the_same_numbers():
    loop, batched = (session_of("method=fedem", f"local.engine={name}") for name in ("loop", "stacked"))
    run(loop, 2)
    run(batched, 2)
    found, expected = (s.server.method.base.clusters.values for s in (batched, loop))
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("steps", [1, 4])
def test_client_never_seen_runs_e_steps_only(steps):
    fleet = scalar_fleet([*TWO, [(1.0, 1.0), (1.0, 0.5), (1.0, -2.0)]], lr=0.1)
    fedem = fedem_of(fleet, unseen_steps=steps)
    fleet.begin(1)
    fedem.round(fleet.select([0, 1]), 1)
    a, b = fedem.base.clusters.values.ravel().astype(float)
    pi = np.array([0.5, 0.5])
    for _ in range(steps):
        scores = np.array(
            [[pi[0] * np.exp(-((a - y) ** 2)), pi[1] * np.exp(-((b - y) ** 2))] for y in (1.0, 0.5, -2.0)]
        )
        pi = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
    assert fedem.base.weights(fleet)[2] == pytest.approx(pi, rel=1e-5)
    assert fedem.base.adopt(fleet.select([2])).tolist() == [int(pi.argmax())]
    assert fedem.prediction(fleet).weights[2] == pytest.approx(pi, rel=1e-5)
    fleet.commit()
    assert np.isnan(fedem.base.mixture[2]).all() and fedem.base.assignment[2] == -1
    assert "state/q" not in fleet.snapshot()[0][2]


def test_client_that_blows_up_is_left_out_of_the_components():
    fleet = scalar_fleet([*TWO, [(1e25, 1.0)]], lr=0.1)
    fedem = fedem_of(fleet)
    a_round(fedem, fleet)
    alone = scalar_fleet(TWO, lr=0.1)
    without = fedem_of(alone)
    a_round(without, alone)
    assert fedem.base.clusters.values == pytest.approx(without.base.clusters.values, rel=1e-6)
    assert np.isfinite(fedem.base.mixture).all()


def test_pi_beside_fedsofts_weights_on_the_same_mixtures():
    # The setting of test_fedsoft.py. pi is slower than u (uniform at first, moved step by step), and closer in the
    # end: 0.01 to 0.02 after 40 rounds on five seeds, since each component fits one source alone.
    truth, errors = ten_ninety(10), []
    for seed in (0, 1):
        session = mixed_session(
            truth,
            *("method=fedem", f"seed={seed}", "rounds=11", "evaluation.every=11"),
            *("local.lr=0.05", "local.momentum=0", "local.steps=8", "local.batch=20"),
        )
        run(session, 11)
        errors.append(error_up_to_permutation(session.server.method.base.mixture, truth))
    assert max(errors) < 0.05


def test_layout_and_a_restore_do_not_matter():
    settings = ("method=fedem", "participation.fraction=0.75")
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 4))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[0, 1, 2, 3], [4, 5, 6, 7]], checkpoint=checkpoint_of(first))
    assert outcome(second, [*reports, *run(second, 2, first=3)]) == expected
