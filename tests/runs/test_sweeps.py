"""Sweep directories: what was written is what is read, by whichever way."""

from __future__ import annotations

from pathlib import Path

import pytest

import archipelago as ar
from archipelago.core.errors import UserError
from archipelago.runs.sweeps import (
    DAMAGED,
    FAILED,
    FINISHED,
    Row,
    find_trials,
    read_rows,
    sweep_trials,
    write_rows,
    write_sweep,
)
from tests.support.written_runs import write_run

ROWS = [
    Row("a-seed0", "=1+1", 0, FINISHED, run="runs/a-seed0"),
    Row("b-seed0", "IFCA, K = 4", 0, FAILED, '-inf: "nothing" was\nmeasured'),
]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_sweep(str(tmp_path), {"sweep": {"seeds": 1}})
    write_rows(str(tmp_path), ROWS)
    return tmp_path


def test_sweep_trials_are_those_that_were_written_in_tables_reports_and_python(sweep: Path) -> None:
    assert read_rows(sweep) == ROWS
    assert [Row(**row) for row in ar.open_sweep(sweep).trials.to_dict("records")] == ROWS
    assert [(each.group, each.reason) for each in sweep_trials(sweep)] == [
        (row.group, row.reason) for row in ROWS
    ]
    assert "'=1+1" in (sweep / "trials.csv").read_text()  # a spreadsheet runs no formula


def test_sweep_without_its_trials_or_with_an_unknown_status_is_damaged_for_every_reader(sweep: Path) -> None:
    write_rows(str(sweep), [Row("a", "a", 0, "nearly")])
    for read in (read_rows, sweep_trials, lambda path: ar.open_sweep(path).trials):
        with pytest.raises(UserError) as caught:
            read(sweep)
        assert caught.value.code == "damaged"
    (sweep / "trials.csv").unlink()
    for read in (read_rows, sweep_trials, lambda path: ar.open_sweep(path).trials):
        with pytest.raises(UserError) as caught:
            read(sweep)
        assert caught.value.code == "damaged"
    (sweep / "sweep.yaml").unlink()
    with pytest.raises(UserError) as caught:
        ar.open_sweep(sweep)
    assert caught.value.code == "not-found"


def test_sweep_trial_whose_run_is_gone_or_of_another_seed_is_left_out(tmp_path: Path) -> None:
    write_sweep(str(tmp_path), {"sweep": {"seeds": 3}})
    for seed in (0, 1):
        write_run(tmp_path / f"runs/a-seed{seed}", method="fedavg", seed=seed)
    runs = ("runs/a-seed0", "runs/a-seed0", "runs/a-seed2")  # one is right, one of seed 0, one not there
    write_rows(str(tmp_path), [Row(f"a-seed{n}", "a", n, FINISHED, run=run) for n, run in enumerate(runs)])
    found = find_trials([tmp_path])
    assert [(each.seed, each.status, each.run is not None) for each in found] == [
        (0, FINISHED, True),
        (1, DAMAGED, False),
        (2, DAMAGED, False),
    ]
    assert "has seed 0" in found[1].reason and "is not there" in found[2].reason
