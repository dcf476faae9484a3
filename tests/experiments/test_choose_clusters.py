"""Choosing K: FeSEM's recipe on ground-truth groups, as a function and as `clusters=auto`."""

import pytest

from archipelago import open_run
from archipelago.core.errors import UserError
from archipelago.experiments import choose_clusters as module
from archipelago.experiments.choose_clusters import choose_clusters
from archipelago.experiments.runner import run_experiment
from tests.support.experiments import config_of

GOOD = (
    "method=fesem",
    "clients=12",
    "data.rotations=3",
    "local.steps=15",
    "local.lr=0.1",
    "model.hidden=[32]",
)


def test_more_clusters_than_one_are_preferred_and_the_choice_is_the_least_validation_loss():
    seen = []
    choice = choose_clusters(config_of(*GOOD), [1, 2, 3, 6], seen.append)
    assert [trial.clusters for trial in seen] == [1, 2, 3, 6]
    best = min(choice.trials, key=lambda trial: trial.loss)
    assert choice.clusters == best.clusters > 1
    assert f"clusters={choice.clusters} was chosen" in choice.sentence


def test_a_large_federation_is_sampled(monkeypatch):
    monkeypatch.setattr(module, "SAMPLED_CLIENTS", 5)
    sizes = []
    original = module.make_plan
    monkeypatch.setattr(
        module,
        "make_plan",
        lambda config, federation: (sizes.append(config.clients), original(config, federation))[1],
    )
    choose_clusters(config_of(*GOOD), [2])
    assert sizes == [5]


def test_auto_runs_with_the_choice_and_keeps_it_in_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 3)
    path = run_experiment(config_of(*GOOD, "clusters=auto", "rounds=2"), tmp_path / "run", quiet=True)
    run = open_run(path)
    assert run.config["clusters"] in (2, 3) and run.config["choose_clusters"] is False
    assert any("was chosen" in text for text in run.events["text"])


def test_what_cannot_be_chosen_is_refused():
    for method in ("method=fedavg", "ensemble=[ifca,fedavg]"):
        with pytest.raises(UserError, match="clustered method with clusters=auto"):
            config_of(method, "clusters=auto")
    with pytest.raises(UserError, match="at least 4 clients"):
        choose_clusters(config_of("method=ifca", "clients=3"))


def test_cfl_finds_its_number_by_itself():
    with pytest.raises(UserError, match="got cfl, which finds their number"):
        choose_clusters(config_of("method=cfl"))


@pytest.mark.parametrize(
    ("method", "warmup", "rounds_of_warmup"),
    [("ifca+cam", 0.3, 1), ("fesem+cam", 0.3, 1), ("ifca+cam", 0.99, 2), ("ifca+cam", 0.0, 0)],
)
def test_cam_is_judged_with_a_warm_up_and_with_clusters_after_it(
    method, warmup, rounds_of_warmup, monkeypatch
):
    sessions = []

    class Seen(module.InProcessSession):
        def __init__(self, plan):
            super().__init__(plan)
            sessions.append(self)

    monkeypatch.setattr(module, "InProcessSession", Seen)
    config = config_of(f"method={method}", f"cam.warmup={warmup}", "rounds=10")
    choose_clusters(config, [2])
    [session] = sessions
    [cam] = session.server.method.addons
    assert cam.beta == rounds_of_warmup < module.ROUNDS == session.server.method.base.number
    assert (session.server.method.base.assignment >= 0).all()
    assert config.cam.warmup == warmup  # what the run itself does is not changed
