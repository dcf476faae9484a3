"""What a metric declares, and which metrics a run computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archipelago.core import vocabulary
from archipelago.core.metrics import METRICS, Evaluated, Spec, chosen, client_columns, specs
from tests.support.errors import refused

ROOT = Path(__file__).parents[2]


def certainty(evaluated: Evaluated) -> float:
    return float(evaluated.outputs.softmax(dim=1).max(dim=1).values.double().mean())


certainty.__module__ = "somebody.metrics"  # a plug-in of the package `somebody`


@pytest.fixture
def brought() -> Iterator[None]:
    """A metric of the plug-in somebody.metrics, registered in this process."""
    declared = {"label": "certainty", "unit": "%", "better": "lower", "tasks": ("classes",)}
    METRICS.register("certainty", "highest probability", **declared)(certainty)
    yield
    METRICS.remove("certainty")


@pytest.mark.usefixtures("brought")
def test_metrics_of_a_run_are_the_platforms_and_those_of_its_plugins() -> None:
    """Whatever else this process imported: an earlier run's plug-in must not add a column to the next one."""
    assert [entry.name for entry in chosen()] == [
        "loss", "accuracy", "macro_f1", "mse", "ari", "nmi", "silhouette", "was",
    ]  # fmt: skip
    assert [entry.name for entry in chosen(["somebody.other"])][-1] == "certainty"
    assert "micro_certainty" in client_columns(10, ["somebody"])
    assert "micro_certainty" not in client_columns(None, ["somebody"])  # a regression
    assert "micro_certainty" not in client_columns(10)


@pytest.mark.usefixtures("brought")
def test_vocabulary_describes_the_metrics_and_the_method_of_a_config(tmp_path: Path) -> None:
    import archipelago.strategies  # noqa: F401

    described = vocabulary.describe({"method": "fesem+cam", "plugins": ["somebody.metrics"]})
    assert described["methods"] == {"fesem": "FeSEM", "cam": "CAM"}
    assert described["metrics"]["certainty"]["better"] == "lower"
    assert vocabulary.describe({"ensemble": ["fedavg*5", "ifca"]})["methods"] == {
        "fedavg": "FedAvg",
        "ifca": "IFCA",
    }


def test_vocabulary_is_read_as_it_was_written(tmp_path: Path) -> None:
    import json

    words = vocabulary.built_in()
    (tmp_path / vocabulary.FILE).write_text(json.dumps(words.stored()))
    assert vocabulary.read_vocabulary(tmp_path) == words
    assert vocabulary.read_vocabulary(tmp_path / "older") is None


def test_vocabulary_of_a_later_version_is_read_without_what_it_added(tmp_path: Path) -> None:
    stored = {**specs()[0].stored(), "shown": ["curve", "hologram"], "sound": "ping"}
    assert Spec.read(stored).shown == ("curve",)


def test_vocabulary_that_is_damaged_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / vocabulary.FILE).write_text("{")
    with refused("damaged", says="vocabulary.json"):
        vocabulary.of_run(tmp_path)


@pytest.mark.usefixtures("brought")
def test_vocabulary_shows_a_metric_by_its_unit_and_direction() -> None:
    words = vocabulary.registered()
    mean, spread = words.column("validation_macro_certainty"), words.column("std_accuracy")
    assert (mean.label, mean.scale) == ("certainty (%), plain mean on validation data", 100.0)
    assert not mean.higher_is_better and not spread.higher_is_better
    assert words.column("micro_certainty").digits == 2
    assert [each.name for each in words.headline(["micro_loss", "micro_certainty"])] == ["micro_certainty"]
    assert words.progress()["micro_certainty"] == "certainty"


def test_vocabulary_names_curves_in_their_order() -> None:
    known = ["worst10_accuracy", "ari", "nmi", "micro_loss", "micro_macro_f1", "micro_accuracy"]
    assert [each.name for each in vocabulary.built_in().curves(known)] == [
        "micro_accuracy", "micro_macro_f1", "micro_loss", "ari", "worst10_accuracy",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "declared", "wrong"),
    [
        ("client", {}, "no other column"),
        ("validation_x", {}, "without the beginning of a column"),
        ("x", {"better": "bigger"}, "expected better among higher, lower, got 'bigger'"),
        ("x", {"shown": ("tables",)}, "expected shown among table, .* got 'tables'"),
        ("x", {"tasks": ("images",)}, "expected tasks among classes, regression, got 'images'"),
    ],
)
def test_metric_that_is_declared_wrongly_is_refused(name: str, declared: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        METRICS.register(name, **declared)
    assert name not in METRICS


def test_metrics_are_read_without_torch() -> None:
    """Reports and sweeps ask what is declared; torch takes seconds."""
    code = "import sys, archipelago.core.vocabulary as v; v.built_in(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
