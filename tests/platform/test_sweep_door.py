"""The front door on sweeps and object stores."""

from __future__ import annotations

import platform.launch
import shlex
from pathlib import Path

import pytest

from experiments import open_run
from experiments.runner import run_experiment
from experiments.storage import Mirror, join
from experiments.sweep_directory import is_sweep
from tests.support.experiments import TINY, config_of
from tests.support.runs import assert_equal_runs
from tests.support.s3 import s3_server
from tests.support.written_runs import write_run


def test_the_door_runs_a_sweep_and_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "method=fedavg sweep.seeds=2 rounds=2 clients=4 model=mlp name=mine fleet.backend=in_process"
    assert platform.launch.main([*shlex.split(typed), f"storage={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"Results: {tmp_path / 'mine'}" in printed
        and f"Report: {tmp_path / 'mine' / 'report' / 'report.html'}" in printed
    )
    assert is_sweep(tmp_path / "mine")
    rows = (tmp_path / "mine/trials.csv").read_text()
    (tmp_path / "mine/trials.csv").write_text(
        rows.replace("1,finished,,runs/fedavg-seed1", "1,running,,runs/fedavg-seed1")
    )
    assert platform.launch.main(["resume", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine/trials.csv").read_text() == rows


def test_one_experiment_has_nothing_to_run_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert platform.launch.main(["--dry-run", "method=fedavg", f"storage={tmp_path}"]) == 2
    assert "Expected a sweep beside --dry-run" in capsys.readouterr().err


def test_a_report_of_what_is_in_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where options are behind the address; what is printed is where the page is."""
    with s3_server() as (storage, objects):
        storage += "?region=us-east-1"
        for seed in (0, 1):
            run = write_run(tmp_path / f"mine-{seed}", seed=seed)
            Mirror(run, join(storage, f"mine-{seed}")).push()
        one = join(storage, "mine-0")
        assert one == "s3://bucket/results/mine-0?region=us-east-1"
        assert platform.launch.main(["report", one, "figures=no"]) == 0
        page = "s3://bucket/results/mine-0/report/report.html?region=us-east-1"
        assert f"Report: {page} (" in capsys.readouterr().out
        assert b"<title>mine-0</title>" in objects["bucket/results/mine-0/report/report.html"]
        both = [one, join(storage, "mine-1"), "figures=no"]
        assert platform.launch.main(["report", *both, f"out={join(storage, 'both')}"]) == 0
        assert "Report: s3://bucket/results/both/report.html?region" in capsys.readouterr().out
        assert "bucket/results/both/table.csv" in objects
        assert platform.launch.main(["report", join(storage, "none"), "figures=no"]) == 2
        assert "There is nothing at 's3://bucket/results/none?region" in capsys.readouterr().err


@pytest.mark.full
def test_one_run_in_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with s3_server() as (storage, objects):
        assert platform.launch.main([*TINY, f"storage={storage}", "name=mine", "checkpoint.every=2"]) == 0
        printed = capsys.readouterr().out
        assert (
            f"Results: {storage}/mine" in printed and f"Report: {storage}/mine/report/report.html" in printed
        )
        assert "bucket/results/mine/report/report.html" in objects
        assert_equal_runs(
            open_run(f"{storage}/mine").path, run_experiment(config_of(), tmp_path / "here", quiet=True)
        )
        # As after a kill: the last checkpoint is there, and what came after it is not.
        for key in [
            key for key in objects if "round-000004" in key or "/models/" in key or key.endswith("summary.md")
        ]:
            del objects[key]
        status = "bucket/results/mine/status.json"
        objects[status] = objects[status].replace(b'"finished"', b'"running"')
        assert platform.launch.main(["resume", f"{storage}/mine"]) == 0
        assert_equal_runs(open_run(f"{storage}/mine").path, tmp_path / "here")
