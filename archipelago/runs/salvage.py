"""What is left of a run that has a damaged file, for the sentence that names the file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from archipelago.core.errors import UserError
from archipelago.core.files import complete_lines
from archipelago.core.own_files import CHECKPOINT

MANIFEST = "manifest.json"

_RUN_AGAIN = ("metrics.csv", "timings.csv", "clients.parquet", "assignments.parquet")
_MADE_ANEW = ("vocabulary.json", "facts.json", "counts.parquet")


def what_can_be_saved(path: Path) -> str:
    """What to do about a damaged file, what `resume` will do then, and what else of its run is there.

    >>> what_can_be_saved(Path("nowhere/metrics.csv"))
    'restore it or start the run again'
    """
    run = next((each for each in path.parents[:3] if (each / "config.yaml").is_file()), None)
    if run is None:
        return "restore it or start the run again"
    there = _there(run, path)
    rest = f"; {there} can be read" if there else ""
    if not _is_finished(run):
        inner = path.relative_to(run).parts[0]
        if path.name in _MADE_ANEW or inner == "federation":
            return f"remove it, and `resume` makes it anew{rest}"
        if path.name in _RUN_AGAIN or inner in ("parts", "records"):
            return f"restore it, or remove it, and `resume` runs the rounds again that it had, to the same bits{rest}"
        if inner == "checkpoints":
            return f"restore it, or remove its folder, and `resume` takes an older checkpoint or starts over{rest}"
    return f"restore it or start the run again{rest}"


def _is_finished(run: Path) -> bool:
    try:
        return bool(json.loads((run / "status.json").read_text(encoding="utf-8"))["state"] == "finished")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _there(run: Path, path: Path) -> str:
    """The tables and checkpoints beside it that can be read, in words."""
    from archipelago.runs.checksums import fault_of_table

    whole = []
    for name in _RUN_AGAIN:
        file = run / name
        if file == path or not file.is_file():
            continue
        if fault_of_table(file) is None if file.suffix == ".parquet" else _is_even(file):
            whole.append(name)
    rounds = [
        str(int(match[1]))
        for folder in sorted((run / "checkpoints").glob("round-*"))
        if (match := CHECKPOINT.fullmatch(folder.name))
        and folder != path.parent
        and (folder / MANIFEST).is_file()
    ]
    if rounds:
        whole.append(f"the checkpoint{'s' if len(rounds) > 1 else ''} of round {' and '.join(rounds)}")
    return ", ".join(whole)


def _is_even(file: Path) -> bool:
    """Whether every whole line of a CSV file has as many fields as its header."""
    try:
        rows = list(csv.reader(io.StringIO(complete_lines(file))))
    except (OSError, ValueError, csv.Error, UserError):
        return False
    return bool(rows) and len({len(row) for row in rows}) == 1
