"""The run directory: refusals, exact files, crashes that leave no trace, and the way back to data frames."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

import archipelago
from actors.reports import RoundReport
from archipelago.core.settings import DataSettings, PartitionSettings
from archipelago.data import build_federation
from archipelago.runs.directory import RunDirectory
from archipelago.runs.reader import Run
from tests.support.errors import refused

CONFIG = "method: ifca\nrounds: 12\nseed: 0\ndata:\n  name: digits\nlocal:\n  lr: 0.05\nfleet:\n  actors: 2\n"
ENVIRONMENT = {"python": "3.11.0", "packages": {"torch": "2.13.0"}, "command": "python -m platform.launch"}
SPEC = [
    {"name": "w", "shape": [2, 3], "start": 0, "stop": 6},
    {"name": "b", "shape": [2], "start": 6, "stop": 8},
]


def make(path: Path, **changes: Any) -> RunDirectory:
    arguments = {"config_yaml": CONFIG, "environment": ENVIRONMENT, **changes}
    return RunDirectory.create(path, **arguments)


def report(number: int, clients: int = 6) -> RoundReport:
    """What round `number` of an imaginary experiment says; a function of the number alone."""
    draw = np.random.default_rng(number)
    metrics: dict[str, Any] = {"participants": clients, "federated_objective": draw.random()}
    columns = None
    if number % 2 == 0:  # evaluated every other round, hence columns that come late
        metrics |= {"micro_accuracy": draw.random(), "micro_loss": draw.random(), "ari": None}
        columns = {"client": np.arange(clients, dtype=np.int32), "accuracy": draw.random(clients)}
        if number >= 6:
            metrics["cluster_sizes"] = draw.integers(0, 9, 4).tolist()
            columns["macro_f1"] = draw.random(clients)
    return RoundReport(
        round=number,
        metrics=metrics,
        clients=columns,
        assignment=draw.integers(-1, 4, clients),
        timings={"round": time.perf_counter(), "train": 0.5},
        events=[f"client {number} was dropped: λ is too large"] if number % 5 == 0 else [],
    )


def write_rounds(run: RunDirectory, rounds: Iterable[int], every: int = 4) -> None:
    for number in rounds:
        run.append(report(number))
        if number % every == 0:
            run.flush(number)


def finish(run: RunDirectory) -> None:
    run.finish({"shared": np.arange(8, dtype=np.float32), "clusters": np.ones((4, 8), np.float32)}, SPEC)
    run.close()


DETERMINISTIC = ("metrics.csv", "events.jsonl", "clients.parquet", "assignments.parquet", "config.yaml",
                 "status.json", "models/shared.safetensors", "models/clusters.safetensors")  # fmt: skip


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in DETERMINISTIC}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run = make(path)
    write_rounds(run, range(1, 13))
    finish(run)
    return path


# Making and opening -----------------------------------------------------------------------------------------


def test_new_run_holds_its_config_environment_and_partition(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "deep" / "one"
    federation = build_federation(DataSettings(), PartitionSettings(), 5, 0)
    with make(path, federation=federation) as run:
        assert run.path == path
        assert run.config_yaml == CONFIG
        assert json.loads((path / "environment.json").read_text()) == ENVIRONMENT
        assert str(run.status) == "running, 0 of 12 rounds"
    np.testing.assert_array_equal(Run(path).partition["train"], federation.indices()["train"])
    held = Run(path).label_counts
    assert Run(path).federation["train"].tolist() == federation.sizes.tolist()
    assert held.groupby("part")["samples"].sum().to_dict() == {"test": 359, "train": 1438}
    assert {entry.name for entry in (path / "federation").iterdir()} == {
        "clients.parquet", "counts.parquet", "facts.json",
    }  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["one"]


def test_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run").close()
    assert (tmp_path / "run" / "config.yaml").exists()


def test_existing_run_is_refused_with_the_way_to_resume_it(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    before = {entry.name for entry in tmp_path.iterdir()}
    with refused("exists", path=tmp_path / "run") as caught:
        make(tmp_path / "run")
    assert f"resume {tmp_path / 'run'}`" in str(caught.value)
    assert {entry.name for entry in tmp_path.iterdir()} == before


def test_folder_or_file_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    (tmp_path / "file").write_text("text")
    with refused("exists", says="name=...", path=tmp_path / "photos"):
        make(tmp_path / "photos")
    with refused("exists", says="name=...", path=tmp_path / "file"):
        make(tmp_path / "file")
    with refused("unwritable", says="storage="):
        make(tmp_path / "file" / "run")
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "meow"
    assert {entry.name for entry in tmp_path.iterdir()} == {"photos", "file"}


def test_creation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        make(tmp_path / "run", environment={"bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_opening_what_is_no_run_names_the_runs_nearby(tmp_path: Path) -> None:
    make(tmp_path / "ifca-digits").close()
    with refused("not-found", says=": ifca-digits."):
        RunDirectory.open(tmp_path / "ifca-digitz")
    (tmp_path / "empty").mkdir()
    with refused("not-a-run", says=("config.yaml", "status.json")):
        RunDirectory.open(tmp_path / "empty")
    with refused("not-a-run", says="ifca-digits"):
        archipelago.open_run(tmp_path)


def test_run_of_another_config_is_refused_by_the_setting_that_differs(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    other = CONFIG.replace("lr: 0.05", "lr: 0.1").replace("actors: 2", "actors: 5")
    with refused("other-config", says=("local.lr is 0.05", "0.1 here", "fleet.actors is 2", "5 here")):
        RunDirectory.open(tmp_path / "run", expect_config=other)
    with refused("other-config", says="method is ifca"):
        RunDirectory.open(tmp_path / "run", expect_config=CONFIG.replace("method: ifca\n", ""))
    reordered = "seed: 0\n" + CONFIG.replace("seed: 0\n", "").replace("actors: 2", "actors: 5")
    RunDirectory.open(tmp_path / "run", expect_config=reordered, ignore=["fleet."]).close()


def test_only_one_process_writes_and_the_sentence_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    code = (
        "import sys, time\nfrom archipelago.runs.directory import RunDirectory\n"
        f"run = RunDirectory.create(sys.argv[1], {CONFIG!r}, {{}})\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert Run(path).status.state == "running"
        with refused("busy", says=f"process {child.pid} "):
            RunDirectory.open(path)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    # The lock died with the process.
    assert Run(path).status.state == "interrupted"
    RunDirectory.open(path).close()


def test_two_writers_in_one_process_are_refused_too(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with refused("busy", says=f"process {os.getpid()} "):
        RunDirectory.open(tmp_path / "run")
    run.close()
    RunDirectory.open(tmp_path / "run").close()


# Files of a run ---------------------------------------------------------------------------------------------


def test_every_round_reaches_the_files_at_once(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        run.append(report(1))
        assert (run.path / "metrics.csv").read_text().startswith("round,participants,federated_objective\n")
        run.append(report(2))
        lines = (run.path / "metrics.csv").read_text().splitlines()
        assert lines[0] == "round,participants,federated_objective,micro_accuracy,micro_loss,ari"
        assert lines[1].startswith("1,6,") and lines[1].endswith(",,,")
        assert repr(report(2).metrics["micro_accuracy"]) in lines[2]
        assert (run.path / "timings.csv").read_text().startswith("round,total,train\n1,")
        assert Run(run.path).status.rounds_done == 2


def test_numbers_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-300, -0.0, math.inf, math.nan, float(np.float32(0.1)), 12345678901234567.0]
    with make(tmp_path / "run") as run:
        for number, value in enumerate(values, start=1):
            metrics = {"x": value, "np": np.float32(value), "sizes": [number, None, 0.5]}
            run.append(RoundReport(number, metrics))
    frame = Run(tmp_path / "run").metrics
    assert [v.hex() for v in frame["x"]] == [v.hex() for v in values]
    assert frame["sizes"].tolist()[2] == [3, None, 0.5]
    assert frame["np"].astype(np.float32).tolist()[:3] == [np.float32(v) for v in values[:3]]


def test_metric_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run, pytest.raises(TypeError, match="metric 'colour' is a str"):
        run.append(RoundReport(1, {"colour": "red"}))


def test_columns_that_are_not_aligned_are_refused(tmp_path: Path) -> None:
    columns = {"client": np.arange(3), "loss": np.zeros(2)}
    with make(tmp_path / "run") as run, pytest.raises(ValueError, match="not aligned"):
        run.append(RoundReport(1, clients=columns))


def test_rounds_only_go_forward(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        run.append(report(3))
        with pytest.raises(ValueError, match="truncate"):
            run.append(report(3))
    with RunDirectory.open(tmp_path / "run") as run, pytest.raises(ValueError, match="truncate"):
        run.append(report(4))


def test_tables_of_a_running_and_of_a_finished_run_are_the_same(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    write_rounds(run, range(1, 13))
    reader = Run(tmp_path / "run")
    while_running = reader.clients, reader.assignments
    finish(run)
    for before, after in zip(while_running, (reader.clients, reader.assignments), strict=True):
        pd.testing.assert_frame_equal(before, after)
    assert not (tmp_path / "run" / "parts").exists()
    clients = reader.clients
    assert list(clients.columns) == ["round", "client", "accuracy", "macro_f1"]
    assert clients["round"].unique().tolist() == [2, 4, 6, 8, 10, 12]
    expected = report(8).clients
    assert expected is not None
    np.testing.assert_array_equal(clients[clients["round"] == 8]["macro_f1"], expected["macro_f1"])
    assert clients[clients["round"] == 2]["macro_f1"].isna().all()
    assignments = reader.assignments
    assert len(assignments) == 12 * 6
    np.testing.assert_array_equal(assignments[assignments["round"] == 3]["cluster"], report(3).assignment)


def test_two_equal_runs_write_equal_bytes_however_often_they_flush(tmp_path: Path, undisturbed: Path) -> None:
    for every in (1, 5, 100):
        run = make(tmp_path / f"every-{every}")
        write_rounds(run, range(1, 13), every)
        finish(run)
        assert contents(run.path) == contents(undisturbed)


# Crashes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("killed_after", "torn"),
    [
        (1, b""),
        (4, b"9,6,0.1"),
        (5, b'"[1, 2'),
        (7, b'{"round": 9, "te'),
        (8, b"\xc3"),
        (11, b"9"),
        (12, b"1"),
    ],
)
def test_resumed_run_ends_in_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Path, killed_after: int, torn: bytes
) -> None:
    run = make(tmp_path / "run")
    write_rounds(run, range(1, killed_after + 1))
    run.close()  # a kill closes files and lets go of the lock, and says nothing
    for name in ("metrics.csv", "timings.csv", "events.jsonl"):
        with (run.path / name).open("ab") as file:
            file.write(torn)
    (run.path / ".status.json.tmp-99").write_text("{")
    checkpoint = killed_after - killed_after % 4
    with RunDirectory.open(run.path, expect_config=CONFIG, environment=ENVIRONMENT) as again:
        again.truncate(checkpoint)
        assert again.status.rounds_done == checkpoint
        write_rounds(again, range(checkpoint + 1, 13))
        finish(again)
    assert contents(run.path) == contents(undisturbed)
    assert Run(run.path).timings["round"].tolist() == list(range(1, 13))
    assert not list(run.path.glob(".*tmp*"))


def test_checkpoint_older_than_the_last_flush_is_enough(tmp_path: Path, undisturbed: Path) -> None:
    """The newest checkpoint may be damaged: tables are then cut inside what was flushed."""
    run = make(tmp_path / "run")
    write_rounds(run, range(1, 11), every=5)
    run.close()
    with RunDirectory.open(run.path) as again:
        again.truncate(3)
        write_rounds(again, range(4, 13))
        finish(again)
    assert contents(run.path) == contents(undisturbed)


def test_without_any_checkpoint_a_run_starts_over(tmp_path: Path, undisturbed: Path) -> None:
    run = make(tmp_path / "run")
    write_rounds(run, range(1, 7))
    run.close()
    with RunDirectory.open(run.path) as again:
        again.truncate(0)
        assert len(Run(run.path).clients) == 0
        write_rounds(again, range(1, 13))
        finish(again)
    assert contents(run.path) == contents(undisturbed)


def test_kill_while_finishing_or_truncating_neither_loses_nor_doubles_rows(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Old parts and the merged file may both be there, or a new part and some of the old ones."""
    run = make(tmp_path / "run")
    write_rounds(run, range(1, 13))
    shutil.copytree(run.path / "parts", tmp_path / "parts")
    finish(run)
    merged = (run.path / "clients.parquet").read_bytes()
    for leftover in (["*-000004.parquet"], ["*-000012.parquet"], ["*.parquet"]):
        for pattern in leftover:
            (run.path / "parts").mkdir(exist_ok=True)
            for part in (tmp_path / "parts").glob(pattern):
                shutil.copy(part, run.path / "parts")
        assert len(Run(run.path).clients) == 6 * 6
        with RunDirectory.open(run.path) as again:
            again.truncate(12)
            finish(again)
        assert (run.path / "clients.parquet").read_bytes() == merged
    assert contents(run.path) == contents(undisturbed)


def test_truncating_drops_what_the_end_of_a_run_left(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    write_rounds(run, range(1, 13))
    for number in (4, 8, 12):
        run.record("heads", number, {"client": np.arange(2), "x": np.array([number, 0.5])})
        (run.path / "checkpoints" / f"round-{number:06d}").mkdir()
    (run.path / "checkpoints" / "round-000012.tmp-77").mkdir()
    (run.path / "summary.md").write_text("the end")
    finish(run)
    assert Run(run.path).record("heads")["x"].tolist() == [4, 0.5, 8, 0.5, 12, 0.5]
    with RunDirectory.open(run.path) as again:
        again.truncate(8)
    reader = Run(run.path)
    assert reader.record("heads")["round"].unique().tolist() == [4, 8]
    names = sorted(entry.name for entry in (run.path / "checkpoints").iterdir())
    assert names == ["round-000004", "round-000008"]
    assert reader.models == {}
    assert reader.summary == ""
    assert reader.metrics["round"].max() == 8
    assert reader.assignments["round"].max() == 8
    with refused("unknown-name", says="heads", kind="record", name="tails"):
        reader.record("tails")


def test_damaged_table_is_a_sentence(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    write_rounds(run, range(1, 5))
    run.close()
    metrics = run.path / "metrics.csv"
    whole = metrics.read_text()
    metrics.write_text(whole.replace("\n2,", "\n2,7,7,7,7,"))
    with refused("damaged", says=("metrics.csv", "line 3", "10 fields")):
        RunDirectory.open(run.path).truncate(4)
    metrics.write_text(whole)
    (run.path / "parts" / "clients-000004.parquet").write_bytes(b"PAR1 no")
    with refused("damaged", says="clients-000004.parquet"):
        _ = Run(run.path).clients


_WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_directory import *  # noqa: F403
from archipelago.runs.checkpoints import CheckpointWriter, latest

path = Path(sys.argv[2])
if path.exists():
    run = RunDirectory.open(path)
    found = latest(run)
    done = found[0] if found else 0
    assert not found or found[1] == {"state": {"round": done}}
    run.truncate(done)
else:
    run, done = make(path), 0
writer = CheckpointWriter(run, every=4, keep=2)
print("ready", flush=True)
for number in range(done + 1, 13):
    run.append(report(number))
    if writer.due(number):
        run.flush(number)
        writer.submit(number, {"state": {"round": number}})
    time.sleep(0.004)
writer.close()
finish(run)
print("done", flush=True)
"""


@pytest.mark.slow
def test_run_killed_again_and_again_ends_in_the_same_bytes(tmp_path: Path, undisturbed: Path) -> None:
    path = tmp_path / "run"
    draw = random.Random(5)
    for attempt in range(30):
        arguments = [sys.executable, "-c", _WORKER, str(Path(__file__).parent), str(path)]
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(draw.random() * 0.12 * (1 + attempt / 3))  # longer on a machine with other things to do
        child.send_signal(signal.SIGKILL)
        done = "done" in child.stdout.read()
        child.stdout.close()
        child.wait()
        if path.exists() and Run(path).status.state == "finished":
            break
    else:
        pytest.fail("the run never came to its end")
    assert done or Run(path).status.state == "finished"
    assert contents(path) == contents(undisturbed)


# Ends, and the way back -------------------------------------------------------------------------------------


def test_how_a_run_ended_is_in_its_status(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), make(tmp_path / "failed") as run:
        run.append(report(1))
        raise RuntimeError("Client 3 failed in round 2\nwith a long trace")
    sentence = Run(tmp_path / "failed").status.sentence or ""
    assert sentence.startswith("RuntimeError: Client 3 failed in round 2 (test_directory.py, line ")
    with pytest.raises(KeyboardInterrupt), make(tmp_path / "stopped"):
        raise KeyboardInterrupt
    assert Run(tmp_path / "stopped").status.sentence == "stopped by the user"
    with make(tmp_path / "finished") as run:
        run.finish()
    assert Run(tmp_path / "finished").status.state == "finished"


def test_resume_on_another_machine_is_reported(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    now = {**ENVIRONMENT, "packages": {"torch": "2.14.0"}}
    with RunDirectory.open(tmp_path / "run", environment=now) as run:
        assert "resumed" not in Run(run.path).environment  # not before anything was done
        run.truncate(0)
    reader = Run(tmp_path / "run")
    assert reader.environment["resumed"] == [now]
    assert reader.environment["packages"] == {"torch": "2.13.0"}
    assert "torch was 2.13.0" in reader.events["text"].tolist()[0]


def test_models_come_back_with_their_spec_and_never_as_code(undisturbed: Path) -> None:
    run = archipelago.open_run(undisturbed)
    models = run.models
    assert sorted(models) == ["clusters", "shared"]
    assert models["clusters"].shape == (4, 8)
    assert models["shared"].dtype == np.float32
    assert models.spec == run.spec == SPEC
    tensors = models.tensors("shared")
    np.testing.assert_array_equal(tensors["w"], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(tensors["b"], [6, 7])
    assert models.tensors("clusters", row=3)["w"].shape == (2, 3)
    with refused("ambiguous", says="row=3", setting="row", name="clusters"):
        models.tensors("clusters")
    with refused("unknown-name", kind="model", name="shard", nearest="shared"):
        models.tensors("shard")
    with safe_open(str(undisturbed / "models" / "shared.safetensors"), framework="numpy") as file:
        assert json.loads(file.metadata()["spec"]) == SPEC


def test_run_is_read_without_ray_and_lightning(undisturbed: Path) -> None:
    code = (
        "import sys, archipelago\n"
        f"run = archipelago.open_run({str(undisturbed)!r})\n"
        "print(len(run.metrics), len(run.clients), len(run.models), run.config.local.lr, len(run.events))\n"
        "print([m for m in ('ray', 'lightning', 'torch', 'sklearn') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "12 36 2 0.05 2\n[]\n"


def test_run_describes_itself(undisturbed: Path) -> None:
    text = repr(archipelago.open_run(undisturbed))
    assert text.splitlines()[0].endswith("(ifca on digits, seed 0): finished, 12 of 12 rounds")
    assert "round 12: micro_accuracy" in text
    assert "nan" not in text  # the ground-truth groups are unknown there
    assert ".metrics" in text


def test_run_without_a_single_round_can_be_read(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    run = Run(tmp_path / "run")
    for frame in (run.metrics, run.timings, run.clients, run.assignments, run.events):
        assert len(frame) == 0
    assert "interrupted, 0 of 12 rounds" in repr(run)
