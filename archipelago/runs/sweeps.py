"""Sweep directories, read and written: `sweep.yaml`, `trials.csv` and a run directory for each trial under `runs/`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from archipelago.core.csv_cells import plain_cell, quoted_cell
from archipelago.core.errors import UserError
from archipelago.core.files import check_regular
from archipelago.runs.files import RunFiles, read_yaml
from archipelago.runs.format import DOCUMENT, SWEEP_FORMAT, TRIALS, upgraded_sweep
from archipelago.runs.status import is_run
from archipelago.runs.storage import join, read_text, write_text
from archipelago.runs.sweep_identity import write_identity

WAITING, RUNNING, FINISHED, STOPPED, FAILED = "waiting", "running", "finished", "stopped", "failed"
DAMAGED = "left out"  # in reports: its files cannot be read
OVER = (FINISHED, STOPPED, FAILED)


@dataclass
class Row:
    """One line of `trials.csv`."""

    trial: str
    group: str
    seed: int
    status: str = WAITING
    reason: str = ""
    run: str = ""


_COLUMNS = [field.name for field in fields(Row)]


def is_sweep(address: str | Path) -> bool:
    """Whether a sweep lives there."""
    return read_text(join(str(address), DOCUMENT)) is not None


def check_is_sweep(address: str | Path) -> None:
    """A `UserError` if no sweep lives there."""
    if not is_sweep(address):
        raise UserError(
            f"There is no sweep {address}: expected {DOCUMENT} and {TRIALS} in it.",
            code="not-found",
            path=str(address),
        )


def is_begun(address: str | Path) -> bool:
    """Whether `trials.csv`, if there is one, is that of a sweep."""
    text = read_text(join(str(address), TRIALS))
    return text is None or text.startswith(",".join(_COLUMNS))


def read_rows(address: str | Path) -> list[Row]:
    """The lines of `trials.csv`."""
    text = read_text(join(str(address), TRIALS))
    if text is None:
        check_is_sweep(address)
        raise _damaged_trials(address, FileNotFoundError("it is missing"))
    try:
        rows = csv.DictReader(io.StringIO(text.replace("\0", "\ufffd")))  # no reader of CSV takes a null
        found = [
            Row(**{**{name: plain_cell(row[name]) for name in _COLUMNS}, "seed": int(row["seed"])})  # type: ignore[arg-type]  # all others are text
            for row in rows
        ]
    except (KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        raise _damaged_trials(address, error) from error
    if not found or any(row.status not in (WAITING, RUNNING, *OVER) for row in found):
        raise _damaged_trials(address, ValueError("it has no trials, or one of no known status"))
    return found


def write_rows(address: str, rows: Iterable[Row]) -> None:
    """Write `trials.csv`, all or nothing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row)
        writer.writerow(
            {name: quoted_cell(each) if isinstance(each, str) else each for name, each in cells.items()}
        )
    write_text(join(address, TRIALS), text.getvalue())


def write_sweep(address: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write `sweep.yaml` of a document as a sweep makes it, and its identity; what is in the file."""
    from omegaconf import OmegaConf

    whole = {"format": SWEEP_FORMAT, **document}
    text = OmegaConf.to_yaml(OmegaConf.create(whole))
    write_identity(address, text)
    write_text(join(address, DOCUMENT), text)
    return whole


def _damaged_trials(address: str | Path, error: Exception) -> UserError:
    return UserError(
        f"{join(str(address), TRIALS)} is damaged ({error}): restore it; the runs of the trials are in "
        f"{join(str(address), 'runs')}, each a run of its own.",
        code="damaged",
        file=join(str(address), TRIALS),
    )


@dataclass(frozen=True)
class Trial:
    """A run to report on, or one that should have been there: `run` is None where nothing was written."""

    run: RunFiles | None
    group: str = ""  # as the sweep calls it; empty outside of sweeps
    seed: int | None = None
    status: str = ""
    reason: str = ""
    tuned: str = ""  # the metric on validation data that the sweep was tuned by; empty where it was not
    mode: str = "auto"  # max or min, or as the metric says
    population: bool = (
        False  # whose members take over states and values of each other's, each seed for itself
    )
    sweep: Path | None = None  # its directory; None outside of sweeps


def find_trials(paths: Sequence[str | Path]) -> list[Trial]:
    """The runs of all given run directories and sweeps, each once, in the order they were given."""
    found: dict[Path, Trial] = {}
    missing: list[Trial] = []
    given = [Path(path).expanduser() for path in paths]
    for path in given:
        try:
            if is_sweep(path):
                trials = [_readable(trial) for trial in sweep_trials(path)]
            elif is_run(path):
                run = RunFiles(path)
                run.check()
                trials = [Trial(run, seed=run.setting("seed"), status=run.status.state)]
            else:
                raise UserError(_no_run(path), code="not-found", path=path)
        except UserError as error:
            if len(given) == 1 or not path.exists():
                raise
            trials = [Trial(None, path.name, status=DAMAGED, reason=str(error))]  # the others are reported
        for trial in trials:
            if trial.run is None:
                missing.append(trial)
            else:
                found.setdefault(trial.run.path.resolve(), trial)
    if not found and any(trial.status == DAMAGED for trial in missing):
        raise UserError(next(trial.reason for trial in missing if trial.status == DAMAGED), code="damaged")
    return [*found.values(), *missing]


def _readable(trial: Trial) -> Trial:
    """A trial of a sweep; one whose run cannot be read, or is gone, left nothing behind, with the reason."""
    try:
        if trial.run is not None:
            trial.run.check()
            if (seed := trial.run.setting("seed")) != trial.seed:
                raise _damaged_row(trial, f"{trial.run.path} has seed {seed}")
        elif trial.status == FINISHED:
            raise _damaged_row(trial, "its run is not there")
    except UserError as error:
        return replace(trial, run=None, status=DAMAGED, reason=str(error))
    return trial


def _damaged_row(trial: Trial, why: str) -> UserError:
    """The sentence about a line of `trials.csv` that is not of the run it names."""
    file = (trial.sweep or Path()) / TRIALS
    return UserError(
        f"{file} says that seed {trial.seed} of {trial.group} is {trial.status}, but {why}: restore what was changed.",
        code="damaged",
        file=file,
    )


def sweep_trials(path: Path) -> list[Trial]:
    """The trials that `trials.csv` names, those that never began included."""
    trials = []
    tuning = _tuning(path)
    check_regular(path / TRIALS)
    for row in read_rows(path):
        folder = path / row.run if row.run else None
        run = RunFiles(folder) if folder is not None and is_run(folder) else None
        trials.append(Trial(run, row.group, row.seed, row.status, row.reason, *tuning, path))
    return trials


def table_of(paths: Sequence[str | Path]) -> str:
    """The published table that all of these sweeps say they repeat (`sweep.table`); empty if there is no such one."""
    folders = [Path(given).expanduser() for given in paths]
    named = {str(read_sweep(f)["sweep"].get("table") or "") if is_sweep(f) else "" for f in folders}
    return named.pop() if len(named) == 1 else ""


def read_sweep(address: str | Path) -> dict[str, Any]:
    """What `sweep.yaml` holds, as this version writes it: `settings`, `sweep` and what the sweep `declares`."""
    file = join(str(address), DOCUMENT)
    text = read_text(file)
    if text is None:
        raise UserError(
            f"There is no sweep {address}: expected {DOCUMENT} in it.", code="not-found", path=str(address)
        )
    content = read_yaml(text, Path(file))
    if not isinstance(content, dict) or not isinstance(content.get("sweep"), dict):
        raise UserError(f"{file} is damaged: expected the section sweep in it.", code="damaged", file=file)
    try:
        return upgraded_sweep(content, str(address))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}.", code="damaged", file=file) from error


def identity_of_sweep(document: Mapping[str, Any]) -> str:
    """A hash of what a sweep was asked for, apart from where it is."""
    asked = {
        key: value
        for key, value in (document.get("settings") or {}).items()
        if key not in ("name", "storage")
    }
    content = json.dumps([asked, document.get("sweep")], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _tuning(path: Path) -> tuple[str, str, bool]:
    """(metric, max or min or auto) that a sweep was tuned by, and if by a population; ("", "auto", False) if not."""
    document = read_sweep(path)
    asked = document["sweep"]
    if not asked.get("sample") and asked.get("scheduler", "none") == "none" and not asked.get("choose"):
        return "", "auto", False
    metric = str(asked.get("metric", "validation_micro_accuracy"))
    return metric, str(asked.get("mode", "auto")), bool((document.get("declares") or {}).get("population"))


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
