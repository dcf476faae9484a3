"""A metric of a user's own, in one file outside the project: computed, stored, shown, reported and tuned by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.core.metrics import METRICS
from archipelago.reports.build import ReportRequest, build_report
from archipelago.reports.page import figures_in
from archipelago.runs.reader import open_run

ROOT = Path(__file__).parents[2]
PLUGIN = """
from archipelago.core.metrics import METRICS, Evaluated


@METRICS.register("surprise", "mean -log of the probability of the label, in bits", label="surprise", unit="bits",
                  better="lower", tasks=("classes",))
def surprise(evaluated: Evaluated) -> float:
    chances = evaluated.outputs.double().log_softmax(dim=1).gather(1, evaluated.targets[:, None])
    return float(-chances.mean()) / 0.6931471805599453


@METRICS.register("found_groups", "ground-truth groups that have a cluster of their own", label="groups found",
                  over="clusters", shown=("curve", "progress", "summary"))
def found_groups(groups, assignment) -> float:
    return float(len({tuple(sorted(set(assignment[groups == g]))) for g in set(groups)}))
"""
SMALL = ["clients=6", "clusters=2", "rounds=2", "local.steps=2", "partition=cluster_n_class", "partition.classes=4",
         "partition.groups=2"]  # fmt: skip


def launch(folder: Path, *words: str) -> str:
    """The command line, in another process and another folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "import sys; from archipelago.cli.main import command_line; sys.exit(command_line())"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_with_plugin(folder: Path, *words: str) -> str:
    (folder / "own_metric.py").write_text(PLUGIN)
    return launch(folder, "plugins=[own_metric]", "storage=.", *SMALL, *words)


@pytest.mark.slow
def test_own_metric_is_computed_stored_shown_and_reported(tmp_path: Path) -> None:
    shown = run_with_plugin(tmp_path, "name=mine", "method=ifca", "fleet.backend=in_process")
    assert "surprise" in shown and "groups found" in shown
    run = open_run(tmp_path / "mine")
    # The loss is the same thing in nats, which makes the numbers easy to check.
    assert run.clients["surprise"].to_numpy() == pytest.approx(
        run.clients["loss"].to_numpy() / 0.6931471805599453
    )
    for over in ("micro", "macro", "worst10", "std"):
        assert run.metrics[f"{over}_surprise"].to_numpy() == pytest.approx(
            run.metrics[f"{over}_loss"].to_numpy() / 0.6931471805599453
        )
    assert set(run.metrics["found_groups"]) <= {1.0, 2.0}
    assert "surprise" in repr(run)
    assert "| surprise |" in run.summary
    assert json.loads((tmp_path / "mine/vocabulary.json").read_text())["methods"] == {"ifca": "IFCA"}

    assert "surprise" not in METRICS  # a report in this process, which never saw the plug-in
    report = build_report(ReportRequest([str(tmp_path / "mine")], figures="no"))
    (table,) = report.tables
    column = {each.name: each for each in table.metrics}["micro_surprise"]
    assert column.label == "surprise (bits)" and not column.higher_is_better
    page = figures_in((report.folder / "report.html").read_text())
    curves = {figure["choice"]["metric"] for figure in page if figure["family"] == "convergence"}
    assert {"surprise (bits)", "groups found"} <= curves
    chosen = build_report(
        ReportRequest([str(tmp_path / "mine")], figures="no", metrics="worst10_surprise,found_groups")
    )
    assert [each.label for each in chosen.tables[0].metrics] == ["surprise (bits), worst 10%", "groups found"]


@pytest.mark.slow
def test_own_metric_ranks_by_its_direction(tmp_path: Path) -> None:
    """The smallest surprise is the best one, in a report that knows of it from the runs alone."""
    for name, rate in (("slow", "0.0001"), ("fast", "0.05")):
        run_with_plugin(
            tmp_path, f"name={name}", "method=fedavg", "fleet.backend=in_process", f"local.lr={rate}"
        )
    found = ReportRequest(
        [str(tmp_path / "slow"), str(tmp_path / "fast")], str(tmp_path / "report"), figures="no"
    )
    (table,) = build_report(found).tables
    ranks = {row.label: row.cells["micro_surprise"].rank for row in table.rows}
    means = {row.label: row.cells["micro_surprise"].mean for row in table.rows}
    assert sorted(ranks, key=lambda label: means[label] or 0.0) == sorted(
        ranks, key=lambda label: ranks[label] or 0
    )


@pytest.mark.slow
def test_own_metric_tunes_a_sweep(tmp_path: Path) -> None:
    shown = run_with_plugin(
        tmp_path, "name=tuned", "method=fedavg", "fleet.backend=in_process", "partition.validation=0.2",
        "sweep.seeds=[0]", "sweep.sampler=random", "sweep.sample.local.lr=uniform(0.001,0.05)", "sweep.samples=2",
        "sweep.metric=validation_micro_surprise",
    )  # fmt: skip
    assert "surprise (bits) on validation data" in shown
    (table,) = build_report(ReportRequest([str(tmp_path / "tuned")], figures="no")).tables
    assert table.tuned is not None and table.tuned.label == "surprise (bits) on validation data"
    best = min(table.rows, key=lambda row: row.cells["validation_micro_surprise"].mean or 0.0)
    assert best.cells["micro_surprise"].rank == 1


@pytest.mark.full
@pytest.mark.ray
def test_own_metric_has_the_same_bits_on_ray(tmp_path: Path) -> None:
    run_with_plugin(tmp_path, "name=here", "method=ifca", "fleet.backend=in_process")
    run_with_plugin(tmp_path, "name=there", "method=ifca", "fleet.backend=ray", "fleet.actors=2")
    assert (tmp_path / "here/metrics.csv").read_bytes() == (tmp_path / "there/metrics.csv").read_bytes()
    assert "micro_surprise" in (tmp_path / "there/metrics.csv").read_text()
