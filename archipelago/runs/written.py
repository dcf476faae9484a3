"""Single files of a run directory: how each is written, and how one that the platform wrote is told from others."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy.typing as npt

from archipelago.core import vocabulary
from archipelago.core.errors import UserError
from archipelago.core.files import whole_file, write_whole
from archipelago.core.own_files import is_own_file, numbered_files
from archipelago.runs import identity
from archipelago.runs.checkpoints import StoredParts
from archipelago.runs.checksums import check_table
from archipelago.runs.files import are_facts
from archipelago.runs.growing_files import write_rounds
from archipelago.runs.refusals import settings_of
from archipelago.runs.status import Status, status_text
from archipelago.runs.trees import Rows, write_arrays, write_rows

if TYPE_CHECKING:
    from archipelago.data import Federation

MADE_AT_THE_END = ("tsne",)  # tables in `records/` that a checkpoint does not stand on
MODEL_FORMAT = "archipelago-model-1"
_RECORD_NAME = re.compile(r"[A-Za-z0-9_]+")


def is_readable(run: Path) -> bool:
    """Whether what a report needs of a run's vocabulary and federation is there, as it was written."""
    tables = run / "federation"
    try:
        vocabulary.read_vocabulary(run)
        facts = json.loads((tables / "facts.json").read_text(encoding="utf-8"))
        for name in ("clients", "counts"):
            check_table(tables / f"{name}.parquet")
    except (UserError, OSError, ValueError):
        return False
    return are_facts(facts)


def write_federation(folder: Path, federation: Federation) -> None:
    """`partition.safetensors` (the indices) and `federation/` (tables of what they mean, for figures)."""
    import pyarrow as pa

    write_arrays(folder / "partition.safetensors", federation.indices(), {})
    tables = folder / "federation"
    tables.mkdir(exist_ok=True)
    for name, columns in federation.tables().items():
        whole = [pa.table(columns)]
        write_rounds(tables / f"{name}.parquet", whole.__iter__)
    write_whole(tables / "facts.json", as_json(federation.facts()))


def digest_of_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def digest_of(records: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(records.items())).encode(), digest_size=16).hexdigest()


def copy_file(source: Path, target: Path) -> None:
    """Make a file as another one is, all or nothing; that one may not be there."""
    if not source.exists():
        target.unlink(missing_ok=True)
    else:
        with source.open("rb") as given, whole_file(target, durable=False) as file:
            shutil.copyfileobj(given, file)


def is_record(path: Path) -> bool:
    """Whether `record` wrote it: others may call a file of theirs alike. A damaged one is written again anyway."""
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path).names[:1] == ["round"]
    except (OSError, ValueError):
        return False


def is_written_model(path: Path) -> bool:
    """Whether `finish` wrote it, by its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            return is_model(path, file.keys(), file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def is_model(path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> bool:
    """Whether a file with these arrays and this metadata is a final model of the run, and no copy of one."""
    return metadata.get("format") == MODEL_FORMAT and list(names) == [unquote(path.stem)]


def record_name(name: str) -> str:
    if not _RECORD_NAME.fullmatch(name):
        raise ValueError(f"'{name}' cannot be the name of a record; use letters, digits and '_'")
    return name


def as_json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_models(folder: Path, models: Mapping[str, npt.NDArray[Any] | Rows], spec: Any) -> list[str]:
    """A file for each final model, with the spec (anything JSON can hold); their names."""
    about = {"format": MODEL_FORMAT, "spec": json.dumps(spec, separators=(",", ":"))}
    folder.mkdir(exist_ok=True)
    files = []
    for name, values in models.items():
        files.append(f"{quote(name, safe='')}.safetensors")
        if isinstance(values, Rows):
            write_rows(folder / files[-1], name, values, about)
        else:
            write_arrays(folder / files[-1], {name: values}, about)
    return files


def stated_digests(run: Path, round: int) -> Mapping[str, str]:
    """The digests that the checkpoint of `round` remembers; empty of one of another run."""
    try:
        parts = StoredParts(run / "checkpoints" / f"round-{round:06d}")
    except UserError:
        return {}  # its manifest is damaged: whoever loads it says so
    return parts.tables if parts.identity in (None, identity.identity_of(run)) else {}


def recorded_digests(run: Path, round: int) -> dict[str, str]:
    """{name: digest} of the tables in `records/` of the rounds up to `round`."""
    return {
        path.name: digest_of_file(path)
        for number, path in numbered_files(run / "records")
        if number <= round and not path.name.startswith(MADE_AT_THE_END) and is_record(path)
    }


def write_new_run(
    folder: Path,
    config_yaml: str,
    environment: Mapping[str, Any],
    federation: Federation | None,
    code: Iterable[str] = (),
) -> None:
    """The files and folders that a run begins with, its status last; `code` is what it imports of somebody's own."""
    settings = settings_of(config_yaml)
    for name in ("checkpoints", "models", "records"):
        (folder / name).mkdir()
    write_whole(folder / "config.yaml", config_yaml)
    write_whole(folder / "environment.json", as_json(dict(environment)))
    write_whole(folder / vocabulary.FILE, as_json(vocabulary.describe(settings)))
    if federation is not None:
        write_federation(folder, federation)
    made = identity.describe(settings, folder, code)
    write_whole(folder / identity.FILE, as_json(made))
    status = Status("running", 0, settings.get("rounds"), identity=made["identity"])
    write_whole(folder / "status.json", status_text(status))


def remove_unfinished(run: Path) -> None:
    """Temporary files, and models: of a process that was killed, as this one holds the lock."""
    for stale in [*run.glob(".*.tmp-*"), *run.glob("*/.*.tmp-*")]:
        if is_own_file(stale.relative_to(run).as_posix()) and stale.is_file():
            stale.unlink()
    for model in (run / "models").glob("*.safetensors"):
        if is_written_model(model):
            model.unlink()
