"""Clients that come after the training, for every method."""

import numpy as np
import pytest

from archipelago import NewClient, adopt, open_run
from archipelago.data import build_federation
from archipelago.experiments.runner import run_experiment
from archipelago.strategies import METHODS
from tests.support.errors import refused
from tests.support.experiments import config_of

SETTINGS = ("clients=8", "clusters=2", "data.rotations=2", "checkpoint.every=1")


def rotated_pair(config):
    """Two new clients of two ground-truth groups: samples of clients of the run stand in for them."""
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    found = []
    for group in (0, 1):
        client = federation.clients[int(np.flatnonzero(federation.groups == group)[0])]
        parts = [federation.x[client.train], federation.y[client.train], federation.x[client.test],
                 federation.y[client.test]]  # fmt: skip
        found.append(NewClient(*parts))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a method, made once."""
    folder, runs = tmp_path_factory.mktemp("runs"), {}

    def run(method, *settings):
        key = (method, settings)
        if key not in runs:
            rounds = () if any("rounds=" in setting for setting in settings) else ("rounds=2",)
            config = config_of(f"method={method}", *SETTINGS, *rounds, *settings)
            runs[key] = config, run_experiment(config, folder / str(len(runs)), quiet=True)
        return runs[key]

    return run


@pytest.mark.parametrize("method", [*METHODS, "ifca+cam", "fesem+cam", "wecfl+con+cks"])
def test_adopt_gives_a_new_client_something_of_every_method(made, method):
    more = ("model=cnn_digits",) if "cks" in method else ()
    config, run = made(method, *more)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    table = adopt(run, rotated_pair(config))
    assert table["client"].tolist() == [0, 1] and np.isfinite(table["loss"]).all()
    assert ("cluster" in table) == METHODS.find(method.split("+")[0]).clustered
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_new_clients_find_the_cluster_of_their_group(made):
    learned = ("rounds=6", "local.steps=10", "local.lr=0.1", "model.hidden=[32]")
    for method in ("ifca", "fesem", "wecfl+cam"):
        config, run = made(method, *learned)
        last = open_run(run).assignments.groupby("round").get_group(6).sort_values("client")["cluster"]
        federation = build_federation(config.data, config.partition, config.clients, config.seed)
        theirs = [int(np.bincount(last[federation.groups == group]).argmax()) for group in (0, 1)]
        assert sorted(theirs) == [0, 1], f"{method} has not found the groups"
        table = adopt(run, rotated_pair(config))
        assert table["cluster"].tolist() == theirs
        assert (table["accuracy"] > 0.6).all()


def test_adopt_fine_tunes_for_the_new_client_alone(made):
    config, run = made("fedavg")
    pair = rotated_pair(config)
    plain, tuned = adopt(run, pair), adopt(run, pair, finetune=True)
    assert (tuned["loss"] < plain["loss"]).all()
    assert adopt(run, pair[:1], finetune=True)["loss"][0] == tuned["loss"][0]  # whoever else is adopted
    for method in ("femam", "fedem"):
        with refused("add-on", base=method):
            adopt(made(method)[1], pair, finetune=True)


@pytest.mark.parametrize("method", ["local", "ditto", "fedper", "fedsoft", "ifca", "ifca+cam"])
def test_adopt_with_fine_tuning_lowers_the_training_loss(made, method):
    config, run = made(method)
    # Tested on what they train on.
    pair = [NewClient(one.x_train, one.y_train, one.x_train, one.y_train) for one in rotated_pair(config)]
    plain, tuned = adopt(run, pair), adopt(run, pair, finetune=True)
    assert (tuned["loss"] < plain["loss"]).all()


def test_adopt_answers_mistakes_with_one_sentence(made):
    config, run = made("fedavg")
    good = rotated_pair(config)[0]
    wrong = NewClient(good.x_train[:, :, :4], good.y_train, good.x_test, good.y_test)
    with refused("wrong-shape", client=1):
        adopt(run, [good, wrong])
    with refused("unequal-lengths", client=0):
        adopt(run, [NewClient(good.x_train, good.y_train, good.x_test, good.y_test[:-1])])
    with refused("no-clients"):
        adopt(run, [])
