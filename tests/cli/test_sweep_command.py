"""Sweeps and object stores."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import archipelago.cli.main
from actors.reports import RoundReport
from actors.session import InProcessSession
from archipelago import open_run
from archipelago.cli.demonstration import next_steps
from archipelago.cli.listing import List
from archipelago.core.packaged import first_comment
from archipelago.experiments.runner import run_experiment
from archipelago.runs.storage import Mirror, join, working_copy
from archipelago.runs.sweeps import is_sweep, read_rows
from archipelago.sweeps.config import load_sweep
from tests.support.clusters import ROOT
from tests.support.experiments import TINY, config_of
from tests.support.runs import assert_equal_runs
from tests.support.s3 import s3_server
from tests.support.written_runs import write_run


def test_run_of_a_sweep_that_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "method=fedavg sweep.seeds=2 rounds=2 clients=4 model=mlp name=mine fleet.backend=in_process"
    assert archipelago.cli.main.main([*shlex.split(typed), f"storage={tmp_path}"]) == 0
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
    assert archipelago.cli.main.main(["resume", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine/trials.csv").read_text() == rows


def test_sweep_without_a_finished_trial_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: InProcessSession, round: int) -> RoundReport:
        raise RuntimeError("no luck")

    monkeypatch.setattr(InProcessSession, "run_round", fail)
    typed = [*TINY, "sweep.seeds=2", f"storage={tmp_path}", "name=mine"]
    assert archipelago.cli.main.main(typed) == 1
    printed = capsys.readouterr()
    assert printed.out.count("RuntimeError: no luck") >= 2 and f"Results: {tmp_path / 'mine'}" in printed.out
    assert printed.err.strip().splitlines()[-1] == (
        "Failed: all 2 trials, each for the reason above. "
        f"The sweep is in {tmp_path / 'mine'}; resume it with: archipelago resume {tmp_path / 'mine'}"
    )


def test_next_steps_after_the_demonstration_can_be_tried() -> None:
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in next_steps().splitlines()[1:]]
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("archipelago ")
        request = archipelago.cli.main.parse(shlex.split(line)[1:])
        assert isinstance(request, List) or load_sweep(request.file, request.overrides, small=request.small)


@pytest.mark.ray
@pytest.mark.full
def test_demonstration_as_a_user_runs_it(tmp_path: Path) -> None:
    """On Ray, from its first line to what to try next."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "platform.launch"], cwd=tmp_path, env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tmp_path / "runs").iterdir()
    assert {row.status for row in read_rows(made)} == {"finished"} and len(read_rows(made)) == 24
    found = [line.split() for line in done.stdout.splitlines()]
    accuracy = [
        (line[0], float(line[line.index("3") + 1])) for line in found if "3" in line[1:3] and "±" in line
    ]
    rotated, skewed = dict(accuracy[:4]), dict(accuracy[-4:])
    assert set(rotated) == set(skewed) == {"FedAvg", "IFCA", "FeSEM", "FeSEM+CAM"}
    assert all(rotated[name] > rotated["FedAvg"] + 5 for name in ("IFCA", "FeSEM", "FeSEM+CAM"))
    # Where groups have much in common, what they share is worth a model: the flagship's claim, in the first minute.
    assert max(skewed, key=lambda name: skewed[name]) == "FeSEM+CAM"
    assert "here it helped in 1 of 2" in done.stdout
    assert f"Report: {made / 'report/report.html'}" in done.stdout and (made / "report/report.html").is_file()
    assert next_steps().replace("archipelago ", "python -m platform.launch ") in done.stdout
    assert done.stdout.startswith(first_comment("comparison")) and "points" in done.stdout
    last = done.stdout.rstrip().splitlines()[-1]  # and no offer to open it: nobody could answer
    assert last.startswith(f"Report: {made / 'report/report.html'}")


def test_dry_run_of_one_experiment_says_what_it_would_use_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["method=ifca", "clients=7", "fleet.actors=1", f"storage={tmp_path}"]
    assert archipelago.cli.main.main(["--dry-run", *settings]) == 0
    said = capsys.readouterr().out
    assert "ifca on digits" in said and "7 clients" in said
    assert re.search(r"devices +(CPUs|\d+ GPU)", said)
    assert not list(tmp_path.iterdir())


def test_report_of_runs_in_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where options are behind the address; what is printed is where the page is."""
    with s3_server() as (storage, objects):
        storage += "?region=us-east-1"
        for seed in (0, 1):
            run = write_run(tmp_path / f"mine-{seed}", seed=seed)
            Mirror(run, join(storage, f"mine-{seed}")).push()
        one = join(storage, "mine-0")
        assert one == "s3://bucket/results/mine-0?region=us-east-1"
        assert archipelago.cli.main.main(["report", one, "figures=no"]) == 0
        page = "s3://bucket/results/mine-0/report/report.html?region=us-east-1"
        assert f"Report: {page} (" in capsys.readouterr().out
        assert b"<title>mine-0</title>" in objects["bucket/results/mine-0/report/report.html"]
        both = [one, join(storage, "mine-1"), "figures=no"]
        assert archipelago.cli.main.main(["report", *both, f"out={join(storage, 'both')}"]) == 0
        assert "Report: s3://bucket/results/both/report.html?region" in capsys.readouterr().out
        assert "bucket/results/both/table.csv" in objects
        assert archipelago.cli.main.main(["report", join(storage, "none"), "figures=no"]) == 2
        assert "There is nothing at 's3://bucket/results/none?region" in capsys.readouterr().err
        for name in ("mine-0", "mine-1", "both"):  # no copies are left behind
            copy = working_copy(join(storage, name))
            assert not copy.exists() and not copy.with_name(f"copy-{copy.name}").exists()


@pytest.mark.full
def test_run_in_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with s3_server() as (storage, objects):
        assert (
            archipelago.cli.main.main([*TINY, f"storage={storage}", "name=mine", "checkpoint.every=2"]) == 0
        )
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
        assert archipelago.cli.main.main(["resume", f"{storage}/mine"]) == 0
        assert_equal_runs(open_run(f"{storage}/mine").path, tmp_path / "here")
