"""Fine-tuning, ensembles and clients held out."""

import numpy as np
import pytest

from archipelago.strategies.base import Context
from archipelago.strategies.ensemble import build_ensemble, expand
from archipelago.strategies.references import Prediction
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet


def test_fine_tuning_by_hand_and_the_base_never_sees_it():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)]], lr=0.1)
    strategy = method_of("fedavg+finetune", fleet, rounds=1)
    strategy.base.model = np.float32([1.0])
    strategy.round(fleet, 1)  # the mean of 1.2 and 0.4 is 0.8
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    # own steps from 0.8: 0.8 + 0.24 = 1.04 and 0.8 - 0.56 = 0.24
    assert mse.tolist() == pytest.approx([(1.04 - 2) ** 2, (0.24 + 2) ** 2], rel=1e-5)
    assert strategy.base.model.tolist() == pytest.approx([0.8])


def test_only_the_evaluations_of_the_final_figure_are_fine_tuned():
    plain, tuned = session_of("method=fedavg", "rounds=5"), session_of("method=fedavg+finetune", "rounds=5")
    base, fine = run(plain, 5), run(tuned, 5)
    same = [np.array_equal(a.clients["loss"], b.clients["loss"]) for a, b in zip(base, fine, strict=True)]
    assert same == [True, True, False, False, False]
    assert np.array_equal(plain.server.method.base.model, tuned.server.method.base.model)


def test_fine_tuning_helps_under_heterogeneity_and_both_parts_of_cam_are_tuned():
    setting = ("partition=n_class", "data.rotations=1", "rounds=3", "local.steps=10", "evaluation.train=true")
    plain, tuned = session_of("method=fedavg", *setting), session_of("method=fedavg+finetune", *setting)
    assert run(tuned, 3)[-1].metrics["micro_accuracy"] > run(plain, 3)[-1].metrics["micro_accuracy"]
    cam = session_of("method=ifca+cam+finetune", "rounds=4")
    run(cam, 4)
    states = checkpoint_of(cam).clients
    assert all({"model/finetune 0", "model/finetune 1"} <= state.keys() for state in states.values())


def test_fine_tuning_is_refused_where_it_means_nothing():
    for method in ("local+finetune", "ifca+finetune+cam"):
        with refused("add-on", addon="finetune", base=method.split("+")[0]):
            config_of(f"method={method}")


def test_members_are_spelled_out():
    assert expand(["fedavg*3", "ifca"]) == ["fedavg"] * 3 + ["ifca"]
    with refused("wrong-form", setting="ensemble", given="fedavg*x"):
        expand(["fedavg*x"])


def test_ensemble_of_one_is_the_method():
    """FedAvg in the member's own name space, trained by hand."""
    other = session_of("method=fedavg").fleet.named("member 0")
    model = None
    for number in (1, 2):
        other.begin(number)
        model = other.initial(1)[0] if model is None else model
        model = other.train(start=model).average(weights=other.sizes)
        other.commit()
    found = other.evaluate(Prediction([model]))
    for combine in ("logit_sum", "logit_mean"):
        one = session_of("ensemble=[fedavg]", f"combine={combine}")
        reports = run(one, 2)
        assert np.array_equal(one.server.method.members[0].base.model, model)
        assert np.array_equal(reports[-1].clients["loss"], found["loss"])


def test_members_draw_and_drop_for_themselves():
    session = session_of("ensemble=[random*2]", "clusters=4")
    first, second = session.server.method.members
    assert not np.array_equal(first.base.assignment, second.base.assignment)
    session = session_of("ensemble=[fedprox,fedavg]", "fedprox.mu=1e30", "local.steps=4")
    start = session.server.method.members[1].base.model.copy()
    session.run_round(1)
    assert not np.array_equal(session.server.method.members[1].base.model, start)


def test_members_are_independent_and_add_their_logits():
    session = session_of("ensemble=[fedavg*2,ifca]")
    reports = run(session, 2)
    first, second, _ = session.server.method.members
    assert not np.array_equal(first.base.model, second.base.model)
    assert reports[-1].metrics["cluster_sizes"] is not None
    alone = session_of("ensemble=[fedavg,ifca]")
    run(alone, 2)
    assert np.array_equal(
        alone.server.method.members[0].base.model, first.base.model
    )  # whoever else is on board


def test_finetune_after_feddane_begins_with_a_new_optimizer():
    """What FedDANE's momentum holds is of gradients with a correction, which fine-tuning has not."""

    def last(*more):
        return run(session_of(*more, "local.momentum=0.9", "rounds=2"), 2)[-1].clients["loss"]

    for method, alike in (("feddane+finetune", True), ("fedavg+finetune", False)):
        fresh, continued = last(f"method={method}", "finetune.fresh=true"), last(f"method={method}")
        assert np.array_equal(fresh, continued) == alike, method


def test_soft_vote_of_several_runs_beats_its_members_on_average():
    session = session_of("ensemble=[fedavg*4]", "combine=logit_mean", "data.rotations=1", "local.steps=8")
    together = run(session, 4)[-1].metrics["micro_loss"]
    fleet = session.fleet.everyone
    alone = [fleet.evaluate(Prediction([m.base.model]))["loss"].mean() for m in session.server.method.members]
    assert together < np.mean(alone)


@pytest.mark.parametrize("ensemble", ["[fedavg,ifca]", "[fedavg+finetune,ifca+finetune]", "[local,fedavg*2]"])
def test_ensembles_survive_layouts_and_restores(ensemble):
    setting = (f"ensemble={ensemble}",)
    whole = session_of(*setting)
    reports = run(whole, 4)
    half = session_of(*setting)
    first = run(half, 2)
    again = session_of(*setting, blocks=[[0, 4], [1, 2, 3, 5, 6, 7]], checkpoint=checkpoint_of(half))
    assert outcome(again, first + run(again, 2, first=3)) == outcome(whole, reports)


def test_combinations_that_make_no_sense_are_refused():
    for combine in ("vote", "probability_mean"):
        with refused("cannot-be-added", member="ifca+cam"):
            config_of("ensemble=[ifca+cam,fedavg]", f"combine={combine}")
        with refused("cannot-be-added", member="femam"):
            config_of("ensemble=[fedavg,femam]", f"combine={combine}")
    with refused("cannot-be-added", member="fedem"):
        config_of("ensemble=[fedavg,fedem]")
    assert config_of("ensemble=[fedavg,femam,ifca+cam]").ensemble


def test_two_members_by_hand():
    # w = 1 and w = -3 on (1, 2): their logits add up to -2, their mean is -1.
    for combine, predicted in (("logit_sum", -2.0), ("logit_mean", -1.0)):
        fleet = scalar_fleet([[(1.0, 2.0)]])
        ensemble = build_ensemble(["fedavg*2"], combine, {}, Context(clients=1))
        ensemble.setup(fleet)
        for member, w in zip(ensemble.members, (1.0, -3.0), strict=True):
            member.base.model = np.float32([w])
        found = fleet.evaluate(ensemble.prediction(fleet))
        assert found["mse"].tolist() == found["loss"].tolist() == pytest.approx([(predicted - 2) ** 2])


def test_one_round_of_two_members_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)] * 3], lr=0.1)
    ensemble = build_ensemble(["fedavg", "fedavg"], "logit_sum", {}, Context(clients=2))
    ensemble.setup(fleet)
    first, second = ensemble.members
    first.base.model, second.base.model = np.float32([1.0]), np.float32([-2.0])
    ensemble.round(fleet, 1)
    # Each by itself, with clients of 1 and 3 samples: 1.2 and 0.4 come to 0.6; -1.2 and -2 come to -1.8.
    assert first.base.model.tolist() == pytest.approx([0.6], rel=1e-6)
    assert second.base.model.tolist() == pytest.approx([-1.8], rel=1e-6)
    # Their outputs add up to -1.2 at x = 1.
    mse = fleet.evaluate(ensemble.prediction(fleet))["mse"]
    assert mse.tolist() == pytest.approx([3.2**2, 0.8**2], rel=1e-5)


def test_held_out_clients_never_train_and_are_adopted():
    session = session_of("method=ifca", "holdout_clients=0.25", "clients=12", "local.steps=10", "local.lr=0.1",
                         "model.hidden=[32]")  # fmt: skip
    reports = run(session, 6)
    held = session.server.held_out
    assert len(held) == 3 and (session.server.method.base.assignment[held] == -1).all()
    states = checkpoint_of(session).clients
    assert all(not states[int(client)] for client in held)
    assert reports[-1].metrics["participants"] == 9
    assert np.array_equal(np.flatnonzero(reports[-1].clients["held_out"]), held)
    labels = session.server.method.labels(session.fleet.select(np.arange(12)))
    groups = session.server.setup.groups
    assert all(labels[h] in labels[np.setdiff1d(np.flatnonzero(groups == groups[h]), held)] for h in held)
    assert reports[-1].metrics["holdout_micro_accuracy"] > 0.6


@pytest.mark.parametrize(
    "method", ["fedavg", "fesem", "wecfl+cam", "fedsoft", "fedem", "femam", "ditto", "robust"]
)
def test_every_kind_of_method_says_what_held_out_clients_get(method):
    session = session_of(f"method={method}", "holdout_clients=0.25", "clients=8")
    report = run(session, 2)[-1]
    assert np.isfinite(report.metrics["holdout_micro_accuracy"])
    assert not any(checkpoint_of(session).clients[int(client)] for client in session.server.held_out)
