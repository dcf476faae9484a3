"""FeMAM, by hand, by its identities, and on a ground-truth two-level structure."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from actors.session import Checkpoint
from archipelago.runs.trees import pack, unpack
from archipelago.strategies.base import UNASSIGNED, Context
from archipelago.strategies.clustering import normalised
from archipelago.strategies.ensemble import build_ensemble
from archipelago.strategies.femam import FeMAM, FeMAMOptions
from archipelago.strategies.levels import NOTHING
from archipelago.strategies.references import Models, Prediction
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, digest, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# Both clients see x = 1; client 0 wants w = 2, client 1 wants w = -2 and has three times the data.
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
TWO_LEVELS = {"levels": [1, 2], "personal": False, "schedule": [1, 1]}


def made(fleet, rounds=100, **options) -> FeMAM:
    return method_of("femam", fleet, rounds=rounds, options={"femam": FeMAMOptions(**options)})


def play(strategy, fleet, *numbers):
    """Rounds of a strategy, committed one by one."""
    for number in numbers:
        fleet.begin(number)
        strategy.round(fleet, number)
        fleet.commit()


def with_global(strategy, value):
    """The strategy with its first level done: a global model of one number."""
    strategy.base.levels[0] = Models(np.float32([[value]]))
    strategy.base.closed, strategy.base.curve = True, np.ones(1)
    return strategy


def cluster_of(strategy, level, client):
    return float(strategy.base.levels[level].values[strategy.base.rows[level][client], 0])


# --- by hand ----------------------------------------------------------------------------------------------


def test_first_level_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = made(fleet, **TWO_LEVELS)
    femam.base.levels[0] = Models(np.float32([[0.0]]))
    play(femam, fleet, 1)
    # theta_0 = 0 - 0.1 * 2 (0 - 2) = 0.4, theta_1 = -0.4; mean weighted by 1 : 3 = -0.2
    assert femam.base.levels[0].values.tolist() == [[pytest.approx(-0.2, rel=1e-6)]]
    assert femam.base.closed and femam.base.assignment is None


def test_second_level_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1, steps=2)
    femam = with_global(made(fleet, mu=0.5, **TWO_LEVELS), -0.2)
    play(femam, fleet, 2)
    # l(theta) = ((G + theta) / 2 - y)^2, gradient (G + theta) / 2 - y, plus 0.5 (theta - start); start = G = -0.2
    # client 0: -0.2 - 2 = -2.2, theta = 0.02; -0.09 - 2 + 0.5 * 0.22 = -1.98, theta = 0.218
    # client 1: -0.2 + 2 = 1.8, theta = -0.38; -0.29 + 2 - 0.5 * 0.18 = 1.62, theta = -0.542
    assert cluster_of(femam, 1, 0) == pytest.approx(0.218, rel=1e-5)
    assert cluster_of(femam, 1, 1) == pytest.approx(-0.542, rel=1e-5)
    assert femam.base.levels[0].values.tolist() == [[pytest.approx(-0.2)]]  # fixed
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    # ((-0.2 + 0.218) / 2 - 2)^2 and ((-0.2 - 0.542) / 2 + 2)^2
    assert losses.tolist() == pytest.approx([1.991**2, 1.629**2], rel=1e-5)
    assert sorted(femam.base.assignment.tolist()) == [0, 1] and femam.base.K == 2


def test_sum_of_logits_by_hand():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, loss_scale="sum", **TWO_LEVELS), -0.2)
    play(femam, fleet, 2)
    # gradient 2 (G + theta - y) at theta = G: 2 (-0.4 - 2) = -4.8 and 2 (-0.4 + 2) = 3.2
    assert cluster_of(femam, 1, 0) == pytest.approx(0.28, rel=1e-5)
    assert cluster_of(femam, 1, 1) == pytest.approx(-0.52, rel=1e-5)
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    assert losses.tolist() == pytest.approx([1.92**2, 1.28**2], rel=1e-5)


def test_pruned_client_ignores_the_level_and_counts_one_model_less():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, levels=[1, 2, 1], personal=False, schedule=[1, 1, 1], mu=0.0), -0.2)
    femam.base.reference = np.array([1.0, 100.0])  # client 0 had a loss of 1 before, client 1 one of 100
    play(femam, fleet, 2)
    # Level 2 as above with one step: theta_0 = 0.02 (loss (-0.09 - 2)^2 = 4.37 > 1), theta_1 = -0.38 (2.92 < 100)
    assert femam.base.pruned[1].tolist() == [True, False]
    assert femam.base.reference.tolist() == pytest.approx([1.0, 1.71**2], rel=1e-5)
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    assert losses.tolist() == pytest.approx([2.2**2, 1.71**2], rel=1e-5)  # client 0: level 1 alone
    assert any("1 of 2 clients: they drop it" in event for event in femam.events)
    play(femam, fleet, 3)
    # Level 3, one model, start -0.2. Client 0 holds levels 1 and 3: gradient (-0.4) / 2 - 2 = -2.2, theta = 0.02.
    # Client 1 holds three: 2 / 3 ((-0.2 - 0.38 - 0.2) / 3 + 2) = 2 / 3 * 1.74 = 1.16, theta = -0.316
    # mean weighted by 1 : 3 = (0.02 - 0.948) / 4
    assert femam.base.levels[2].values.tolist() == [[pytest.approx(-0.232, rel=1e-5)]]


@pytest.mark.parametrize(("prune", "on_record", "expected"), [
    ("real", True, 2.2), ("bookkeeping", True, 2.09), ("none", False, 2.09),
])  # fmt: skip
def test_pruning_is_real_or_on_record_only_or_never(prune, on_record, expected):
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, prune=prune, mu=0.0, **TWO_LEVELS), -0.2)
    femam.base.reference = np.array([1.0, 100.0])
    play(femam, fleet, 2)
    assert femam.base.pruned[1].tolist() == [on_record, False]
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    assert losses[0] == pytest.approx(expected**2, rel=1e-5)
    table = femam.records["levels"]
    assert table["level"].tolist() == [1, 1, 2, 2] and table["client"].tolist() == [0, 1, 0, 1]
    assert table["pruned"].tolist() == [False, False, on_record, False]
    assert table["cluster"][:2].tolist() == [0, 0] and sorted(table["cluster"][2:].tolist()) == [0, 1]
    assert femam.report["models_per_client"] == (1.5 if prune == "real" else 2.0)


def test_dropped_personal_model_is_no_longer_used():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, levels=[1], schedule=[1, 1], mu=0.0), -0.2)
    femam.base.reference = np.array([1.0, 100.0])
    play(femam, fleet, 2)
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    assert losses.tolist() == pytest.approx([2.2**2, 1.71**2], rel=1e-5)
    play(femam, fleet, 3)  # client 0 has nothing left to train, client 1 continues
    # gradient (-0.2 - 0.38) / 2 + 2 = 1.71, theta = -0.551
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    assert losses.tolist() == pytest.approx([2.2**2, ((-0.2 - 0.551) / 2 + 2) ** 2], rel=1e-5)


def test_ensemble_predicts_with_what_its_members_predict_with():
    fleet = scalar_fleet(TWO, lr=0.1)
    ensemble = build_ensemble(["femam"], "logit_sum", {"femam": FeMAMOptions(levels=[1], schedule=[1, 1], mu=0.0)},
                              Context(clients=2, clusters=2, rounds=10))  # fmt: skip
    ensemble.setup(fleet)
    [femam] = ensemble.members
    with_global(femam, -0.2)
    femam.base.reference = np.array([1.0, 100.0])
    play(ensemble, fleet, 2)
    losses = fleet.everyone.evaluate(ensemble.prediction(fleet), "test")["loss"]
    assert femam.base.pruned[-1].tolist() == [
        True,
        False,
    ]  # of the personal models one is no longer used, here neither
    assert losses.tolist() == pytest.approx([2.2**2, 1.71**2], rel=1e-5)  # as in the test above


def test_new_client_skips_a_level_of_one_model_that_would_hurt_it():
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1)
    femam = with_global(made(fleet, levels=[1, 1], personal=False, schedule=[1, 1], mu=0.0), 1.0)
    femam.base.open(Models(np.float32([[-40.0]])))
    held = femam.base.structure(fleet, 2)
    assert [rows.tolist() for rows in held] == [[0], [NOTHING]]
    femam.base.levels[1] = Models(np.float32([[3.0]]))  # the mean of both is 2: it helps
    assert [rows.tolist() for rows in femam.base.structure(fleet, 2)] == [[0], [0]]


def test_features_are_the_classifier_with_its_bias_at_length_one():
    session = session_of("method=femam")
    spec = session.fleet.spec
    last = [entry for entry in spec.entries if entry.kind == "parameter"][-2:]
    assert [entry.name.rpartition(".")[2] for entry in last] == ["weight", "bias"]
    assert spec.last_layer().tolist() == list(range(last[0].start, last[1].stop))
    rows = np.float32([[3, 4], [-1, -3], [0, 0], [1, -1]])
    assert normalised(rows, "l2")[:3] == pytest.approx(
        np.array([[0.6, 0.8], [-(0.1**0.5), -(0.9**0.5)], [0, 0]])
    )
    assert normalised(rows, "sum").tolist() == [[3 / 7, 4 / 7], [-0.25, -0.75], [0, 0], [1, -1]]
    assert normalised(rows, "none").tolist() == rows.tolist()


# --- identities -------------------------------------------------------------------------------------------


def test_one_level_has_the_bits_of_fedavg_with_a_proximal_term():
    one = session_of("method=femam", "femam.levels=[1]", "femam.personal=false")
    prox = session_of("method=fedprox", "fedprox.mu=0.02")
    reports, plain = run(one, 3), run(prox, 3)
    assert np.array_equal(one.server.method.base.levels[0].values[0], prox.server.method.base.model)
    for column in ("accuracy", "loss"):
        assert digest(reports[-1].clients[column]) == digest(plain[-1].clients[column])


def test_copied_level_leaves_the_loss_of_two_levels_as_it_was():
    for scale, same in (("mean", True), ("sum", False)):
        session = session_of("method=femam", f"femam.loss_scale={scale}")
        run(session, 2)
        strategy, fleet = session.server.method, session.fleet.everyone
        before = fleet.evaluate(strategy.base.prediction(fleet), "train")["loss"]
        strategy.base.open(strategy.base.levels[0])
        assert len(strategy.base.prediction(fleet).models) == 2
        after = fleet.evaluate(strategy.base.prediction(fleet), "train")["loss"]
        assert np.array_equal(before, after) == same


def test_last_level_of_as_many_clusters_as_clients_is_the_personal_one():
    settings = ("method=femam", "rounds=5", "femam.schedule=[2,3]", "femam.prune=none")
    alone = session_of(*settings, "femam.levels=[1,8]", "femam.personal=false")
    personal = session_of(*settings, "femam.levels=[1]", "femam.personal=true")
    reports, others = run(alone, 5), run(personal, 5)
    strategy = alone.server.method
    assert sorted(strategy.base.rows[1].tolist()) == list(range(8))
    own = checkpoint_of(personal).clients
    for client in range(8):
        mine = own[client]["model/personal"]
        np.testing.assert_allclose(
            strategy.base.levels[1].values[strategy.base.rows[1][client]], mine, rtol=1e-6, atol=1e-9
        )
        assert not np.array_equal(mine, strategy.base.levels[0].values[0])
    assert np.allclose(reports[-1].clients["loss"], others[-1].clients["loss"], rtol=1e-5)


def test_no_two_models_share_storage():
    session = session_of("method=femam", "femam.levels=[1,2]", "femam.schedule=[1,2,1]")
    run(session, 2)
    first, second = session.server.method.base.levels
    assert not np.shares_memory(first.values, second.values)
    assert len({row.tobytes() for row in (*first.values, *second.values)}) == 3
    run(session, 2, first=3)
    own = [state["model/personal"] for state in checkpoint_of(session).clients.values()]
    assert len({model.tobytes() for model in own}) == 8
    assert not any(np.shares_memory(own[0], other) for other in own[1:])
    # Nor do levels share an optimizer's momentum.
    kept = {name for name in checkpoint_of(session).clients[0] if name.startswith("optimizer/")}
    assert kept == {"optimizer/main", "optimizer/level 2", "optimizer/level 3"}


# --- every option does something --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_rounds():
    """The last round of a short run, by its options; one run for all tests that compare with it."""

    def last(*options):
        session = session_of("method=femam", "rounds=4", *(f"femam.{option}" for option in options))
        return digest(run(session, 4)[-1].clients)

    base = last("levels=[1,2]", "schedule=[1,2]")
    return last, base


@pytest.mark.parametrize(
    "change",
    [
        ("levels=[1,2]", "schedule=[1,2]", "mu=0.1"),
        ("levels=[1,2]", "schedule=[1,2]", "loss_scale=sum"),
        ("levels=[1,3]", "schedule=[1,2]"),
        ("levels=[1,2]", "schedule=[1,2]", "personal=false"),
        ("levels=[1,2]", "schedule=[2,1]"),
    ],
)
def test_every_option_of_the_models_changes_the_numbers(four_rounds, change):
    last, base = four_rounds
    assert last(*change) != base


@pytest.mark.parametrize(("rule", "distinct"), [("l2", 1), ("sum", 1), ("none", 2)])
def test_normalise_is_what_k_means_sees(rule, distinct):
    fleet = scalar_fleet([[(1.0, 5.0)], [(1.0, 9.0)]], lr=0.1)  # two positive numbers: alike once normalised
    femam = with_global(made(fleet, normalise=rule, **TWO_LEVELS), 1.0)
    play(femam, fleet, 2)
    assert len(set(femam.base.assignment.tolist())) == distinct
    assert any("only 1 distinct" in event for event in femam.events) == (distinct == 1)


# y = 2: loss (w - 2)^2 falls by 0.98^2 a round, so that the gains of rounds 2, 3, ... are 1 : 0.96 : 0.92 : ...
@pytest.mark.parametrize(("options", "first_of_level_2"), [
    ({"patience": 1, "threshold": 0.5}, 4),  # after round 3: 0.96 / 1.96 = 0.49 of all that was gained since round 1
    ({"patience": 2, "threshold": 0.7}, 5),  # after round 4: 1.88 / 2.88 = 0.65
    ({"patience": 1, "threshold": 0.4}, 5),  # after round 4: 0.92 / 2.88 = 0.32
    ({"patience": 1, "threshold": 1e-9}, None),  # still improving
    ({"patience": 1, "threshold": 1e-9, "share": 0.03}, 4),  # 3 of 100 rounds are all that level 1 may take
    ({"schedule": [2, 1]}, 3),
])  # fmt: skip
def test_when_the_next_level_is_added(options, first_of_level_2):
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, 2.0)]], lr=0.01)
    femam = made(fleet, levels=[1, 2], personal=False, mu=0.0, **options)
    for number in range(1, 7):
        play(femam, fleet, number)
        expected = 2 if first_of_level_2 is not None and number >= first_of_level_2 else 1
        assert len(femam.base.levels) == expected
        added = [event for event in femam.events if event == "Level 2 of 2 is added."]
        assert len(added) == (number == first_of_level_2)
        cut = [event for event in femam.events if "still improves" in event]
        assert len(cut) == ("share" in options and number == first_of_level_2 - 1)


def test_validation_losses_decide_where_there_are_any():
    with_samples = session_of("method=femam", "partition.validation=0.2")
    without = session_of("method=femam")
    (report,), (other,) = run(with_samples, 1), run(without, 1)
    assert report.metrics["stage_loss"] == pytest.approx(report.metrics["validation_macro_loss"], rel=1e-9)
    assert not any("no validation samples" in event for event in report.events)
    assert any("no validation samples" in event for event in other.events)


@pytest.mark.parametrize(
    ("wrong", "code", "given"),
    [
        ("levels=[2,2]", "wrong-form", [2, 2]),
        ("levels=[]", "wrong-form", []),
        ("schedule=[3]", "unequal-lengths", [3]),
        ("schedule=[1,1,1,1,1,1]", "unequal-lengths", [1] * 6),
    ],
)
def test_impossible_levels_are_refused_with_a_sentence(wrong, code, given):
    with refused(code, says=(f"femam.{wrong.partition('=')[0]}", str(given))):
        config_of("method=femam", f"femam.{wrong}")


# --- what can go wrong ------------------------------------------------------------------------------------


def test_more_clusters_than_clients_keeps_running_and_says_so():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, levels=[1, 5], personal=False, schedule=[1], alone=0), -0.2)
    play(femam, fleet, 2)
    assert any("only 2 distinct models for 5 clusters" in event for event in femam.events)
    assert len(femam.base.levels[1]) == 5 and np.isfinite(femam.base.levels[1].values).all()
    play(femam, fleet, 3)
    assert not femam.events  # reported once


def test_last_level_that_helps_nobody_is_dropped_and_the_run_continues():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, mu=0.0, **TWO_LEVELS), -0.2)
    femam.base.reference = np.zeros(2)
    play(femam, fleet, 2, 3)
    assert femam.report["levels"] == 1 and femam.report["models_per_client"] == 1.0
    losses = fleet.everyone.evaluate(femam.base.prediction(fleet), "test")["loss"]
    assert losses.tolist() == pytest.approx([2.2**2, 1.8**2], rel=1e-5)


def test_client_whose_training_blew_up_is_left_out():
    fleet = scalar_fleet([*TWO, [(1.0, 1e30)]], lr=0.1)
    femam = with_global(made(fleet, mu=0.0, **TWO_LEVELS), -0.2)
    play(femam, fleet, 2)
    assert femam.base.rows[1][2] == UNASSIGNED
    assert cluster_of(femam, 1, 0) == pytest.approx(0.02, rel=1e-5)
    assert cluster_of(femam, 1, 1) == pytest.approx(-0.38, rel=1e-5)


def test_levels_that_were_never_added_are_named():
    session = session_of("method=femam", "rounds=2", "femam.share=1")
    assert any("4 of 5 levels were never added" in event for event in run(session, 2)[-1].events)


def test_clients_never_seen_join_the_models_of_least_loss():
    session = session_of(
        "method=femam", "participation.fraction=0.25", "femam.levels=[1,2]", "femam.schedule=[1,1]",
        "femam.prune=none", "rounds=5",
    )  # fmt: skip
    reports = run(session, 2)
    strategy, fleet = session.server.method, session.fleet.everyone
    unseen = strategy.base.rows[1] == UNASSIGNED
    assert unseen.sum() == 6 and np.isfinite(reports[-1].clients["accuracy"]).all()
    shared, clusters = strategy.base.levels
    under = [
        fleet.evaluate(Prediction([shared[0], clusters[k]], combine="logit_mean"), "train") for k in range(2)
    ]
    least = np.stack([losses["loss"] for losses in under]).argmin(axis=0)
    assert np.array_equal(strategy.base.structure(fleet, 2)[1][unseen], least[unseen])
    assert (strategy.base.rows[1][unseen] == UNASSIGNED).all()  # adopted for now, not for good
    reports += run(session, 3, first=3)
    trained = strategy.base.rows[2] >= 0
    assert 2 <= trained.sum() < 8 and np.isfinite(reports[-1].clients["accuracy"]).all()
    # Whoever has not trained one yet has no personal model.
    assert strategy.base.structure(fleet, 3)[2][~trained].max() < 0


def test_clients_never_seen_do_without_a_level_that_would_raise_their_loss():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(made(fleet, **TWO_LEVELS), 1.0)
    femam.base.open(femam.base.levels[0])
    femam.base.levels[1] = Models(np.float32([[2.5], [-40.0]]))
    # Client 0 (y = 2): alone (1 - 2)^2 = 1; with 2.5, (1.75 - 2)^2: joins. Client 1 (y = -2): alone 9; with 2.5,
    # 3.75^2 = 14; with -40, 17.5^2: holds nothing of this level.
    held = femam.base.structure(fleet.everyone, 2)[1]
    assert held[0] == 0 and held[1] < 0
    femam.base.options.prune = "none"
    assert femam.base.structure(fleet.everyone, 2)[1].tolist() == [0, 0]


def test_femam_clusters_absent_clients_by_what_is_known_of_them():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, 2.2)], [(1.0, -2.0)], [(1.0, -2.2)]], lr=0.1)
    femam = with_global(made(fleet, mu=0.0, levels=[1, 2], personal=False, schedule=[1, 5], alone=0), 0.0)
    play(femam, fleet, 2)
    groups = femam.base.rows[1].copy()
    assert groups[0] == groups[1] != groups[2] == groups[3]
    fleet.begin(3)
    femam.round(fleet.select([0, 1]), 3)  # two of one group: alone they would be a cluster each
    fleet.commit()
    assert femam.base.rows[1].tolist() == groups.tolist()


def test_femam_features_are_the_sum_of_a_clients_own_updates():
    fleet = scalar_fleet(TWO, lr=0.1)
    femam = with_global(
        made(fleet, mu=0.0, levels=[1, 2], personal=False, schedule=[1, 5], features="updates", alone=0), -0.2
    )
    play(femam, fleet, 2)
    # from -0.2 to 0.02 and to -0.38, as above
    assert femam.base.points.ravel().tolist() == pytest.approx([0.22, -0.18], rel=1e-5)
    play(femam, fleet, 3)
    # gradients (-0.2 + 0.02) / 2 - 2 = -2.09 and (-0.2 - 0.38) / 2 + 2 = 1.71 at the own cluster's model
    assert femam.base.points.ravel().tolist() == pytest.approx([0.429, -0.351], rel=1e-5)


@pytest.mark.parametrize("features", ["changes", "updates"])
def test_femam_clients_train_a_new_level_alone_before_it_is_clustered(features):
    fleet = scalar_fleet(TWO, lr=0.1)
    options = {
        "mu": 0.0,
        "levels": [1, 2],
        "personal": False,
        "schedule": [1, 4],
        "features": features,
        "alone": 2,
    }
    femam = with_global(made(fleet, **options), -0.2)
    play(femam, fleet, 2)
    # from -0.2 to 0.02 and to -0.38, as above; nobody has a model of the level yet
    assert femam.base.points.ravel().tolist() == pytest.approx([0.22, -0.18], rel=1e-5)
    assert femam.base.rows[1].tolist() == [-1, -1] and "level 2 alone" in str(list(fleet.snapshot()[0][0]))
    before = fleet.evaluate(femam.prediction(fleet))["loss"]
    assert before.tolist() == pytest.approx([(-0.2 - 2.0) ** 2, (-0.2 + 2.0) ** 2], rel=1e-5)
    play(femam, fleet, 3)
    # each from its own copy: gradients (-0.2 + 0.02) / 2 - 2 = -2.09 and (-0.2 - 0.38) / 2 + 2 = 1.71
    assert femam.base.points.ravel().tolist() == pytest.approx([0.429, -0.351], rel=1e-5)
    assert sorted(femam.base.rows[1].tolist()) == [0, 1]
    own = [femam.base.levels[1].values[k, 0] for k in femam.base.rows[1]]
    assert own == pytest.approx([0.229, -0.551], rel=1e-5)
    assert "alone" not in str(list(fleet.snapshot()[0][0]))


def test_femam_finds_rotations_also_where_the_global_model_has_converged():
    settings = ("method=femam", "clients=16", "clusters=2", "data.rotations=2", "model.hidden=[32]", "local.steps=10",
                "rounds=24", "femam.levels=[1,2]", "femam.personal=false", "femam.schedule=[14,10]",
                "femam.features=changes", "local.lr=0.05", "local.momentum=0.9", "evaluation.every=24")  # fmt: skip
    found = [run(session_of(*settings, f"seed={seed}"), 24)[-1].metrics["ari"] for seed in (0, 1)]
    assert found == [1.0, 1.0]


# --- equal bits -------------------------------------------------------------------------------------------

LEVELS = (
    "method=femam",
    "rounds=6",
    "femam.levels=[1,2]",
    "femam.schedule=[1,4]",
    "femam.alone=2",
    "participation.fraction=0.75",
)


def test_equal_bits_in_any_layout_and_after_a_restore():
    whole = session_of(*LEVELS)
    reports = run(whole, 6)
    expected = outcome(whole, reports)
    blocks = [[0, 3], [1], [2, 4, 5, 7], [6]]
    for stop in (2, 3, 5):  # before a level is added, while one is trained, in the personal one
        first = session_of(*LEVELS, blocks=blocks)
        before = run(first, stop)
        kept = checkpoint_of(first)
        kept = Checkpoint(unpack(*pack(kept.server)), kept.clients)  # as a file brings it back
        second = session_of(*LEVELS, checkpoint=kept)
        assert outcome(second, before + run(second, 6 - stop, first=stop + 1)) == expected


# --- ground-truth structure ------------------------------------------------------------------------------------


# Two rotations, in each two groups with four classes each; lr 0.1 with 20 steps of softmax regression.
GROUPED = (
    "clients=12", "clusters=4", "data.rotations=2", "partition=cluster_n_class", "partition.groups=4",
    "partition.classes=4", "partition.classes_within=4", "partition.validation=0.1", "model=linear",
    "local.lr=0.1", "local.steps=20",
)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])  # 0 to 7 do
def test_ground_truth_groups_are_found_and_two_levels_are_better_than_one(seed):
    settings = (*GROUPED, f"seed={seed}", "rounds=5", "femam.levels=[1,0]", "femam.schedule=[3,2]")
    session = session_of("method=femam", *settings)
    reports = run(session, 5)
    assert [report.metrics["levels"] for report in reports] == [1, 1, 1, 2, 2]
    assert reports[-1].metrics["ari"] >= 0.9
    assert reports[-1].metrics["macro_accuracy"] > reports[2].metrics["macro_accuracy"] + 0.03


def test_three_levels_are_better_than_fedavg_with_as_many_rounds():
    levels = session_of("method=femam", *GROUPED, "rounds=6", "femam.levels=[1,0]", "femam.schedule=[3,2]")
    fedavg = session_of("method=fedavg", *GROUPED, "rounds=6")
    reports, plain = run(levels, 6), run(fedavg, 6)
    assert reports[-1].metrics["macro_accuracy"] > plain[-1].metrics["macro_accuracy"] + 0.03
    assert reports[-1].metrics["validation_macro_loss"] < plain[-1].metrics["validation_macro_loss"] - 0.1


# Two coarse groups with three classes each, in them four fine groups with one more class each.
NESTED = (
    "method=femam", "clients=16", "clusters=4", "data.rotations=1", "partition=multilevel",
    "partition.level_groups=[2,4]", "partition.level_classes=[3,1]", "partition.validation=0.1", "model=linear",
    "local.lr=0.1", "local.steps=20", "rounds=6", "femam.levels=[1,2,4]", "femam.schedule=[2,2,2]",
    "femam.personal=false", "femam.prune=none",
)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])  # 0 to 7 do
def test_levels_found_are_the_true_levels(seed):
    session = session_of(*NESTED, f"seed={seed}")
    reports = run(session, 6)
    true, found = session.server.setup.levels, session.server.method.base.rows
    coarse, fine = (len(np.unique(level)) for level in true)
    assert (coarse, fine) == (2, 4)
    assert adjusted_rand_score(true[0], found[1]) == 1.0  # of two models, a coarse group each
    assert adjusted_rand_score(true[1], found[2]) == 1.0  # of four models, a fine group each
    assert reports[3].metrics["ari_by_level"][0] == 1.0 and reports[5].metrics["ari_by_level"][1] == 1.0
    one, two, three = (reports[last].metrics["macro_accuracy"] for last in (1, 3, 5))
    assert one + 0.1 < two < three
