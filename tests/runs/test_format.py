"""The formats of run and sweep directories: committed ones of the first open, newer ones are refused, one status."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from archipelago import open_run
from archipelago.core.errors import UserError
from archipelago.runs import format as run_format
from archipelago.runs.files import RunFiles
from archipelago.runs.lock import FolderLock
from archipelago.runs.sweeps import find_trials, read_sweep, sweep_trials
from archipelago.sweeps.directory import SweepDirectory
from tests.support.errors import refused
from tests.support.written_runs import write_run, write_sweep

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED = [RESULTS / "cifar10-global-first", *sorted((RESULTS / "cifar10/runs").iterdir())]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_format_1_of_committed_runs_is_upgraded_in_memory_and_never_on_disk(path: Path) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert "format" not in json.loads((path / "status.json").read_text())
    run, files = open_run(path), RunFiles(path)
    assert run.config.callbacks == [] and files.setting("loggers") == [] and files.setting("plugins") == []
    assert run.config.method == files.setting("method") and len(run.metrics) == len(files.metrics) > 0
    (trial,) = find_trials([path])
    assert trial.status == run.status.state == files.status.state
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_format_newer_than_known_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "format": run_format.FORMAT + 1}))
    for read in (open_run, lambda path: RunFiles(path).config, lambda path: find_trials([path])):
        with pytest.raises(UserError) as error:
            read(path)
        assert error.value.code == "newer-format" and error.value.values["format"] == run_format.FORMAT + 1


def test_format_migrations_are_applied_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_format, "FORMAT", 4)
    monkeypatch.setitem(run_format.MIGRATIONS, 3, lambda config: {**config, "seen": config["callbacks"]})
    assert RunFiles(write_run(tmp_path / "run")).setting("seen") == []


def test_format_has_a_migration_from_every_older_version() -> None:
    assert sorted(run_format.MIGRATIONS) == list(range(1, run_format.FORMAT))


def sweep_at(path: Path, **document: object) -> Path:
    write_sweep(path, [{"run": ""}], sweep={"scheduler": "pbt", "sample": {"local.lr": "uniform(0.1, 1)"}})
    content = {**yaml.safe_load((path / "sweep.yaml").read_text()), **document}
    (path / "sweep.yaml").write_text(yaml.safe_dump(content))
    return path


def test_sweep_format_1_of_committed_sweeps_is_upgraded_in_memory_and_never_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "cifar10"
    shutil.copytree(RESULTS / "cifar10", path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert "format" not in yaml.safe_load((path / "sweep.yaml").read_text())
    assert read_sweep(path)["declares"] == {"population": False}
    assert read_sweep(path)["sweep"]["methods"][0] == "fedavg"
    with contextlib.closing(SweepDirectory.open(str(path))) as opened:
        assert len(opened.rows) == len(find_trials([path])) > 10
    left = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}
    assert left == before


def test_sweep_format_1_knew_one_population(tmp_path: Path) -> None:
    (trial,) = sweep_trials(sweep_at(tmp_path / "old"))
    assert trial.population
    (trial,) = sweep_trials(sweep_at(tmp_path / "new", format=2, declares={"population": False}))
    assert not trial.population


def test_sweep_format_newer_than_known_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = sweep_at(tmp_path / "sweep", format=run_format.SWEEP_FORMAT + 1)
    for read in (read_sweep, lambda path: find_trials([path]), lambda path: SweepDirectory.open(str(path))):
        with pytest.raises(UserError) as error:
            read(path)
        assert error.value.code == "newer-format"
        assert error.value.values == {"format": run_format.SWEEP_FORMAT + 1, "known": run_format.SWEEP_FORMAT}


def test_sweep_format_that_is_no_number_is_damage(tmp_path: Path) -> None:
    with refused("damaged", says=("sweep.yaml", "'new'")):
        read_sweep(sweep_at(tmp_path / "sweep", format="new"))


def test_sweep_format_migrations_are_applied_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_format, "SWEEP_FORMAT", 3)
    monkeypatch.setitem(run_format.SWEEP_MIGRATIONS, 2, lambda sweep: {**sweep, "seen": sweep["declares"]})
    assert read_sweep(sweep_at(tmp_path / "sweep"))["seen"] == {"population": True}


def test_sweep_format_has_a_migration_from_every_older_version() -> None:
    assert sorted(run_format.SWEEP_MIGRATIONS) == list(range(1, run_format.SWEEP_FORMAT))


def test_status_of_open_run_and_of_reports_is_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", state="running")

    def states() -> set[str]:
        return {open_run(path).status.state, RunFiles(path).status.state, find_trials([path])[0].status}

    assert states() == {"running"}  # a copy without its lock: nothing is known
    lock = FolderLock(path, path)
    named = (path / ".lock").read_text()
    assert states() == {"running"}
    lock.release()
    assert states() == {"interrupted"}
    (path / ".lock").write_text(named)  # as a kill leaves it
    assert states() == {"interrupted"}
    (path / ".lock").write_text("process 1 on another-machine\n")
    assert states() == {"running"}
