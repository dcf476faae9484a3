"""Whom an evaluation visits, what it measures of personal models, and metrics by import path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.metrics import client_metrics
from actors.participation import visited
from archipelago.core.metrics import METRICS, Evaluated, client_columns
from archipelago.core.settings import EvaluationSettings
from archipelago.core.vocabulary import describe
from archipelago.experiments.config import check_network, load_config
from archipelago.strategies.references import Prediction
from tests.support.errors import Mistake, mistake, refused
from tests.support.experiments import checkpoint_of, config_of, outcome, run, session_of
from tests.support.methods import compositions
from tests.support.scalar import method_of, scalar_fleet

AUROC = "torchmetrics.classification.MulticlassAUROC"


def spied(session: Any) -> list[list[int]]:
    """The clients that blocks are asked to evaluate, by call."""
    asked: list[list[int]] = []
    for block in session.fleet.blocks:

        def evaluate(request: Any, *arrays: Any, own: Any = block.evaluate) -> Any:
            asked.append(list(request.clients))
            return own(request, *arrays)

        block.evaluate = evaluate
    return asked


# Who is visited


def test_visited_clients_are_drawn_with_the_seed() -> None:
    clients = np.arange(10, 30)
    settings = EvaluationSettings(clients=5)
    first = visited(settings, clients, 0, 1, last=False)
    assert len(first) == 5 and np.isin(first, clients).all() and (np.diff(first) > 0).all()
    assert np.array_equal(first, visited(settings, clients, 0, 7, last=False))
    assert not np.array_equal(first, visited(settings, clients, 1, 1, last=False))
    again = EvaluationSettings(clients=5, redraw=True)
    assert not np.array_equal(*(visited(again, clients, 0, round, last=False) for round in (1, 2)))
    assert np.array_equal(visited(settings, clients, 0, 7, last=True), clients)
    assert len(visited(EvaluationSettings(clients=5, full_last=False), clients, 0, 7, last=True)) == 5
    assert len(visited(EvaluationSettings(clients=0.3), clients, 0, 1, last=False)) == 6
    assert len(visited(EvaluationSettings(clients=0.001), clients, 0, 1, last=False)) == 1


def test_evaluation_visits_only_the_drawn_clients_and_everyone_at_the_end() -> None:
    more = ("rounds=2", "evaluation.clients=3", "partition.validation=0.2", "evaluation.train=true")
    session = session_of(*more)
    asked = spied(session)
    report = session.run_round(1)
    assert report.clients is not None
    drawn = report.clients["client"].tolist()
    assert len(drawn) == 3 and asked == [drawn] * 3  # test, validation, training samples
    whole = session_of("rounds=2", "partition.validation=0.2", "evaluation.train=true").run_round(1)
    for name, column in report.clients.items():
        assert np.array_equal(column, whole.clients[name][drawn], equal_nan=True), name
    accuracy, sizes = report.clients["accuracy"], report.clients["train_samples"]
    assert report.metrics["micro_accuracy"] == pytest.approx(np.average(accuracy, weights=sizes))
    asked.clear()
    last = session.run_round(2)
    assert last.clients is not None and len(last.clients["client"]) == 8
    assert sorted({client for each in asked for client in each}) == list(range(8))


def test_evaluation_of_some_clients_changes_no_training_and_is_the_same_on_every_layout() -> None:
    more = ("rounds=2", "evaluation.clients=0.5", "evaluation.redraw=true", "holdout_clients=0.25")
    whole = session_of(*more)
    reports = run(whole, 2)
    assert {len(each.clients["client"]) for each in reports if each.clients is not None} == {4, 8}
    assert "holdout_micro_accuracy" in reports[0].metrics
    packed = session_of(*more, blocks=[[0, 7], [1, 2, 3], [4, 5, 6]])
    assert outcome(packed, run(packed, 2)) == outcome(whole, reports)
    plain = session_of("rounds=2", "holdout_clients=0.25")
    run(plain, 2)
    for name, models in plain.models()["models"].items():
        assert np.array_equal(models, whole.models()["models"][name])


EVERY = [
    name if name in ("fedem", "ifca+cam+finetune") else pytest.param(name, marks=pytest.mark.full)
    for name in compositions()
]


@pytest.mark.parametrize("method", EVERY)
def test_every_method_predicts_for_some_clients_as_for_all(method: str) -> None:
    more = (f"method={method}", "rounds=3", "local.steps=1")
    some, whole = session_of(*more, "evaluation.clients=3"), session_of(*more)
    for number in (1, 2):
        few, every = some.run_round(number).clients, whole.run_round(number).clients
        assert few is not None and every is not None
        assert np.array_equal(few["accuracy"], every["accuracy"][few["client"]])


# Personal models


def test_personal_evaluation_by_hand() -> None:
    # From w = 0 with lr 0.1: client 0 (1, 2) trains to 0.4, client 1 (1, -2) to -0.4; the average is 0.
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)]], lr=0.1)
    fedavg = method_of("fedavg", fleet)
    fedavg.base.model = np.float32([0.0])
    fedavg.round(fleet, 1)
    trained = fleet.first_trained
    assert trained is not None
    personal = fleet.evaluate(Prediction([trained, *trained.under]))
    assert personal["mse"] == pytest.approx([1.6**2, 1.6**2])
    assert fleet.evaluate(fedavg.prediction(fleet))["mse"] == pytest.approx([4.0, 4.0])
    assert fleet.evaluate(Prediction([trained]), skip={0})["client"].tolist() == [1]


def test_personal_evaluation_counts_participants_and_what_they_train_on_top_of() -> None:
    more = ("rounds=2", "participation.fraction=0.5", "evaluation.personal=true", "evaluation.clients=4")
    session = session_of(*more, "method=ifca+cam")
    asked = spied(session)
    report = session.run_round(1)
    assert report.clients is not None
    assert set(asked[0]) <= set(report.clients["client"].tolist()) and len(asked[0]) <= 4
    assert 0 <= report.metrics["personal_micro_accuracy"] <= 1
    plain = session_of("rounds=2", "participation.fraction=0.5", "method=ifca+cam", "evaluation.clients=4")
    assert "personal_micro_accuracy" not in plain.run_round(1).metrics
    run(session, 1, first=2)
    run(plain, 1, first=2)
    for name, models in plain.models()["models"].items():
        assert np.array_equal(models, session.models()["models"][name])


def test_personal_evaluation_on_every_layout_and_after_resume() -> None:
    more = ("rounds=2", "evaluation.personal=true", "method=fedavg")
    whole = session_of(*more)
    reports = run(whole, 2)
    packed = session_of(*more, blocks=[[0, 7], [1, 2, 3], [4, 5, 6]])
    first = run(packed, 1)
    resumed = session_of(*more, checkpoint=checkpoint_of(packed))
    assert outcome(resumed, [*first, *run(resumed, 1, first=2)]) == outcome(whole, reports)


# Metrics by import path


def halves(evaluated: Evaluated) -> float:
    """A metric of a user's own, as a function."""
    return 0.5 * float(evaluated.losses.mean())


def test_torchmetrics_class_is_what_torchmetrics_says_of_each_client() -> None:
    from torchmetrics.functional.classification import multiclass_auroc

    torch.manual_seed(0)
    outputs, targets = torch.randn(40, 3), torch.arange(40) % 3
    evaluation = EvaluationSettings(
        metrics=[AUROC], metric_options={"MulticlassAUROC": {"average": "weighted"}}
    )
    for _ in range(2):  # the second time from what was made before
        found = client_metrics(outputs, targets, torch.ones(40), 3, (), evaluation)
        expected = multiclass_auroc(outputs.softmax(1), targets, 3, average="weighted")
        assert found["MulticlassAUROC"] == pytest.approx(float(expected))
    assert "MulticlassAUROC" not in client_metrics(outputs, targets, torch.ones(40), 3)
    assert METRICS.entry(AUROC).name == "MulticlassAUROC"


def test_metrics_by_import_path_are_columns_of_a_run_and_of_its_vocabulary() -> None:
    own = f"{__name__}.halves"
    calibration = "torchmetrics.classification.MulticlassCalibrationError"
    session = session_of("rounds=1", f"evaluation.metrics=[{calibration},{own}]")
    report = session.run_round(1)
    assert report.clients is not None
    assert report.clients[own] == pytest.approx(0.5 * report.clients["loss"])
    assert 0 <= report.metrics["macro_MulticlassCalibrationError"] <= 1
    stored = describe({"evaluation": {"metrics": [calibration]}})["metrics"]
    assert stored["MulticlassCalibrationError"]["better"] == "lower"
    assert "micro_MulticlassCalibrationError" in client_columns(3, (), [calibration])
    assert "micro_MulticlassCalibrationError" not in client_columns(3)


# Mistakes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["evaluation.clients=21"],
            mistake("out-of-range", setting="evaluation.clients", given=21, says="clients=20"),
        ),
        (["evaluation.clients=1.5"], mistake("out-of-range", setting="evaluation.clients", given=1.5)),
        (
            ["evaluation.redraw=true"],
            mistake("unread", setting="evaluation.redraw", says="evaluation.clients"),
        ),
        (["evaluation.full_last=false"], mistake("unread", setting="evaluation.full_last")),
        (
            ["evaluation.personal=true", "method=fedsgd"],
            mistake("unread", setting="evaluation.personal", says="fedsgd"),
        ),
        (
            ["evaluation.metrics=[collections.OrderedDict]"],
            mistake("wrong-kind", name="collections.OrderedDict"),
        ),
        (["evaluation.metric_options.MulticlassAUROC.average=macro"], mistake("unread")),
    ],
)
def test_evaluation_mistakes_are_one_sentence(given: list[str], expected: Mistake) -> None:
    with expected():
        load_config(overrides=given, env={})


def test_metric_that_gives_no_number_for_the_data_is_refused_before_the_run() -> None:
    config = config_of("evaluation.metrics=[torchmetrics.classification.MulticlassConfusionMatrix]")
    with refused("wrong-result", name="MulticlassConfusionMatrix"):
        check_network(config, (1, 8, 8), 3)
