"""Bad inputs of the trial: run and sweep directories whose files are damaged, missing, swapped or links.

Whatever happened to a run, `resume` gives the bits of the run that was never stopped, or a sentence; `report` gives
the right numbers, or a sentence; neither writes outside of the run, and what was not damaged is not lost.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support.runs import assert_equal_runs
from tests.support.warm import Ended, Warm
from tests.trial.case import changes, contents

_TINY = (
    "fleet.backend=in_process clients=4 rounds=4 local.steps=2 local.batch=16 model=mlp model.hidden=[8] "
    "checkpoint.every=2 records.rounds=2"
)
_STOPPED = """
from archipelago import Callback
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment

class Stop(Callback):
    def on_round(self, run, report):
        if report.round == 3:
            raise KeyboardInterrupt

try:
    run_experiment(load_config(None, "{settings}".split()), "{folder}/stopped", callbacks=[Stop()], quiet=True)
except KeyboardInterrupt:
    pass
"""

# What a run is made of; * stands for whatever the name has there.
STOPPED = (
    "config.yaml", "status.json", "identity.json", "environment.json", "vocabulary.json", "metrics.csv",
    "timings.csv", "events.jsonl", "partition.safetensors", "federation/clients.parquet", "federation/counts.parquet",
    "federation/facts.json", "parts/clients-000002.parquet", "parts/assignments-000002.parquet",
    "checkpoints/round-000002/manifest.json", "checkpoints/round-000002/server.safetensors",
    "checkpoints/round-000002/clients-00000.safetensors", "records/*.parquet", ".lock",
)  # fmt: skip
FINISHED = (
    "config.yaml", "status.json", "identity.json", "environment.json", "vocabulary.json", "metrics.csv",
    "timings.csv", "events.jsonl", "clients.parquet", "assignments.parquet", "partition.safetensors",
    "federation/clients.parquet", "federation/counts.parquet", "federation/facts.json", "records/*.parquet",
    "records/examples.safetensors", "models/*.safetensors", "summary.md",
)  # fmt: skip
SWEEP = ("sweep.yaml", "trials.csv", "identity.json")

# What is whole, and stands in the place of another file: (the file, whose content it gets).
_TABLES = (
    ("metrics.csv", "timings.csv"), ("timings.csv", "metrics.csv"), ("metrics.csv", "events.jsonl"),
    ("events.jsonl", "metrics.csv"), ("events.jsonl", "status.json"), ("federation/facts.json", "status.json"),
    ("federation/clients.parquet", "federation/counts.parquet"), ("environment.json", "identity.json"),
    ("federation/counts.parquet", "federation/clients.parquet"), ("vocabulary.json", "environment.json"),
    ("records/cosine-000001.parquet", "records/models-000001.parquet"), ("config.yaml", "vocabulary.json"),
)  # fmt: skip
REPLACED_STOPPED = (
    *_TABLES,
    ("parts/clients-000002.parquet", "parts/assignments-000002.parquet"),
    ("parts/clients-000002.parquet", "parts/clients-000003.parquet"),
    ("parts/assignments-000002.parquet", "federation/clients.parquet"),
    ("checkpoints/round-000002/server.safetensors", "checkpoints/round-000002/clients-00000.safetensors"),
    ("checkpoints/round-000002/clients-00000.safetensors", "partition.safetensors"),
    ("partition.safetensors", "checkpoints/round-000002/server.safetensors"),
)
REPLACED_FINISHED = (
    *_TABLES,
    ("clients.parquet", "assignments.parquet"),
    ("assignments.parquet", "clients.parquet"),
    ("clients.parquet", "federation/clients.parquet"),
    ("records/examples.safetensors", "partition.safetensors"),
    ("models/clusters.safetensors", "records/examples.safetensors"),
)

# What people keep in a run; nothing ever changes it.
FOREIGN = (
    "notes.txt",
    "backup/metrics.csv",
    "checkpoints/round-000002-copy/manifest.json",
    "models/mine.bin",
)


def make_runs(warm: Warm, folder: Path) -> None:
    """The undamaged runs: `finished`, the same one `stopped` after round 3, `other`, and a `sweep` of two seeds."""
    settings = f"method=ifca clusters=2 {_TINY}"
    script = folder / "stopped.py"
    script.write_text(_STOPPED.replace("{settings}", settings).replace("{folder}", str(folder)))
    ended = [
        warm([*settings.split(), f"storage={folder}", "name=finished"], folder),
        warm([*_TINY.split(), "method=fedavg", f"storage={folder}", "name=other"], folder),
        warm([*_TINY.split(), "method=fedavg", f"storage={folder}", "name=sweep", "sweep.seeds=2"], folder),
        warm.python(script, folder),
    ]
    assert all(each.code == 0 for each in ended), [each.error for each in ended]


# Damage ------------------------------------------------------------------------------------------------------


def _replaced(path: Path, change: Callable[[bytes], bytes]) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(change(data))


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :] if data else b"\x10"


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    """The same content, outside of the run."""
    outside = path.parents[len(path.parts) - 1 - path.parts.index("run")] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "empty": lambda path: _replaced(path, lambda data: b""),
    "cut in half": lambda path: _replaced(path, lambda data: data[: len(data) // 2]),
    "a flipped bit": lambda path: _replaced(path, _flipped),
    "zeros": lambda path: _replaced(path, lambda data: bytes(len(data))),
    "another file's content": lambda path: _replaced(path, lambda data: b"\xff\xfe not what it was \x00\n"),
    "more behind its end": lambda path: _replaced(path, lambda data: data + b"\x00[{,,\n"),
    "a folder": _folder,
    "a FIFO": _fifo,
    "a link": _link,
}


def damaged(path: Path, kind: str) -> None:
    """Damage the file of this name, or the first one that a name with a star means."""
    found = sorted(path.parent.glob(path.name))
    assert found, path
    DAMAGE[kind](found[0])


def replaced(run: Path, file: str, other: str) -> None:
    """Put the content of another file of the run in the place of this one."""
    (run / file).write_bytes((run / other).read_bytes())


# Verdicts ----------------------------------------------------------------------------------------------------


def resumed(warm: Warm, folder: Path, whole: Path) -> list[str]:
    """What is wrong with how the run in `folder/run` was resumed; `whole` is the run that was never stopped."""
    before = contents(folder)
    ended = warm(["resume", str(folder / "run")], folder)
    faults = [*_judged(ended), *foreign_changes(before, contents(folder))]
    if ended.code == 0:
        faults += changes(before, contents(folder), ("run/",))
        try:
            assert_equal_runs(folder / "run", whole)
        except Exception as error:
            faults.append(f"other bits: {str(error)[:200]}")
    else:
        faults += changes(before, contents(folder))
    return [*faults, ended.error[-1200:]] if faults else []


def reported(warm: Warm, folder: Path, *others: Path, table: str) -> list[str]:
    """What is wrong with the report of `folder/run` and others; `table` is the table.csv that was right before."""
    before = contents(folder)
    out = folder / "out"
    words = ["report", str(folder / "run"), *map(str, others), f"out={out}", "figures=no"]
    ended = warm(words, folder)
    faults = [*_judged(ended), *changes(before, contents(folder), ("out",))]
    if ended.code == 0:
        made = (out / "table.csv").read_text() if (out / "table.csv").is_file() else ""
        said = ended.output + ended.error
        faults += wrong_numbers(made, table, said)
        if others and "FedAvg" not in said:
            faults.append("the undamaged run is missing")
    elif others:
        faults.append("one damaged run killed the report of all")
    return [*faults, ended.error[-1200:], ended.output[-300:]] if faults else []


def wrong_numbers(made: str, right: str, said: str) -> list[str]:
    """Rows of a table.csv that are not as they were and do not say so themselves; rows that are gone without a word."""
    rows, known = _rows(made), _rows(right)
    faults = []
    told = {problem for (problem, *_), row in rows.items() if any(word in row["note"] for word in _MARKS)}
    for key, row in rows.items():
        numbers = [cell for name, cell in row.items() if name != "note"]
        expected = [cell for name, cell in known.get(key, {}).items() if name != "note"]
        said_so = any(word in row["note"] for word in _MARKS)
        if not row["seeds"] and key[0] in told:  # what guessing gives, of the runs that are left
            said_so = True
        if numbers != expected and not said_so:
            faults.append(f"other numbers in {key}, and not a word about it")
    words = ("left out", "damaged", "cannot be read", "changed since it was made")
    if set(known) - set(rows) and not any(word in said for word in words):
        faults.append(f"missing without a word: {sorted(set(known) - set(rows))[0]}")
    return faults[:3]


_MARKS = ("changed since it was made", "damaged", "left out", "failed", "running")


def _rows(text: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Of the tables alone, without what depends on the other rows or on the clock."""
    found = {}
    for row in csv.DictReader(io.StringIO(text)):
        kept = {
            name: str(cell)
            for name, cell in row.items()
            if name in ("mean", "std", "seeds", "values", "note")
        }
        found[row["problem"], row["method"], row["metric"]] = kept
    return found


def table(warm: Warm, *runs: Path) -> str:
    """The table.csv of the report of undamaged runs."""
    out = runs[0].parent / "-".join(["table", *(run.name for run in runs)])
    if not out.exists():
        ended = warm(["report", *map(str, runs), f"out={out}", "figures=no"], runs[0].parent)
        assert ended.code == 0, ended.error
    return (out / "table.csv").read_text()


def _judged(ended: Ended) -> list[str]:
    faults = []
    if ended.code is None:
        faults.append("hang")
    elif ended.code not in (0, 1, 2):
        faults.append(f"exit code {ended.code}")
    if "Traceback" in ended.error + ended.output:
        faults.append("traceback")
    if (
        ended.code in (1, 2)
        and not ended.last_line.endswith((".", "?", ")"))
        and "resume" not in ended.last_line
    ):
        faults.append("no sentence")
    if ended.code == 2 and len(ended.error.strip().splitlines()) != 1:
        faults.append("more than one sentence")
    return faults


def copied(run: Path, folder: Path) -> Path:
    """A copy of an undamaged run or sweep as `folder/run`, with files of somebody's own in it and beside it."""
    folder.mkdir()
    shutil.copytree(run, folder / "run", symlinks=True)
    for name in FOREIGN:
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {name}\n")
    (folder / "runs-of-others").mkdir()
    (folder / "runs-of-others" / "metrics.csv").write_text("round\n1\n")
    return folder


def foreign_changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What happened to these files."""
    mine = {f"run/{name}" for name in FOREIGN}
    return [
        f"a file of somebody's own is changed or lost: {name}"
        for name in mine
        if before.get(name) != after.get(name)
    ]
