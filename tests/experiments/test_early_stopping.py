"""Early stopping: when it stops, on which data, and that a resume stops at the same round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from actors.reports import RoundReport
from archipelago import open_run
from archipelago.experiments.callbacks import EarlyStopping
from archipelago.experiments.callbacks.early_stopping import EarlyStoppingOptions
from archipelago.experiments.runner import resume, run_experiment
from archipelago.reports.build import ReportRequest, build_report
from archipelago.sweeps.runner import run_sweep
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs
from tests.support.sweeps import rows_of, sweep_of

SETTINGS = ("callbacks=[early_stopping]", "partition.validation=0.2", "early_stopping.patience=2",
            "early_stopping.min_delta=0.5", "rounds=9", "checkpoint.every=2")  # fmt: skip


class Watched:
    """As much of a run as early stopping asks for."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason


def stopped_after(values: list[float | None], **options: Any) -> int | None:
    """The round after which a run with these values stops; None if it never does."""
    chosen = EarlyStoppingOptions(**{"metric": "validation_micro_loss", "patience": 2, **options})
    callback, run = EarlyStopping(chosen), Watched()
    callback.on_start(run)  # type: ignore[arg-type]  # as much as is asked for
    for round, value in enumerate(values, start=1):
        callback.on_round(run, RoundReport(round, {chosen.metric: value}))  # type: ignore[arg-type]
        if run.reason is not None:
            return round
    return None


def test_early_stopping_by_hand() -> None:
    assert stopped_after([1.0, 0.9, 0.95, 0.91]) == 4
    assert stopped_after([1.0, 0.9, 0.95, 0.89, 0.9]) is None
    assert stopped_after([1.0, 0.9, None, 0.95, None, 0.91]) == 6  # rounds without an evaluation do not count
    assert stopped_after([1.0, 0.95, 0.92], min_delta=0.1) == 3
    assert stopped_after([math.nan, math.inf]) == 2
    assert stopped_after([0.5, 0.6, 0.7], metric="validation_micro_accuracy") is None
    assert stopped_after([0.5, 0.4, 0.3], metric="validation_micro_accuracy") == 3
    assert stopped_after([0.5, 0.4, 0.3], metric="validation_micro_accuracy", mode="min") is None


def test_early_stopping_ends_a_run_that_is_finished_with_a_sentence(tmp_path: Path) -> None:
    run = run_experiment(config_of(*SETTINGS), tmp_path / "run", quiet=True)
    status = open_run(run).status
    assert (status.state, status.rounds_done, status.rounds) == ("finished", 3, 9)
    assert status.sentence is not None and "Stopped early after round 3" in status.sentence
    assert status.sentence in (run / "summary.md").read_text()
    assert len(open_run(run).metrics) == 3 and open_run(run).models["clusters"].shape[0] == 2
    assert (run / "checkpoints/round-000003").is_dir()
    assert build_report(ReportRequest([str(run)], figures="no")).tables
    plain = run_experiment(config_of("partition.validation=0.2", "rounds=9"), tmp_path / "plain", quiet=True)
    longer = (plain / "metrics.csv").read_text().splitlines()
    assert (run / "metrics.csv").read_text().splitlines() == longer[:4]


@pytest.mark.parametrize("stop", [StopAfter(1), StopAfter(3), StopAfter(3, "on_checkpoint")])
def test_early_stopping_after_a_resume_stops_at_the_same_round(stop: StopAfter, tmp_path: Path) -> None:
    with refused("users-code"):
        run_experiment(config_of(*SETTINGS), tmp_path / "run", callbacks=[stop], quiet=True)
    resume(tmp_path / "run", quiet=True)
    alone = run_experiment(config_of(*SETTINGS), tmp_path / "alone", quiet=True)
    assert_equal_runs(tmp_path / "run", alone)
    assert open_run(tmp_path / "run").status == open_run(alone).status
    with refused("finished"):
        resume(alone, quiet=True)


def test_early_stopping_in_a_sweep(tmp_path: Path) -> None:
    wanted = (*SETTINGS, "sweep.methods=[ifca,fedavg]", "fleet.backend=in_process")
    run_sweep(sweep_of(tmp_path, *wanted), str(tmp_path / "swept"), quiet=True)
    assert {row.status for row in rows_of(tmp_path / "swept").values()} == {"finished"}
    alone = run_experiment(config_of(*SETTINGS), tmp_path / "alone", quiet=True)
    assert_equal_runs(tmp_path / "swept/runs/ifca-seed0", alone)


def test_early_stopping_never_looks_at_test_data() -> None:
    with refused("test-data", given="micro_accuracy"):
        config_of(*SETTINGS, "early_stopping.metric=micro_accuracy")
    with refused("needs-validation", setting="callbacks", says="partition.validation"):
        config_of("callbacks=[early_stopping]")
