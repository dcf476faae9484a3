"""New clients, with and without labels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.session import InProcessSession
from archipelago.core.errors import UserError
from archipelago.experiments.config import load_config
from archipelago.experiments.new_clients import NewClient, adopt
from archipelago.experiments.runner import run_experiment
from archipelago.strategies import METHODS, fedem, fedrc, fedsoft
from archipelago.strategies.adoption import AdoptionRule, entropies, sample_entropies, surest
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Indices, Models
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, outcome, plan_of, run, session_of

MORE = ("method=ifca", "clients=12", "rounds=6", "holdout_clients=0.25", "local.steps=8", "model.hidden=[16]")


def of_new_clients(session: Any) -> tuple[np.ndarray, np.ndarray]:
    """(the clusters that held-out clients get, their ground-truth groups)."""
    server = session.server
    fleet = server.fleet.select(server.held_out)
    return server.method.labels(fleet), server.setup.groups[server.held_out]


def test_entropies_by_hand() -> None:
    class Client:
        classes: int | None = 2

        def unlabelled(self) -> Client:
            return self

        def outputs(self, model: np.ndarray) -> np.ndarray:
            return model.reshape(1, 2)

    models = np.float32([[0, 0], [3, 0]])
    p = 1 / (1 + np.exp(-3.0))
    sure = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    assert entropies(Client(), models) == pytest.approx([np.log(2), sure])  # type: ignore[arg-type]
    with refused("needs-classes", says="adoption=entropy", setting="adoption"):
        entropies(type("Line", (Client,), {"classes": None})(), models)  # type: ignore[arg-type]
    # On top of a model that says the opposite, the second one is as unsure as the first was.
    assert entropies(Client(), models, np.float32([-3, 0]))[1] == pytest.approx(np.log(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["oracle", pytest.param("oracle+cam", marks=pytest.mark.full)])
def test_adoption_by_entropy_finds_the_groups_and_looks_at_no_label(method: str) -> None:
    plan = plan_of(*MORE[1:], f"method={method}", "adoption=entropy")
    y = plan.y.copy()
    held = plan.server.held_out
    for client in held:
        y[plan.clients[client].train] = (y[plan.clients[client].train] + 3) % 10
    found = []
    for each in (plan, dataclasses.replace(plan, y=y)):
        session = InProcessSession(each)
        run(session, 4)
        found.append(of_new_clients(session))
    clusters, groups = found[0]
    assert np.array_equal(clusters, found[1][0])  # other labels, the same clusters
    trained = session.server.method.assignment
    population = session.server.population
    for g in np.unique(groups):  # each new client joins the cluster that most of its group is in
        main = np.bincount(trained[population][session.server.setup.groups[population] == g]).argmax()
        assert (clusters[groups == g] == main).all()


def without_labels(method: str, *more: str) -> tuple[np.ndarray, np.ndarray]:
    """What held-out clients predict under adoption=entropy, with their labels and with others."""
    plan = plan_of(*MORE[1:], f"method={method}", "adoption=entropy", *more)
    y = plan.y.copy()
    for client in plan.server.held_out:
        y[plan.clients[client].train] = (y[plan.clients[client].train] + 3) % 10
    found = []
    for each in (plan, dataclasses.replace(plan, y=y)):
        session = InProcessSession(each)
        run(session, 2)
        server = session.server
        fleet = server.fleet.select(server.held_out)
        weights = server.method.prediction(fleet).weights
        labels = server.method.labels(fleet)
        found.append(np.concatenate([labels[:, None], *([] if weights is None else [weights])], axis=1))
    return found[0], found[1]


def accepts_entropy(name: str) -> bool:
    return bool(METHODS.find(name).clustered)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in ("fedem", "fedrc", "fedsoft") else pytest.mark.full)
        for name in sorted(METHODS)
        if accepts_entropy(name)
    ],
)
def test_adoption_by_entropy_reads_no_label_in_any_base_that_accepts_it(method: str) -> None:
    with_labels, with_others = without_labels(method)
    assert np.array_equal(with_labels, with_others)


@pytest.mark.parametrize("method", ["fedem", "fedrc", "fedsoft"])
def test_adoption_of_soft_clusters_by_hand(method: str) -> None:
    """Two inputs, two models: the first is sure of one of them and torn about the other, the second torn about both."""
    p = 1 / (1 + np.exp(-3.0))
    entropy = np.array([[-(p * np.log(p) + (1 - p) * np.log(1 - p)), np.log(2)], [np.log(2), np.log(2)]])
    client = SimpleNamespace(classes=2, unlabelled=lambda: client, outputs=lambda model: model.reshape(2, 2))
    models = np.float32([[3, 0, 0, 0], [0, 0, 0, 0]])
    assert sample_entropies(client, models) == pytest.approx(entropy)  # type: ignore[arg-type]
    # One E-step from a uniform pi: exp(-H) of each input, normalised, then the mean of the two.
    first = np.exp(-entropy[0]) / np.exp(-entropy[0]).sum()
    by_hand = {"fedem": (first + 0.5) / 2, "fedrc": (first + 0.5) / 2, "fedsoft": np.array([1.0, 0.25])}
    guess = {
        "fedem": lambda: fedem.guessed(client, models, 1),  # type: ignore[arg-type]
        "fedrc": lambda: fedrc.guessed(client, models, 1),  # type: ignore[arg-type]
        "fedsoft": lambda: fedsoft.guessed_importance(client, models, 0.25),  # type: ignore[arg-type]
    }
    assert guess[method]() == pytest.approx(by_hand[method])


def test_adoption_by_labels_is_what_it_was_and_another_rule_changes_only_new_clients() -> None:
    own, free = session_of(*MORE), session_of(*MORE, "adoption=entropy")
    mine, theirs = run(own, 2), run(free, 2)
    for one, other in zip(mine, theirs, strict=True):
        assert one.metrics["micro_accuracy"] == other.metrics["micro_accuracy"]
        assert np.array_equal(one.assignment, other.assignment)
    assert "holdout_micro_accuracy" in theirs[0].metrics


class Last(AdoptionRule):
    """Of a user's own: the last cluster."""

    needs_labels = False

    def assign(self, method: Any, fleet: FleetView) -> Indices:
        return np.full(len(fleet.ids), method.K - 1)


@pytest.mark.parametrize("method", ["ifca", "fedem"])
def test_adoption_rule_of_ones_own_by_import_path(method: str) -> None:
    session = session_of(*MORE[1:], f"method={method}", f"adoption={__name__}.Last")
    run(session, 1)
    assert of_new_clients(session)[0].tolist() == [1, 1, 1]
    if method == "fedem":  # a soft cluster is all of the one that the rule says
        fleet = session.server.fleet.select(session.server.held_out)
        assert session.server.method.prediction(fleet).weights.tolist() == [[0.0, 1.0]] * 3


def test_adoption_by_entropy_is_the_same_on_every_layout_and_after_resume() -> None:
    more = (*MORE, "adoption=entropy")
    whole = session_of(*more)
    reports = run(whole, 3)
    packed = session_of(*more, blocks=[[0, 4, 8, 9], [1, 10], [2, 3, 5, 6, 7, 11]])
    earlier = run(packed, 1)
    resumed = session_of(*more, checkpoint=checkpoint_of(packed))
    assert outcome(resumed, [*earlier, *run(resumed, 2, first=2)]) == outcome(whole, reports)


def test_flux_assigns_by_its_descriptors_and_not_by_entropy() -> None:
    session = session_of(*MORE[1:], "method=flux", "clusters=4", "adoption=entropy")
    run(session, 3)
    method = session.server.method.base
    fleet = session.server.fleet.select(session.server.held_out)
    assert method.K > 1 and np.array_equal(method.labels(fleet), method.adopt(fleet))
    method.clusters = Models(np.roll(method.clusters.values, 1, axis=0))  # other models, the same descriptors
    assert np.array_equal(method.labels(fleet), method.adopt(fleet))


def test_adoption_without_labels_is_by_the_descriptor_that_clients_are_clustered_by() -> None:
    described = (*MORE[1:], "method=fesem", "fesem.features=moments", "clusters=2", "adoption=entropy")
    session = session_of(*described)
    run(session, 2)
    clusters, groups = of_new_clients(session)
    method = session.server.method.base
    members = session.server.population
    own = method.assignment[members]
    for c, group in zip(clusters, groups, strict=True):  # the cluster of its ground-truth group
        assert c == np.bincount(own[session.server.setup.groups[members] == group]).argmax()
    method.clusters = Models(np.roll(method.clusters.values, 1, axis=0))  # other models, the same descriptors
    assert np.array_equal(of_new_clients(session)[0], clusters)
    method.points = -method.points  # other descriptors of those who trained
    assert not np.array_equal(of_new_clients(session)[0], clusters)
    with_labels, with_others = without_labels("fesem", "fesem.features=moments", "clusters=2")
    assert np.array_equal(with_labels, with_others)


def test_adoption_by_a_descriptor_of_labels_or_by_models_is_by_entropy() -> None:
    for features in ("label_shares", "classifier"):
        session = session_of(*MORE[1:], "method=wecfl", f"wecfl.features={features}", "adoption=entropy")
        run(session, 1)
        method = session.server.method.base
        fleet = session.server.fleet.select(session.server.held_out)
        assert np.array_equal(method.labels(fleet), surest(method, fleet))


def test_feddrift_new_clients_join_no_cluster_that_is_isolated() -> None:
    session = session_of(*MORE[1:], "method=feddrift", "clusters=3", "adoption=entropy")
    run(session, 1)
    method = session.server.method.base
    sure, torn = method.clusters.values[0] * 3, method.clusters.values[0] * 0  # larger outputs are surer
    method.K, method.clusters = 2, Models(np.stack([torn, sure]))
    method.until = np.array([0, 0])
    assert of_new_clients(session)[0].tolist() == [1, 1, 1]
    method.until = np.array([0, 5])  # the second is alone until round 5
    assert of_new_clients(session)[0].tolist() == [0, 0, 0]


def test_adopt_takes_clients_without_labels(tmp_path: Path) -> None:
    config = config_of("method=ifca", "rounds=3", "local.steps=8", f"storage={tmp_path}", "name=run")
    run_experiment(config, tmp_path / "run")
    plan = plan_of("method=ifca", "rounds=3", "local.steps=8")
    held = plan.clients[0]
    given = {"x_train": plan.x[held.train], "x_test": plan.x[held.test], "y_test": plan.y[held.test]}
    bare, labelled = NewClient(y_train=None, **given), NewClient(y_train=plan.y[held.train], **given)
    table = adopt(tmp_path / "run", [bare], adoption="entropy")
    assert (
        table["cluster"].tolist()
        == adopt(tmp_path / "run", [labelled], adoption="entropy")["cluster"].tolist()
    )
    assert 0 <= table["accuracy"][0] <= 1
    with refused("needs-labels", setting="adoption", given="labels"):
        adopt(tmp_path / "run", [bare])
    with refused("incompatible", settings=("adoption", "finetune")):
        adopt(tmp_path / "run", [bare], adoption="entropy", finetune=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["adoption=entropy"], "holdout_clients > 0"),
        (["adoption=entropie", "holdout_clients=0.2"], "entropy"),
        (["adoption=entropy", "holdout_clients=0.2", "method=fedavg"], "fedavg"),
        (["adoption=entropy", "holdout_clients=0.2", "method=ifca+finetune"], "fine-tuning"),
    ],
)
def test_adoption_mistakes_are_one_sentence(given: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(overrides=given, env={})
    assert expected in str(caught.value) and "\n" not in str(caught.value)
