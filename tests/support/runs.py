"""Run directories, compared: what equal runs must have in common, file by file and bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from archipelago import open_run
from archipelago.runs.written import is_record


def assert_equal_runs(one: Path, other: Path) -> None:
    """Fail unless two runs hold the same metrics and records (bytes), rounds, tables and models (bits)."""
    assert (one / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()
    left, right = open_run(one), open_run(other)
    assert (left.status.state, left.status.rounds_done) == (right.status.state, right.status.rounds_done)
    pd.testing.assert_frame_equal(left.clients, right.clients, check_exact=True)
    pd.testing.assert_frame_equal(left.assignments, right.assignments, check_exact=True)
    rounds = [int(each) for each in left.metrics["round"]]
    for run in (left, right):  # how long each took differs, that it is there does not
        assert [int(each) for each in run.timings["round"]] == rounds
    tables, same = (
        {path.name: path.read_bytes() for path in (each / "records").glob("*.parquet") if is_record(path)}
        for each in (one, other)
    )
    assert sorted(tables) == sorted(same) and [name for name in tables if tables[name] != same[name]] == []
    models, others = left.models, right.models
    assert list(models) == list(others) and models.spec == others.spec
    for name, values in models.items():
        assert values.dtype == others[name].dtype
        assert np.array_equal(values, others[name]), f"model '{name}' differs"


def events(run: Path) -> list[str]:
    """What the run reported to its user."""
    return list(open_run(run).events["text"])
