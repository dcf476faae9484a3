"""Choosing K: FeSEM's recipe on ground-truth groups, as a function and as `clusters=auto`."""

import numpy as np
import pytest

from archipelago import open_run
from archipelago.experiments import choose_clusters as module
from archipelago.experiments.choose_clusters import choose_clusters
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from tests.support.errors import refused
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
    allowed = [trial.clusters for trial in choice.trials if trial.loss <= best.loss + best.error]
    assert choice.clusters == min(allowed) > 1
    assert all(len(trial.losses) == module.DRAWS and len(set(trial.losses)) > 1 for trial in choice.trials)
    assert f"clusters={choice.clusters} was chosen" in choice.sentence
    assert f"{choice.agreement[0]} of {module.DRAWS} choices" in choice.sentence


def test_how_sure_a_choice_is():
    def choice(table):
        trials = tuple(module.Trial(k, float(np.mean(each)), 0.5, None, each) for k, each in table.items())
        return module.Choice(module.within_one_error(table), trials)

    sure = choice({1: (2.0, 2.1, 2.0), 2: (1.0, 0.98, 0.99), 4: (1.2, 1.1, 1.2)})
    assert sure.clusters == 2 and sure.agreement == (3, 3)
    # 4 is the best by far in two draws, and 2 in the third: without it, 4 has no spread and 2 is out of reach.
    unsure = choice({2: (1.0, 1.0, 0.5), 4: (0.4, 0.4, 1.6)})
    assert unsure.clusters == 2 and unsure.agreement == (2, 3)


def test_a_choice_says_how_many_of_its_clusters_are_in_use():
    for in_use, said in (((4, 5), "clusters=6 (4 to 5 of them in use) was chosen"),
                         ((5, 5), "clusters=6 (5 of them in use) was chosen"),
                         ((6, 6), "clusters=6 was chosen")):  # fmt: skip
        assert module.Choice(6, (module.Trial(6, 1.0, 0.5, None, (1.0, 1.0), in_use),)).sentence.startswith(
            said
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "seed", "most"), [("fesem", 0, 4), ("ifca", 0, 6), ("ifca", 1, 6), ("ifca", 2, 6)]
)
def test_four_groups_are_given_four_clusters_in_use(method, seed, most):
    asked = [
        "data=digits",
        "data.rotations=4",
        "partition=iid",
        "clients=20",
        "model=mlp",
        "local.engine=compiled",
    ]
    choice = choose_clusters(
        load_config(None, [*asked, "fleet.backend=in_process", f"method={method}", f"seed={seed}"])
    )
    (trial,) = [each for each in choice.trials if each.clusters == choice.clusters]
    assert 4 <= choice.clusters <= most and len(trial.in_use) == module.DRAWS
    assert all(abs(used - 4) <= 1 for used in trial.in_use)


def test_one_cluster_is_tried_where_the_method_takes_it(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 2)
    monkeypatch.setattr(module, "ROUNDS", 2)
    alike = choose_clusters(config_of("method=ifca", "data.rotations=1", "partition=iid", "local.steps=2"))
    assert [trial.clusters for trial in alike.trials] == [1, 2]
    contrast = choose_clusters(
        config_of("method=ifca+con", "data.rotations=1", "partition=iid", "local.steps=2")
    )
    assert [trial.clusters for trial in contrast.trials] == [2]


def test_large_federation_is_sampled(monkeypatch):
    monkeypatch.setattr(module, "SAMPLED_CLIENTS", 5)
    sizes = []
    original = module.make_plan
    monkeypatch.setattr(
        module,
        "make_plan",
        lambda config, federation: (sizes.append(config.clients), original(config, federation))[1],
    )
    choose_clusters(config_of(*GOOD), [2])
    assert sizes == [5] * module.DRAWS


def test_auto_runs_with_the_choice_and_keeps_it_in_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 3)
    path = run_experiment(config_of(*GOOD, "clusters=auto", "rounds=2"), tmp_path / "run", quiet=True)
    run = open_run(path)
    assert run.config["clusters"] in (1, 2, 3) and run.config["choose_clusters"] is False
    assert any("was chosen" in text for text in run.events["text"])


def test_what_cannot_be_chosen_is_refused():
    for method in ("method=fedavg", "ensemble=[ifca,fedavg]"):
        with refused("needs-clusters", setting="clusters=auto"):
            config_of(method, "clusters=auto")
    with refused("too-few-clients", clients=3):
        choose_clusters(config_of("method=ifca", "clients=3"))


def test_cfl_finds_its_number_by_itself():
    with refused("finds-clusters", base="cfl"):
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
    monkeypatch.setattr(module, "DRAWS", 1)
    monkeypatch.setattr(module, "ROUNDS", 3)
    config = config_of(f"method={method}", f"cam.warmup={warmup}", "rounds=10")
    choose_clusters(config, [2])
    [session] = sessions
    [cam] = session.server.method.addons
    assert cam.beta == rounds_of_warmup < module.ROUNDS == session.server.method.base.number
    assert (session.server.method.base.assignment >= 0).all()
    assert config.cam.warmup == warmup  # what the run itself does is not changed
