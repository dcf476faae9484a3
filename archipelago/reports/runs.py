"""Run directories and sweeps as a report reads them: files only, so a run of another machine will do."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.files import complete_lines
from archipelago.core.own_files import numbered_files

Row = dict[str, Any]


class RunFiles:
    """One run directory; each file is read when it is first asked for, and what is read are whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config as nested mappings."""
        content = _yaml(self._text("config.yaml"), self.path / "config.yaml")
        if not isinstance(content, dict):
            found = type(content).__name__
            raise UserError(f"{self.path / 'config.yaml'} is damaged: expected settings, found {found}.")
        return content

    @cached_property
    def status(self) -> Mapping[str, Any]:
        """`state` (running, finished, failed, or interrupted: killed), `rounds_done`, `rounds`, `sentence`."""
        content: Mapping[str, Any] = self._json("status.json")
        if content.get("state") == "running" and self._was_killed():
            return {**content, "state": "interrupted"}
        return content

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Versions, processor, devices, commit and command; empty if there is none."""
        if not (self.path / "environment.json").is_file():
            return {}
        content: Mapping[str, Any] = self._json("environment.json")
        return content

    @cached_property
    def metrics(self) -> list[Row]:
        """One row a round; empty cells are left out."""
        return read_rows(self.path / "metrics.csv")

    @cached_property
    def timings(self) -> list[Row]:
        """Seconds by round and stage."""
        return read_rows(self.path / "timings.csv")

    @cached_property
    def events(self) -> list[Mapping[str, Any]]:
        """`round` and `text`."""
        lines = complete_lines(self.path / "events.jsonl").split("\n")
        return [json.loads(line) for line in lines if line]

    @cached_property
    def schedule(self) -> list[Mapping[str, Any]]:
        """`values` of settings that a member of a population took over, and after which `round`; empty elsewhere."""
        return self._json("schedule.json") if (self.path / "schedule.json").is_file() else []

    @property
    def chose_clusters(self) -> bool:
        """Whether `clusters` was chosen by the run itself (clusters=auto): its config has the choice alone."""
        chosen = f"clusters={self.setting('clusters')} was chosen by "
        return any(event["round"] == 0 and event["text"].startswith(chosen) for event in self.events)

    def setting(self, key: str) -> Any:
        """A setting by its dotted key; None if the config has none of that name."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def table(
        self, name: str, columns: Sequence[str] | None = None, rounds: Iterable[int] | None = None
    ) -> dict[str, Any]:
        """Columns of `clients` or `assignments` as arrays, of some rounds only; empty if there is no table.

        A run under way has its table in parts.
        """
        import pyarrow.parquet as pq

        files = [self.path / f"{name}.parquet"]
        if not files[0].is_file():
            files = [path for _, path in numbered_files(self.path / "parts", name)]
        wanted = None if rounds is None else [("round", "in", list(rounds))]
        tables = []
        for file in files:
            there = set(pq.read_schema(file).names)
            chosen = None if columns is None else [column for column in columns if column in there]
            tables.append(pq.read_table(file, columns=chosen, filters=wanted, use_threads=False))
        return _joined(tables)

    def record_rounds(self, name: str) -> list[int]:
        """The rounds in which a table was recorded."""
        return [round for round, _ in numbered_files(self.path / "records", name)]

    def record(self, name: str, round: int) -> dict[str, Any]:
        """The columns of a recorded table, as arrays; empty if there is none."""
        import pyarrow.parquet as pq

        path = self.path / "records" / f"{name}-{round:06d}.parquet"
        return _joined([pq.read_table(path, use_threads=False)]) if path.is_file() else {}

    def arrays(self, file: str) -> dict[str, Any]:
        """The arrays of a safetensors file of the run; empty if it is not there."""
        from safetensors.numpy import load_file

        path = self.path / file
        return dict(load_file(path)) if path.is_file() else {}

    def _was_killed(self) -> bool:
        """Whether a process of this machine began to write the run, and nobody does any more.

        Its name in the lock file goes when it ends by itself. Of another machine's process nothing can be told.
        """
        try:
            with (self.path / ".lock").open(encoding="utf-8") as file:
                if not file.read().rstrip().endswith(f" on {os.uname().nodename}"):
                    return False
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # no lock file, or held, or a file system without locks
            return False
        return True

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise UserError(
                f"{self.path} is not a run directory: expected one with config.yaml and status.json."
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(f"The run in {self.path} cannot be read ({error}).") from error

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._text(name))
        except ValueError as error:
            raise UserError(f"The run in {self.path} cannot be read ({error}).") from error


def _joined(tables: Sequence[Any]) -> dict[str, Any]:
    import numpy as np

    if not tables:
        return {}
    names = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    return {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in names}


def _yaml(text: str, path: Path) -> Any:
    import yaml  # type: ignore[import-untyped]  # PyYAML ships no types

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where it was compiled
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise UserError(f"The run in {path.parent} cannot be read ({error}).") from error


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file of numbers and JSON lists; empty cells are left out."""
    rows = csv.DictReader(io.StringIO(complete_lines(path)))
    try:
        return [{name: _value(cell) for name, cell in row.items() if cell} for row in rows]
    except (AttributeError, ValueError) as error:  # too many cells, or one that is no number
        raise UserError(f"{path} is damaged: a line cannot be read ({error}).") from error


def _value(cell: str) -> Any:
    if cell.startswith("["):
        return json.loads(cell)
    try:
        return int(cell)
    except ValueError:
        return float(cell)


# Sweeps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A run to report on, or one that should have been there: `run` is None where nothing was written."""

    run: RunFiles | None
    group: str = ""  # as the sweep calls it; empty outside of sweeps
    seed: int | None = None
    status: str = ""
    reason: str = ""
    tuned: str = ""  # the figure on validation data that the sweep was tuned by; empty where it was not
    mode: str = "auto"  # max or min, or as the figure says
    population: bool = (
        False  # whose members take over states and values of each other's, each seed for itself
    )
    sweep: Path | None = None  # its directory; None outside of sweeps


def is_sweep(path: Path) -> bool:
    """Whether `path` is the directory of a sweep."""
    return (path / "sweep.yaml").is_file() and (path / "trials.csv").is_file()


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    return (path / "config.yaml").is_file() and (path / "status.json").is_file()


def find_trials(paths: Sequence[str | Path]) -> list[Trial]:
    """The runs of all given run directories and sweeps, each once, in the order they were given."""
    found: dict[Path, Trial] = {}
    missing: list[Trial] = []
    for path in (Path(given).expanduser() for given in paths):
        if not is_sweep(path):
            if not is_run(path):
                raise UserError(_no_run(path))
            run = RunFiles(path)
            found.setdefault(path.resolve(), Trial(run, seed=run.setting("seed"), status=_state(run)))
            continue
        for trial in sweep_trials(path):
            if trial.run is None:
                missing.append(trial)
            else:
                found.setdefault(trial.run.path.resolve(), trial)
    return [*found.values(), *missing]


def sweep_trials(path: Path) -> list[Trial]:
    """The trials that `trials.csv` names, those that never began included."""
    trials = []
    tuning = _tuning(path / "sweep.yaml")
    for row in csv.DictReader(io.StringIO(complete_lines(path / "trials.csv"))):
        try:
            folder = path / row["run"] if row["run"] else None
            run = RunFiles(folder) if folder is not None and is_run(folder) else None
            seed = int(row["seed"]) if row["seed"] else None
            trials.append(Trial(run, row["group"], seed, row["status"], row["reason"], *tuning, path))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path / 'trials.csv'} is damaged: its line {row} cannot be read.") from error
    return trials


def table_of(paths: Sequence[str | Path]) -> str:
    """The published table that all of these sweeps say they repeat (`sweep.table`); empty if there is no such one."""
    folders = [Path(given).expanduser() for given in paths]
    named = {str(_asked(f / "sweep.yaml").get("table") or "") if is_sweep(f) else "" for f in folders}
    return named.pop() if len(named) == 1 else ""


def _asked(file: Path) -> dict[str, Any]:
    """The section `sweep:` of a sweep's file."""
    content = _yaml(file.read_text(encoding="utf-8"), file)
    asked = content.get("sweep") if isinstance(content, dict) else None
    if not isinstance(asked, dict):
        raise UserError(f"{file} is damaged: expected the section sweep in it.")
    return asked


def _tuning(file: Path) -> tuple[str, str, bool]:
    """(figure, max or min or auto) that a sweep was tuned by, and if by a population; ("", "auto", False) if not."""
    asked = _asked(file)
    if not asked.get("sample") and asked.get("scheduler", "none") == "none":
        return "", "auto", False
    figure = str(asked.get("metric", "validation_micro_accuracy"))
    return figure, str(asked.get("mode", "auto")), asked.get("scheduler") == "pbt"


def _state(run: RunFiles) -> str:
    return str(run.status.get("state", ""))


def _no_run(path: Path) -> str:
    if not path.exists():
        return (
            f"Expected a run directory or a sweep, but there is no {path}: give a folder that a run has made."
        )
    inside = (
        [entry for entry in sorted(path.iterdir()) if is_run(entry) or is_sweep(entry)]
        if path.is_dir()
        else []
    )
    hint = f"it holds {len(inside)} of them, as in {inside[0]}" if inside else "give one that a run has made"
    return f"Expected a run directory or a sweep, got {path}: {hint}."
