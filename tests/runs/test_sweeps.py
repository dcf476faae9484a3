"""Sweep directories: what was written is what is read, by whichever way."""

from __future__ import annotations

from pathlib import Path

import pytest

import archipelago as ar
from archipelago.core.errors import UserError
from archipelago.runs.sweeps import FAILED, FINISHED, Row, read_rows, sweep_trials, write_rows, write_sweep

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
