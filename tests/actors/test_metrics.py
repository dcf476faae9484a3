"""Metrics against scikit-learn on random inputs, absent classes and single-class clients included."""

from __future__ import annotations

import doctest
import math
import time

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    adjusted_rand_score,
    f1_score,
    mean_squared_error,
    normalized_mutual_info_score,
)

import actors.metrics
from actors.metrics import client_metrics, clustering_metrics, summarise


def test_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(actors.metrics)
    assert outcome.attempted >= 4
    assert outcome.failed == 0


def _random_client(case: int) -> tuple[np.ndarray, np.ndarray, int]:
    random = np.random.default_rng(case)
    classes = int(random.integers(2, 30))
    samples = int(random.integers(1, 80))
    held = random.choice(classes, size=int(random.integers(1, classes + 1)), replace=False)
    if case % 5 == 0:
        held = held[:1]  # a client with a single class
    targets = random.choice(held, size=samples)
    logits = random.normal(size=(samples, classes)).astype(np.float32)
    logits[np.arange(samples), targets] += random.choice([-5, 0, 1, 50])  # all wrong ... all right
    return logits, targets, classes


@pytest.mark.parametrize("case", range(40))
def test_classification_equals_scikit_learn(case: int) -> None:
    logits, targets, classes = _random_client(case)
    outputs, labels = torch.from_numpy(logits), torch.from_numpy(targets)
    losses = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    figures = client_metrics(outputs, labels, losses, classes)
    predicted = logits.argmax(axis=1)
    assert set(figures) == {"loss", "accuracy", "macro_f1"}
    assert figures["accuracy"] == accuracy_score(targets, predicted)
    # Tighter than float32 could be: the counts are exact and the division is float64.
    expected = f1_score(targets, predicted, average="macro", zero_division=0)
    assert figures["macro_f1"] == pytest.approx(expected, abs=1e-15)
    assert figures["loss"] == pytest.approx(losses.numpy().astype(np.float64).mean(), rel=1e-14)


def test_wrongly_predicted_foreign_class_adds_a_zero_to_macro_f1() -> None:
    """The reason why a single global model has a low macro-F1 at a high accuracy on one-class clients."""
    logits = torch.eye(10)[torch.tensor([3, 3, 3, 7])]
    figures = client_metrics(logits, torch.full((4,), 3), torch.zeros(4), 10)
    assert figures["accuracy"] == 0.75
    assert figures["macro_f1"] == pytest.approx((6 / 7 + 0.0) / 2)


@pytest.mark.parametrize("shape", [(17,), (17, 1)])
def test_regression_equals_scikit_learn(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    outputs, targets = random.normal(size=shape), random.normal(size=17)
    figures = client_metrics(torch.from_numpy(outputs), torch.from_numpy(targets), torch.ones(17), None)
    assert set(figures) == {"loss", "mse"}
    assert figures["mse"] == pytest.approx(mean_squared_error(targets, outputs.ravel()))
    assert figures["loss"] == 1.0


@pytest.mark.parametrize("classes", [None, 4])
def test_client_without_samples_has_no_figures(classes: int | None) -> None:
    figures = client_metrics(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0), classes)
    assert figures
    assert all(math.isnan(value) for value in figures.values())


@pytest.mark.parametrize("count", [1, 9, 10, 11, 25, 200])
def test_summary_by_hand_in_numpy(count: int) -> None:
    random = np.random.default_rng(count)
    accuracy, loss = random.random(count), random.random(count) * 3
    sizes = random.integers(1, 100, count)
    figures = summarise({"client": np.arange(count), "accuracy": accuracy, "loss": loss}, sizes)
    worst = math.ceil(count / 10)
    expected = {
        "micro_accuracy": np.average(accuracy, weights=sizes),
        "macro_accuracy": accuracy.mean(),
        "worst10_accuracy": np.sort(accuracy)[:worst].mean(),
        "std_accuracy": accuracy.std(ddof=0),
        "micro_loss": np.average(loss, weights=sizes),
        "macro_loss": loss.mean(),
        "worst10_loss": np.sort(loss)[-worst:].mean(),
        "std_loss": loss.std(ddof=0),
    }
    assert figures == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in figures.values())


def test_summary_does_not_depend_on_the_order_of_the_clients_in_any_bit() -> None:
    random = np.random.default_rng(7)
    values = random.random(1000) * 10.0 ** random.integers(-8, 8, 1000)
    sizes = random.integers(1, 50, 1000)
    order = random.permutation(1000)
    assert summarise({"mse": values}, sizes) == summarise({"mse": values[order]}, sizes[order])


def test_summary_shows_a_diverged_client_and_leaves_out_an_unmeasured_one() -> None:
    loss = np.array([1.0, np.nan, 3.0])
    assert math.isnan(summarise({"loss": loss}, [1, 1, 1])["macro_loss"])
    assert math.isnan(summarise({"loss": loss}, [1, 1, 1])["worst10_loss"])
    left_out = summarise({"loss": loss, "samples": np.array([5, 0, 5])}, [1, 100, 1])
    assert left_out["macro_loss"] == 2.0
    assert left_out["micro_loss"] == 2.0
    infinite = summarise({"loss": np.array([1.0, np.inf])}, [1, 1])
    assert infinite["macro_loss"] == math.inf
    huge = summarise({"loss": np.array([1.7e308, 1.7e308])}, [1, 1])
    assert huge["macro_loss"] == math.inf


def test_summary_refuses_columns_that_are_not_aligned() -> None:
    with pytest.raises(ValueError, match="'loss' has shape"):
        summarise({"loss": np.zeros(3)}, [1, 1])


@pytest.mark.parametrize("case", range(10))
def test_clustering_equals_scikit_learn(case: int) -> None:
    random = np.random.default_rng(case)
    assignment, previous = random.integers(0, 5, (2, 40))
    groups = random.integers(0, 4, 40)
    figures = clustering_metrics(assignment, previous, groups, clusters=6)
    assert figures["cluster_sizes"] == [int((assignment == k).sum()) for k in range(6)]
    assert figures["empty_clusters"] == sum(size == 0 for size in figures["cluster_sizes"])
    assert figures["changed"] == int((assignment != previous).sum())
    assert figures["ari"] == adjusted_rand_score(groups, assignment)
    assert figures["nmi"] == normalized_mutual_info_score(groups, assignment)


def test_clustering_without_groups_or_past_says_nothing_about_them() -> None:
    figures = clustering_metrics(np.array([0, 1]), None, None, clusters=2)
    assert (figures["changed"], figures["ari"], figures["nmi"]) == (None, None, None)
    nobody = clustering_metrics(np.array([-1, -1]), np.array([0, 1]), np.array([0, 1]), clusters=2)
    assert nobody["cluster_sizes"] == [0, 0]
    assert (nobody["changed"], nobody["ari"]) == (0, None)


def test_as_many_clusters_as_clients_raise_no_warning() -> None:
    many = np.arange(60)
    assert clustering_metrics(many, many, many, clusters=60)["ari"] == 1.0


def test_impossible_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster 4 is assigned, but there are only 3"):
        clustering_metrics(np.array([0, 4]), None, None, clusters=3)


def test_client_metrics_are_cheap() -> None:
    logits, targets, _ = _random_client(3)
    outputs, labels, losses = torch.from_numpy(logits), torch.from_numpy(targets), torch.ones(len(targets))
    times = []
    for _ in range(200):
        start = time.perf_counter()
        client_metrics(outputs, labels, losses, logits.shape[1])
        times.append(time.perf_counter() - start)
    assert sorted(times)[100] < 2e-3  # about 0.1 ms; the margin is for a busy machine
