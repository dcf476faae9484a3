"""Runs in which nobody trains: they stop, say why, and never win."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago import open_run
from archipelago.core.errors import RunFailure
from archipelago.experiments.runner import resume, run_experiment
from archipelago.reports.groups import make_groups
from archipelago.reports.tables import build_tables
from archipelago.runs.sweeps import find_trials
from tests.support.experiments import config_of
from tests.support.written_runs import write_run

BLOWN_UP = ("local.lr=1e38", "local.steps=10", "checkpoint.every=1")


def run(path: Path, *settings: str) -> Path:
    return run_experiment(config_of(*settings), path, quiet=True)


def test_idle_run_stops_after_three_rounds_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="rounds 1 to 3") as caught:
        run(tmp_path / "run", "method=ifca", *BLOWN_UP, "rounds=8")
    assert "local.lr" in str(caught.value) and "idle_rounds=3" in str(caught.value)
    status = open_run(tmp_path / "run").status
    assert (status.state, status.rounds_done) == ("failed", 3)
    assert status.sentence == str(caught.value)


def test_idle_run_of_fewer_rounds_stops_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="in rounds 1 to 2"):
        run(tmp_path / "run", "method=fedavg", "local.lr=1e38", "rounds=2")


def test_idle_run_that_is_resumed_stops_again_after_the_same_round(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunFailure, match="rounds 1 to 3"):
            if (tmp_path / "run").exists():
                resume(tmp_path / "run", quiet=True)
            else:
                run(tmp_path / "run", "method=fedavg", *BLOWN_UP, "rounds=8")
        assert len(open_run(tmp_path / "run").metrics) == 3


def test_idle_rounds_may_be_allowed_and_some_dropped_clients_are_no_idle_round(tmp_path: Path) -> None:
    allowed = open_run(run(tmp_path / "allowed", "method=fedavg", *BLOWN_UP, "rounds=4", "idle_rounds=0"))
    assert allowed.status.state == "finished" and allowed.metrics["dropped"].tolist() == [8.0] * 4


def test_tables_mark_dropped_updates_and_never_rank_idle_runs(tmp_path: Path) -> None:
    columns = {"participants": [4] * 4}
    write_run(tmp_path / "a", method="fedavg", accuracy=[0.9] * 4, metrics={**columns, "dropped": [4] * 4})
    write_run(tmp_path / "b", method="ifca", accuracy=[0.5] * 4, metrics={**columns, "dropped": [4, 0, 0, 0]})
    write_run(tmp_path / "c", method="local", accuracy=[0.4] * 4, metrics={**columns, "dropped": [0] * 4})
    (table,) = build_tables(make_groups(find_trials([tmp_path / name for name in "abc"])))
    ranks = {row.label: row.cells["micro_accuracy"].rank for row in table.rows}
    assert list(ranks.values()) == [None, 1, 2]
    idle, some, none = (row.note for row in table.rows)
    assert "100 % of the updates were not finite" in idle and "no rank" in idle
    assert "25 % of the updates" in some and "no rank" not in some
    assert none == ""
