"""A sweep and a run whose results go to an object store, over its real client and a stand-in for the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.experiments.config import load_config
from archipelago.runs.storage import local_copy, working_copy
from archipelago.runs.sweeps import is_sweep
from archipelago.sweeps.runner import resume_sweep, run_sweep
from tests.support import killers
from tests.support.errors import refused
from tests.support.s3 import s3_server
from tests.support.sweeps import assert_equal_sweeps, rows_of, sweep_of


@pytest.mark.slow
def test_sweep_in_an_object_store_resumes_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    armed = tmp_path / "armed"
    armed.mkdir()
    monkeypatch.setenv(killers.FOLDER, str(armed))
    settings = (
        "fleet.backend=in_process",
        "sweep.methods=[fedavg,ifca]",
        "rounds=3",
        killers.MODULE[1],
        "checkpoint.every=1",
    )
    with s3_server() as (storage, objects):
        address = f"{storage}/sweep"
        killers.arm("training", after=30, action="raise")  # in the second round of the first trial
        run_sweep(sweep_of(tmp_path, *settings), address, quiet=True)
        rows = rows_of(address)
        assert (rows["fedavg-seed0"].status, rows["ifca-seed0"].status) == ("failed", "finished")
        assert not working_copy(f"{address}/runs/ifca-seed0").exists()
        resume_sweep(address, quiet=True)
        assert is_sweep(address) and "bucket/results/sweep/runs/fedavg-seed0/metrics.csv" in objects
        undisturbed = run_sweep(sweep_of(tmp_path, *settings), str(tmp_path / "undisturbed"), quiet=True)
        assert_equal_sweeps(local_copy(address), undisturbed)


def test_object_store_that_cannot_be_written_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("wrong-address", address="nonsense://x"):
        load_config(None, ["storage=nonsense://x"])
