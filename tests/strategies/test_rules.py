"""Aggregation and clustering rules of somebody's own, in a file outside the project's tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archipelago.strategies import AGGREGATION, CLUSTERING
from archipelago.strategies.base import Context
from archipelago.strategies.clustering import ClusteringTask, clustered, from_labels, kmeans, trimmed_kmeans
from tests.support.errors import refused
from tests.support.experiments import config_of, run, session_of

ROOT = Path(__file__).parents[2]

RULES = '''
"""Rules of somebody's own."""
from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.strategies import AGGREGATION, CLUSTERING


def largest(uploads):
    """The largest value of each coordinate."""
    return uploads.by_coordinate(lambda values: values.max(axis=0))


@dataclass
class QuantileOptions:
    """`aggregation.quantile=...`"""

    quantile: float = setting(0.5, "quantiles: which one", at_least=0, at_most=1)


@AGGREGATION.register("quantiles", "a quantile of each coordinate", options=QuantileOptions)
def quantiles(uploads):
    return uploads.by_coordinate(lambda values: np.quantile(values, uploads.options.quantile, axis=0))


@dataclass
class FirstAxisOptions:
    """`first_axis.descending=...`"""

    descending: bool = setting(False, "largest first")


@CLUSTERING.register("first_axis", "equal parts by the first feature", options=FirstAxisOptions)
def first_axis(task):
    order = np.argsort(task.features[:, 0], kind="stable")
    order = order[::-1] if task.options.descending else order
    labels = np.empty(len(order), np.int64)
    labels[order] = np.arange(len(order)) * task.clusters // len(order)
    return labels
'''


def in_folder(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in another folder, as a user outside the checkout does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def outcomes(folder: Path, *cases: tuple[str, ...]) -> list[tuple[str, str]]:
    """(loss, digest of the models) after two rounds of each experiment, in a process of its own."""
    (folder / "my_rules.py").write_text(RULES)
    code = (
        "import json, sys\n"
        "from tests.support.experiments import run, session_of, digest\n"
        "for case in json.loads(sys.argv[1]):\n"
        "    session = session_of(*case)\n"
        "    print('found', run(session, 2)[-1].metrics['micro_loss'], digest(session.server.models()))\n"
    )
    done = in_folder(folder, code, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return [tuple(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("found")]


def test_aggregation_by_import_path_and_by_name_of_a_plugin(tmp_path):
    chosen = ("method=fedavg", "plugins=[my_rules]", "aggregation=quantiles")
    plain, largest, by_path, by_name, other = outcomes(
        tmp_path,
        ("method=fedavg",),
        ("method=fedavg", "aggregation=my_rules.largest"),
        ("method=fedavg", "aggregation=my_rules.quantiles"),
        chosen,
        (*chosen, "aggregation.quantile=0.9"),
    )
    assert by_path == by_name
    assert len({plain, largest, by_name, other}) == 4


def test_clustering_by_import_path_and_by_name_of_a_plugin(tmp_path):
    chosen = ("method=wecfl", "wecfl.clustering=my_rules.first_axis")
    plain, by_path, by_name, one_way, other_way = outcomes(
        tmp_path,
        ("method=fesem",),
        ("method=fesem", "fesem.clustering=my_rules.first_axis"),
        ("method=fesem", "plugins=[my_rules]", "fesem.clustering=first_axis"),
        chosen,
        (*chosen, "first_axis.descending=true"),
    )
    assert plain != by_path == by_name
    assert one_way[0] == other_way[0] and one_way[1] != other_way[1]  # the same clusters in another order


@pytest.mark.full
@pytest.mark.ray
def test_rules_of_a_plugin_give_the_same_bits_on_actors(tmp_path):
    (tmp_path / "my_rules.py").write_text(RULES)
    words = ["method=fesem", "plugins=[my_rules]", "fesem.clustering=first_axis", "aggregation=quantiles"]
    code = (
        "import json, sys\n"
        "from tests.support.experiments import config_of\n"
        "from archipelago.experiments.runner import run_experiment\n"
        "run = run_experiment(config_of(*json.loads(sys.argv[1])), sys.argv[2], quiet=True)\n"
        "sys.stdout.write((run / 'metrics.csv').read_text())\n"
    )
    tables = []
    for name, more in (
        ("here", []),
        ("ray", ["fleet.backend=ray", "fleet.actors=2", "fleet.dashboard=false"]),
    ):
        done = in_folder(tmp_path, code, json.dumps([*words, "rounds=2", *more]), str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        tables.append([line for line in done.stdout.splitlines() if "," in line])
    columns = [tables[0][0].split(",").index(name) for name in ("micro_loss", "micro_accuracy")]
    here, ray = ([[line.split(",")[at] for at in columns] for line in table] for table in tables)
    assert here == ray and len(here) == 3


def test_rule_that_does_not_exist_is_one_sentence():
    for words, kind, close in (
        (("aggregation=medain",), "aggregation rule", "median"),
        (("method=fesem", "fesem.clustering=kmean"), "clustering rule", "kmeans"),
        (("method=femam", "femam.clustering=kmean"), "clustering rule", "kmeans"),
    ):
        with refused("unknown-name", kind=kind, nearest=close):
            config_of(*words)
    assert {"mean", "matched"} <= set(AGGREGATION) and {"kmeans", "trimmed_kmeans"} <= set(CLUSTERING)


def test_clustering_rules_are_the_functions_they_name():
    points = np.random.default_rng(0).normal(size=(20, 3))
    task, context = ClusteringTask(points, 3, seed=5, starts=4), Context(clients=20)
    assert np.array_equal(
        clustered("kmeans", task, context).labels, kmeans(points, 3, seed=5, starts=4).labels
    )
    found = clustered("trimmed_kmeans", task, context)
    assert np.array_equal(found.labels, trimmed_kmeans(points, 3, seed=5, starts=4).labels)


def test_labels_of_a_rule_become_a_clustering():
    task = ClusteringTask(np.array([[0.0], [2.0], [10.0]]), 2, seed=0, weights=np.array([1.0, 3.0, 1.0]))
    found = from_labels(task, np.array([7, 7, 3]))
    assert found.labels.tolist() == [1, 1, 0] and found.centres.ravel().tolist() == [10.0, 1.5]
    assert found.objective == pytest.approx((1.5**2 + 3 * 0.5**2) / 5)
    with pytest.raises(ValueError, match="at most 2 clusters, got 3 of 3"):
        from_labels(task, np.array([0, 1, 2]))


def test_trimmed_kmeans_as_the_rule_of_another_method_takes_options_of_its_own():
    plain = session_of("method=fesem", "fesem.clustering=trimmed_kmeans", "clients=12", "clusters=2")
    other = session_of(
        "method=fesem",
        "fesem.clustering=trimmed_kmeans",
        "trimmed_kmeans.outliers=0.4",
        "clients=12",
        "clusters=2",
    )
    objective = [run(session, 2)[-1].metrics["clustering_objective"] for session in (plain, other)]
    assert objective[1] < objective[0]  # what lies furthest out does not count


def test_robust_with_kmeans_finds_no_outliers():
    session = session_of("method=robust", "robust.clustering=kmeans", "robust.exclude=true")
    assert "outliers" not in run(session, 2)[-1].metrics
