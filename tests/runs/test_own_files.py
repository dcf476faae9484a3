"""Files that are not the platform's: whatever it does, it deletes and overwrites only what it made itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago import open_run
from archipelago.core.errors import UserError
from archipelago.core.own_files import is_own_file, remove_own_files
from archipelago.experiments import runner
from archipelago.experiments.callbacks import CallbackFailure
from archipelago.experiments.figures_data import write_partition
from archipelago.experiments.runner import resume, run_experiment
from archipelago.reports.build import ReportRequest, build_report
from archipelago.runs.checkpoints import CheckpointWriter, checkpoints
from archipelago.runs.directory import RunDirectory
from archipelago.runs.storage import Mirror, join, read_text, write_text
from archipelago.runs.trees import write_arrays
from archipelago.runs.written import MODEL_FORMAT
from archipelago.sweeps.runner import resume_sweep, run_sweep
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs
from tests.support.sweeps import sweep_of
from tests.support.written_runs import write_run


def stopped_run(path: Path, *settings: str) -> Path:
    """A run that ended after its third round of four, with checkpoints of the second and third."""
    stop = StopAfter(3, "on_checkpoint")
    with pytest.raises(CallbackFailure):
        run_experiment(config_of("checkpoint.every=1", *settings), path, callbacks=[stop], quiet=True)
    return path


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file by its path, links by where they point to."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


FOREIGN = (
    "checkpoints/backup/server.safetensors",
    "checkpoints/round-000002-copy/server.safetensors",
    "checkpoints/round-000009.bak/server.safetensors",
    "checkpoints/round-000009.tmp/notes.txt",
    "checkpoints/round-9/notes.txt",
    "checkpoints/round-000009.txt",
    "records/mine-000099.parquet",
    "records/models-backup-000099.parquet",
    "records/notes.txt",
    "models/notes.txt",
    "parts/clients-backup.parquet",
    "parts/clients-000009-copy.parquet",
    "parts/notes.txt",
    "tensorboard/notes.txt",
    "federation/notes.txt",
    ".draft.tmp-1",
    ".status.json.tmp-old",
    ".drafts.tmp-1/text.txt",
    "mine/.draft.tmp-1",
    "mine/checkpoints/round-000009/server.safetensors",
    "notes.txt",
)


def add_foreign(run: Path) -> dict[str, bytes]:
    for name in FOREIGN:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"mine: {name}")
    models = ("models/backup.safetensors", "models/mine.safetensors")
    for name, metadata in zip(models, ({"format": MODEL_FORMAT}, {}), strict=True):
        write_arrays(run / name, {"clusters": np.ones(3, np.float32)}, metadata)
    return {name: (run / name).read_bytes() for name in (*FOREIGN, *models)}


def assert_kept(folder: Path, foreign: dict[str, bytes]) -> None:
    now = contents(folder)
    assert {name: now.get(name) for name in foreign} == foreign


def test_resume_keeps_what_others_put_into_a_run(tmp_path: Path) -> None:
    run = stopped_run(tmp_path / "run", "tensorboard=true", "checkpoint.keep=1")
    foreign = add_foreign(run)
    for name in (".metrics.csv.tmp-7", "records/.models-000004.parquet.tmp-7"):
        (run / name).write_text("half a file")
    for name in ("round-000004.tmp-7", "round-000001.old-7", ".round-000001.removed-7"):
        shutil.copytree(run / "checkpoints/round-000003", run / "checkpoints" / name)
    resume(run, quiet=True)
    assert_kept(run, foreign)
    alone = run_experiment(config_of("tensorboard=true"), tmp_path / "alone", quiet=True)
    assert_equal_runs(run, alone)
    left = set(contents(run)) - set(foreign) - set(contents(alone))
    # More than one log is what a resumed run has; nothing else is left of the first process.
    assert {
        name for name in left if not name.startswith(("tensorboard/", "checkpoints/round-000004/"))
    } == set()


def test_resume_from_the_first_round_keeps_what_others_put_into_a_run(tmp_path: Path) -> None:
    run = stopped_run(tmp_path / "run", "tensorboard=true")
    shutil.rmtree(run / "checkpoints")
    foreign = add_foreign(run)
    resume(run, quiet=True)
    assert_kept(run, foreign)
    assert_equal_runs(run, run_experiment(config_of("tensorboard=true"), tmp_path / "alone", quiet=True))


def test_own_files_are_all_that_a_run_and_its_report_write(tmp_path: Path) -> None:
    settings = (
        "method=ifca",
        "tensorboard=true",
        "records.tsne=true",
        "partition.holdout=0.5",
        "checkpoint.every=1",
    )
    run = run_experiment(config_of(*settings), tmp_path / "run", quiet=True)
    build_report(ReportRequest([str(run)]))
    assert [name for name in contents(run) if not is_own_file(name)] == []
    remove_own_files(run)
    assert not run.exists()


def test_checkpoint_pruning_keeps_what_others_put_into_a_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, every=1, keep=1)
    writer.submit(1, {"server": 1})
    writer.close()
    foreign = {"notes.txt": "mine", "deep/notes.txt": "mine too"}
    for name, text in foreign.items():
        (tmp_path / "checkpoints/round-000001" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "checkpoints/round-000001" / name).write_text(text)
    for round in (2, 3):
        writer = CheckpointWriter(tmp_path, every=1, keep=1)
        writer.submit(round, {"server": round})
        writer.close()
    assert [round for round, _ in checkpoints(tmp_path)] == [3]
    kept = {name: text for name, text in contents(tmp_path).items() if "round-000003" not in name}
    assert sorted(kept.values()) == [b"mine", b"mine too"]


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "records", "models", "parts", "federation", "report", "tensorboard", "figures",
     "checkpoints/round-000003", "report/figures", ".lock", "metrics.csv", "models/shared.safetensors"],
)  # fmt: skip
def test_resume_refuses_a_run_that_leads_elsewhere_and_changes_nothing(tmp_path: Path, name: str) -> None:
    run, other = stopped_run(tmp_path / "run"), tmp_path / "other"
    shutil.copytree(run, other / "run")
    for inner in ("backup/server.safetensors", "thesis-000099.parquet", "thesis.safetensors", "text.txt"):
        (other / inner).parent.mkdir(exist_ok=True)
        (other / inner).write_text("mine")
    link = run / name
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    target = other / "text.txt" if link.suffix or name == ".lock" else other
    link.symlink_to(target)
    before = contents(tmp_path)
    with pytest.raises(UserError) as error:
        resume(run, quiet=True)
    assert str(link) in str(error.value) and str(target) in str(error.value)
    assert contents(tmp_path) == before


def test_resume_takes_a_link_to_a_run_and_leaves_links_of_others_alone(tmp_path: Path) -> None:
    run = stopped_run(tmp_path / "elsewhere/run")
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for name in ("notes", "checkpoints/backup"):
        (run / name).symlink_to(tmp_path / "mine")
    resume(tmp_path / "run", quiet=True)
    assert open_run(run).status.state == "finished"
    assert (run / "notes").is_symlink() and (run / "checkpoints/backup").is_symlink()
    assert contents(tmp_path / "mine") == {"notes.txt": b"mine"}


def test_discard_keeps_what_others_put_into_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        (tmp_path / "run/notes.txt").write_text("mine")
        (tmp_path / "run/checkpoints/backup").mkdir()
        (tmp_path / "run/checkpoints/backup/a").write_text("mine")
        (tmp_path / "run/models/mine").symlink_to(tmp_path)
        raise UserError("No.")

    monkeypatch.setattr(runner, "InProcessSession", refuse)
    with pytest.raises(UserError, match="No"):
        run_experiment(config_of(), tmp_path / "run", quiet=True)
    left = {"checkpoints/backup/a": b"mine", "models/mine": str(tmp_path), "notes.txt": b"mine"}
    assert contents(tmp_path / "run") == left


def test_create_leaves_alone_what_another_process_is_building(tmp_path: Path) -> None:
    """Process ids repeat: on another node of a shared folder, in another container."""
    other = tmp_path / f".run.creating-{os.getpid()}"
    other.mkdir()
    (other / "config.yaml").write_text("theirs")
    RunDirectory.create(tmp_path / "run", "rounds: 1\n", {}).close()
    assert (other / "config.yaml").read_text() == "theirs"


def test_mirror_keeps_what_others_put_beside_a_run_in_an_object_store(tmp_path: Path) -> None:
    run, there = stopped_run(tmp_path / "run"), (tmp_path / "store").as_uri()
    Mirror(run, there).push()
    foreign = ["checkpoints/backup/server.safetensors", "notes.txt", "mine/metrics.csv"]
    for name in foreign:
        write_text(join(there, name), "mine")
    write_text(join(there, "checkpoints/round-000004/server.safetensors"), "its manifest was never sent")
    copy = Mirror(tmp_path / "copy", there)
    assert copy.fetch()
    assert not (tmp_path / "copy/checkpoints/round-000004").exists()
    shutil.rmtree(tmp_path / "copy")
    copy.push()  # all is gone here: nothing but the run is gone there
    assert set(contents(tmp_path / "store")) == set(foreign)


def test_partition_refuses_a_folder_of_others(tmp_path: Path) -> None:
    config = config_of(f"storage={tmp_path}", "name=mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("my: own\n")
    with pytest.raises(UserError) as error:
        write_partition(config)
    assert str(tmp_path / "mine") in str(error.value)
    assert contents(tmp_path) == {"mine/config.yaml": b"my: own\n"}
    (tmp_path / "mine/config.yaml").unlink()
    write_partition(config)
    write_partition(config)  # one that is there may be made again
    shutil.move(tmp_path / "mine/federation", tmp_path / "elsewhere")
    (tmp_path / "mine/federation").symlink_to(tmp_path / "elsewhere")
    with refused("symbolic-link"):
        write_partition(config)


def test_sweep_refuses_a_folder_of_others_and_links(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "fleet.backend=in_process", "sweep.seeds=1", "rounds=1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/trials.csv").write_text("my,own\n1,2\n")
    with pytest.raises(UserError):
        run_sweep(sweep, str(tmp_path / "mine"), quiet=True)
    assert contents(tmp_path / "mine") == {"trials.csv": b"my,own\n1,2\n"}
    address = tmp_path / "sweep"
    run_sweep(sweep, str(address), quiet=True)
    rows = (address / "trials.csv").read_text().replace("finished", "running")
    (address / "trials.csv").write_text(rows)
    (address / "runs").rename(tmp_path / "elsewhere")
    (address / "runs").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    with pytest.raises(UserError) as error:
        resume_sweep(str(address), quiet=True)
    assert str(tmp_path / "elsewhere") in str(error.value)
    assert contents(tmp_path) == before


def test_report_is_not_written_through_a_link_in_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/table.md").write_text("mine")
    (run / "report").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError) as error:
        build_report(ReportRequest([str(run)], figures="no"))
    assert str(tmp_path / "mine") in str(error.value) and "out=" in str(error.value)
    assert contents(tmp_path / "mine") == {"table.md": b"mine"}
    build_report(ReportRequest([str(run)], out=str(run / "report"), figures="no"))  # it was asked for
    assert read_text(str(tmp_path / "mine/table.md")) != "mine"
