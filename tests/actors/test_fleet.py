"""What a strategy may ask of the fleet, worked out by hand on one-parameter models."""

import numpy as np
import pytest

from archipelago.core.errors import ClientFailure
from archipelago.strategies.penalties import Proximal
from archipelago.strategies.references import Models, PerClient, Prediction, Private
from tests.support.errors import refused
from tests.support.experiments import run, session_of
from tests.support.scalar import scalar_fleet

# Client i wants w = targets[i]; gradients are 2 (w - target).
TARGETS = [2.0, -2.0, 4.0]


def fleet(**options):
    return scalar_fleet([[(1.0, target)] for target in TARGETS], lr=0.1, **options)


def values(handle):
    return handle.gather()[:, 0].tolist()


def test_every_kind_of_reference_can_be_a_start():
    ships = fleet()
    clusters = Models(np.float32([[0.0], [1.0]]))
    from_vector = ships.train(start=np.float32([1.0]))
    assert values(from_vector) == pytest.approx([1.2, 0.4, 1.6])
    from_rows = ships.train(start=clusters[np.array([1, 0, 0])], slot="rows")
    assert values(from_rows) == pytest.approx([1.2, -0.4, 0.8])
    from_handle = ships.train(start=from_vector, slot="handle")
    assert values(from_handle) == pytest.approx([1.36, -0.08, 2.08])
    ships.train(start=np.float32([1.0]), slot="kept", keep="own")
    from_private = ships.train(start=Private("own"), slot="private")
    assert values(from_private) == pytest.approx(values(from_handle))
    untouched = ships.train(start=Private("never", default=clusters[np.array([1, 1, 1])]), slot="default")
    assert values(untouched) == pytest.approx(values(from_vector))


def test_slots_never_share_momentum_or_batches():
    ships = fleet(momentum=0.9)
    first = ships.train(start=np.float32([0.0]), slot="a")
    again = ships.train(start=np.float32([0.0]), slot="a")
    other = ships.train(start=np.float32([0.0]), slot="b")
    assert values(other) == values(first) != values(again)


def test_models_underneath_are_added_to_the_outputs():
    ships = fleet()
    # With a model of 1 underneath, client 0 wants w = 1: gradient 2 (0 + 1 - 2) = -2 at w = 0.
    trained = ships.train(start=np.float32([0.0]), on_top_of=np.float32([1.0]))
    assert values(trained) == pytest.approx([0.2, -0.6, 0.6])
    several = ships.train(
        start=np.float32([0.0]), on_top_of=[np.float32([1.0]), np.float32([1.0])], slot="two"
    )
    assert values(several) == pytest.approx([0.0, -0.8, 0.4])
    some = Models(np.float32([[1.0]]))[np.array([0, -1, -1])]  # a different number of models per client
    assert values(ships.train(start=np.float32([0.0]), on_top_of=some, slot="some")) == pytest.approx(
        [0.2, -0.4, 0.8]
    )


def test_anchors_of_penalties_are_references_too():
    ships = fleet()
    anchor = Models(np.float32([[10.0], [0.0]]))[np.array([0, 1, 1])]
    trained = ships.train(start=np.float32([0.0]), penalties=[Proximal(1.0, anchor)])
    # gradients 2 (0 - 2) + (0 - 10), 2 (0 + 2) + 0, 2 (0 - 4) + 0
    assert values(trained) == pytest.approx([1.4, -0.4, 0.8])


def test_losses_are_per_client_and_per_model():
    losses = fleet().losses(Models(np.float32([[0.0], [1.0]])))
    assert losses.tolist() == pytest.approx(np.array([[4.0, 1.0], [4.0, 9.0], [16.0, 9.0]]))
    on_top = fleet().losses(Models(np.float32([[0.0], [1.0]])), on_top_of=np.float32([1.0]))
    assert on_top.tolist() == pytest.approx(np.array([[1.0, 0.0], [9.0, 16.0], [9.0, 4.0]]))


def test_gradients_are_full_batch_and_their_finite_difference():
    ships = scalar_fleet([[(1.0, 2.0), (3.0, -1.0)]])
    at = np.float32([0.5])
    gradient = ships.gradients(at).gather()[0, 0]
    # mean of 2 x (w x - y): (2 * (0.5 - 2) + 6 * (1.5 + 1)) / 2
    assert gradient == pytest.approx((2 * -1.5 + 6 * 2.5) / 2)
    step = 1e-2
    above, below = (
        float(ships.losses(Models(at[None] + s))[0, 0]) for s in (np.float32(step), np.float32(-step))
    )
    assert (above - below) / (2 * step) == pytest.approx(gradient, rel=1e-3)


def test_combine_lets_one_client_feed_several_centres():
    trained = fleet().train(start=np.float32([1.0]))  # 1.2, 0.4, 1.6
    centres = trained.combine([[1, 1, 0], [0, 1, 3]])
    assert centres.values.ravel().tolist() == pytest.approx([0.8, 1.3])
    with pytest.raises(ValueError, match="weight matrix"):
        trained.combine([[1, 1]])
    with pytest.raises(ValueError, match="weighs nothing"):
        trained.combine([[0, 0, 0]])


def test_gather_streams_in_id_order_under_a_memory_cap():
    session = session_of("method=fedavg", blocks=[[3, 6], [0, 1, 2, 4, 5, 7]])
    session.fleet.begin(1)
    trained = session.fleet.train(start=session.server.method.base.model)
    whole = trained.gather()
    pieces = list(trained.chunks(memory=8 * 4 * 100))
    assert len(pieces) > 1 and all(piece.nbytes <= 8 * 4 * 100 for _, piece in pieces)
    assert np.array_equal(np.concatenate([piece for _, piece in pieces], axis=1), whole)
    head = trained.features("classifier")
    assert np.array_equal(head, whole[:, session.fleet.spec.columns("classifier")])
    expected = np.linalg.norm(whole.astype(np.float64) - session.server.method.base.model, axis=1)
    assert trained.distances(session.server.method.base.model) == pytest.approx(expected)


def count_rounds(client, state, step):
    """A client function: counts in its private state."""
    counted = state.get("count", 0) + int(step)
    return {**state, "count": counted}, (client.id, client.size, counted)


def test_client_function_sees_its_state_and_commits_with_the_round():
    ships = fleet()
    assert ships.map(count_rounds, stage="counting", step=PerClient(np.array([1, 2, 3]))) == [
        (0, 1, 1),
        (1, 1, 2),
        (2, 1, 3),
    ]
    ships.begin(1)  # the attempt was aborted
    assert ships.map(count_rounds, stage="counting", step=1)[2] == (2, 1, 1)
    ships.commit()
    ships.begin(2)
    assert ships.select([2]).map(count_rounds, stage="counting", step=1) == [(2, 1, 2)]


def fail_for_client_one(client, state):
    if client.id == 1:
        raise ZeroDivisionError("no data")
    return state, None


def test_failure_names_client_round_stage_and_cause():
    ships = fleet()
    ships.begin(7)
    with pytest.raises(
        ClientFailure, match="Client 1 failed in round 7 during counting: ZeroDivisionError: no data"
    ):
        ships.map(fail_for_client_one, stage="counting")


@pytest.mark.parametrize(
    ("combine", "outputs"),
    [("logit_sum", [3.0, 0.0]), ("logit_mean", [1.5, 0.0])],
)
def test_predictions_combine_models(combine, outputs):
    ships = scalar_fleet([[(1.0, 0.0)], [(1.0, 0.0)]])
    models = [np.float32([1.0]), Models(np.float32([[2.0], [-1.0]]))[np.array([0, 1])]]
    mse = ships.evaluate(Prediction(models, combine=combine))["mse"]
    assert mse.tolist() == pytest.approx([value**2 for value in outputs])
    weighted = ships.evaluate(Prediction(models, weights=np.array([[1.0, 0.0], [0.0, 1.0]])))["mse"]
    assert weighted.tolist() == pytest.approx([1.0, 1.0])


def test_vote_and_a_mean_of_probabilities_are_those_of_numpy():
    session = session_of("method=ifca", "clusters=3")
    run(session, 2)
    ships, clusters = session.fleet.everyone, session.server.method.base.clusters
    block = session.fleet.blocks[0]
    from lightning_modules.engines.objective import outputs_of

    for combine in ("probability_mean", "vote"):
        found = ships.evaluate(Prediction([clusters[k] for k in range(3)], combine=combine))
        for client in range(8):
            index = block.clients[client].test
            logits = np.stack(
                [outputs_of(block.model, block.samples, clusters[k], index).numpy() for k in range(3)]
            )
            shifted = np.exp(logits - logits.max(axis=2, keepdims=True))
            scores = (shifted / shifted.sum(axis=2, keepdims=True)).mean(axis=0)
            if combine == "vote":
                scores = np.eye(10)[logits.argmax(axis=2)].mean(axis=0) + 0.1 * scores  # ties by probability
            y = block.samples.batch(index)[1].numpy()
            assert found["accuracy"][client] == pytest.approx((scores.argmax(axis=1) == y).mean())


def test_client_that_blows_up_is_dropped_by_name_and_averaged_never():
    ships = scalar_fleet([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1)
    trained = ships.train(start=np.float32([1.0]), keep="own")
    assert trained.arrived.tolist() == [True, False] and ships.dropped == {1}
    assert "dropped client 1" in ships.events[0] and "not finite" in ships.events[0]
    assert trained.average(weights=[1.0, 100.0]).tolist() == pytest.approx([1.2])
    ships.commit()
    states = ships.snapshot()[0]
    assert "model/own" in states[0] and "model/own" not in states[1]


def test_client_that_blows_up_stops_the_run_where_the_setting_says_so():
    ships = scalar_fleet([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1)
    ships.not_finite = "stop"
    with pytest.raises(ClientFailure, match=r"Client 1 failed in round 1 .* not finite .*not_finite=drop"):
        ships.train(start=np.float32([1.0]))


def test_all_clients_lost_keeps_the_model():
    ships = scalar_fleet([[(1e30, 1.0)], [(1e30, 1.0)]], lr=0.1)
    trained = ships.train(start=np.float32([1.0]))
    assert trained.average(otherwise=np.float32([7.0])).tolist() == [7.0]


def test_clusterability_measure_by_hand():
    session = session_of("method=fedavg", "evaluation.clusterability=true", "evaluation.train=true")
    report = session.run_round(1)
    ships, model = session.fleet, session.server.method.base.model
    ships.begin(2)
    gradients = ships.gradients(model).gather().astype(np.float64)
    weights = ships.sizes / ships.sizes.sum()
    mean = weights @ gradients
    by_hand = np.linalg.norm(mean - gradients, axis=1).max() / np.linalg.norm(mean)  # thesis (3.18)
    assert report.metrics["clusterability"] == pytest.approx(by_hand, rel=1e-5)
    assert "train_micro_accuracy" in report.metrics and "train_accuracy" in report.clients


def test_clusterability_is_zero_where_all_clients_have_the_same_data():
    ships = scalar_fleet([[(1.0, 2.0)], [(1.0, 2.0)]])
    gradients = ships.gradients(np.float32([0.0]))
    mean = gradients.average()
    assert gradients.distances(mean).tolist() == [0.0, 0.0]


def test_client_dropped_earlier_in_the_round_stays_out_of_it():
    ships = scalar_fleet([[(1.0, 2.0)], [(1e30, 1.0)]], lr=0.1, momentum=0.9)
    theta = ships.train(start=np.float32([1.0]))
    again = ships.train(start=np.float32([1.0]), on_top_of=theta, slot="second")
    assert again.arrived.tolist() == [True, False] and len(ships.events) == 1
    ships.commit()
    assert "optimizer/second" not in ships.snapshot()[0][1]


def test_reference_to_a_result_that_never_arrived_is_its_start():
    ships = scalar_fleet([[(1.0, 2.0)], [(1e30, 1e30)]], lr=0.1)
    theta = ships.train(start=np.float32([1.0]))
    mse = ships.evaluate(Prediction([theta]))["mse"]
    assert mse[0] == pytest.approx((1.2 - 2) ** 2, rel=1e-5) and mse[1] == 0.0  # 1 * 1e30 - 1e30


def test_model_beyond_all_others_is_dropped_like_one_that_is_not_finite():
    ships = scalar_fleet([[(1.0, 2.0)], [(1.0, 1.0)], [(1e8, 1.0)]], lr=0.1)
    trained = ships.train(start=np.float32([1.0]))
    assert trained.arrived.tolist() == [True, True, False] and ships.dropped == {2}


def test_stragglers_fine_tune_all_their_steps():
    session = session_of("method=fedavg", "local.steps=50", "local.momentum=0")
    start = session.server.method.base.model
    session.fleet.begin(1, {0: 0.1})
    slow = session.fleet.train(start=start).distances(start)[0]
    whole = session.fleet.train(start=start, slot="evaluation", fresh=True).distances(start)[0]
    assert slow < whole


def test_module_with_only_a_training_step_is_trained_and_evaluated():
    session = session_of("method=fedavg", "model.target=tests.support.modules.ForeignModule")
    reports = run(session, 3)
    assert reports[-1].metrics["micro_accuracy"] > reports[0].metrics["micro_accuracy"]

    with refused("incomplete-module", lacks="loss"):
        session_of("method=ifca", "model.target=tests.support.modules.ForeignModule").run_round(1)
