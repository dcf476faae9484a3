"""The folder in which a run leaves everything behind, as its writer sees it (`files.py` and `reader.py` read it).

    config.yaml            the resolved config                  environment.json     what it ran on
    status.json            running, finished or failed          events.jsonl         round and text
    metrics.csv            one row a round, deterministic       timings.csv          seconds by stage
    clients.parquet        per round and client                 assignments.parquet  cluster per round and client
    partition.safetensors  which client holds which samples     models/              final models and their spec
    checkpoints/           what a resume starts from            records/             what the figures need
    summary.md             the short story, written last        parts/               tables of an unfinished run
    federation/            clients, their label counts, facts   vocabulary.json      labels, what metrics declare
    identity.json          what the run is of (`identity.py`)  traceback.txt         of a run that failed

Nothing is ever half written under its final name, except that the last line of a CSV or JSONL file may be
torn by a kill: `truncate` drops it with everything else that is later than the checkpoint, so that a resumed
run's files end up equal, byte by byte, to those of a run that was never disturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import traceback
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from archipelago.core import vocabulary
from archipelago.core.causes import sentence_of
from archipelago.core.errors import RunFailure, UserError
from archipelago.core.files import complete_lines, sync_folder, whole_file, write_whole
from archipelago.core.own_files import (
    is_own_file,
    kept_logger_files,
    numbered_files,
    refuse_links,
    remove_own_files,
)
from archipelago.runs import identity
from archipelago.runs.checkpoints import (
    StoredParts,
    checkpoints,
    remove_checkpoint,
    remove_unfinished_checkpoints,
)
from archipelago.runs.checksums import check_table
from archipelago.runs.environment import environment_differences
from archipelago.runs.files import read_numbers
from archipelago.runs.growing_files import CsvFile, EventsFile, LongTable, write_rounds
from archipelago.runs.lock import FolderLock
from archipelago.runs.refusals import check_config, check_identity, refuse_what_is_there, settings_of
from archipelago.runs.status import Status, check_is_run, read_status, status_text
from archipelago.runs.trees import Rows, write_arrays, write_rows

if TYPE_CHECKING:
    from actors.reports import RoundReport
    from archipelago.data import Federation

TRACEBACK = "traceback.txt"  # of a run that failed, for whoever looks for the reason in the code
MODEL_FORMAT = "archipelago-model-1"
_TABLES = ("metrics.csv", "timings.csv", "events.jsonl", "clients.parquet", "assignments.parquet")
_MADE_AT_THE_END = ("tsne",)  # tables in `records/` that a checkpoint does not stand on
_RECORD_NAME = re.compile(r"[A-Za-z0-9_]+")


class RunDirectory:
    """A run directory that this process writes into; made by `create` or `open`, both of which lock it."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        """For `create` and `open` only."""
        self.path = path
        self._made: list[Path] = []  # folders above it that were made for it
        self._environment: Mapping[str, Any] | None = None
        self._only_expected = (
            False  # whether `environment.json` has what will be computed on, and nothing was yet
        )
        self._may_append = False  # an opened run may end in a torn line
        self._lock = lock
        self._metrics = CsvFile(path / "metrics.csv")
        self._timings = CsvFile(path / "timings.csv")
        self._events = EventsFile(path / "events.jsonl")
        self._clients = LongTable(path, "clients")
        self._assignments = LongTable(path, "assignments")
        self._records: dict[str, str] = {}  # of the tables in `records/`: {name: digest}
        self._status = read_status(path)

    @classmethod
    def create(
        cls,
        path: str | Path,
        config_yaml: str,
        environment: Mapping[str, Any],
        federation: Federation | None = None,
        code: Iterable[str] = (),
    ) -> RunDirectory:
        """Make a new run directory; anything that already lives under that name is a `UserError`.

        `code` names the modules and import paths of somebody's own that it imports.
        """
        path = Path(path)
        refuse_what_is_there(path, config_yaml)
        # Process ids repeat on other nodes of a shared folder: the name of another one's is never met by chance.
        building = path.with_name(f".{path.name}.creating-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        missing = [folder for folder in path.parents if not folder.exists()]
        try:
            building.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"Cannot make the run directory {path} ({error.strerror}); choose a folder that can be "
                "written with storage=..."
            ) from error
        try:
            lock = FolderLock(building, path)
            for folder in ("checkpoints", "models", "records"):
                (building / folder).mkdir()
            write_whole(building / "config.yaml", config_yaml)
            write_whole(building / "environment.json", _json(dict(environment)))
            write_whole(building / vocabulary.FILE, _json(vocabulary.describe(settings_of(config_yaml))))
            if federation is not None:
                write_federation(building, federation)
            made = identity.describe(settings_of(config_yaml), building, code)
            write_whole(building / identity.FILE, _json(made))
            status = Status("running", 0, settings_of(config_yaml).get("rounds"), identity=made["identity"])
            write_whole(building / "status.json", status_text(status))
            try:
                building.rename(path)  # replaces an empty folder, and nothing else
            except OSError:
                refuse_what_is_there(path, config_yaml)  # somebody else was faster
                raise
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        sync_folder(path.parent)
        run = cls(path, lock)
        run._may_append, run._made = True, missing
        return run

    @classmethod
    def open(
        cls,
        path: str | Path,
        expect_config: str | None = None,
        environment: Mapping[str, Any] | None = None,
        ignore: Iterable[str] = (),
        wait: float = 0.5,
    ) -> RunDirectory:
        """Open an existing run for writing, to continue it after `truncate`.

        `wait` is for how many seconds a process that still writes it is given to end.

        `expect_config` (YAML) must say what the run's own config says, apart from the keys that start with
        one of `ignore` ("fleet."). `truncate` adds `environment` to `environment.json`, and an event for
        every difference that touches the promise of equal bits.
        """
        path = Path(path)
        check_is_run(path)
        refuse_links(path)
        if expect_config is not None:
            check_config(path, expect_config, tuple(ignore))
        check_identity(path)
        run = cls(path, FolderLock(path, path, wait))
        run._environment = environment
        return run

    @property
    def status(self) -> Status:
        """What `status.json` says."""
        return self._status

    @property
    def config_yaml(self) -> str:
        """The text of `config.yaml`."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    def append(self, report: RoundReport) -> None:
        """Add one round: its lines reach the files now, its per-client rows with the next `flush`."""
        number, done = report.round, self._status.rounds_done
        if not self._may_append or (number <= done and done > 0):
            raise ValueError(f"round {number} cannot be added to a run of {done} rounds: truncate it first")
        self._metrics.append(number, report.metrics)
        # In the file "round" is the number of the round, so the whole round's seconds are called "total".
        seconds = {"total" if stage == "round" else stage: value for stage, value in report.timings.items()}
        self._timings.append(number, seconds)
        self._events.append(number, report.events)
        if report.clients is not None:
            self._clients.append(number, report.clients)
        if report.assignment is not None:
            cluster = np.asarray(report.assignment, dtype=np.int32)
            columns = {"client": np.arange(len(cluster), dtype=np.int32), "cluster": cluster}
            self._assignments.append(number, columns)
        self._set_status("running", rounds_done=number, durable=False)

    def note(self, round: int, text: str) -> None:
        """Add an event that belongs to no report (a resume, a damaged checkpoint)."""
        self._events.append(round, [text])

    def flush(self, round: int) -> None:
        """Make everything up to `round` durable. Call it before the checkpoint of that round is submitted."""
        for file in (self._metrics, self._timings, self._events):
            file.sync()
        self._clients.flush()
        self._assignments.flush()
        self._set_status("running", rounds_done=round)

    def digests(self, round: int) -> dict[str, str]:
        """The digests of what the rounds up to `round` wrote, as its checkpoint remembers them."""
        tables = {"metrics.csv": self._metrics, "timings.csv": self._timings}
        found = {name: file.chain[round] for name, file in tables.items() if round in file.chain}
        return found | {"events.jsonl": self._events.digest(), "records": _digest_of(self._records)}

    def record(self, name: str, round: int, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write `records/NAME-ROUND.parquet`: a table of one round that the figures need."""
        import pyarrow as pa

        rounds = np.full(len(next(iter(columns.values()))), round, np.int32)
        table = pa.table({"round": rounds, **columns})
        path = self.path / "records" / f"{_record_name(name)}-{round:06d}.parquet"
        write_rounds(path, lambda: iter([table]))
        if name not in _MADE_AT_THE_END:
            self._records[path.name] = _digest_of_file(path)

    def truncate(self, round: int) -> None:
        """Forget everything later than `round`, so that the run can be resumed from that round's checkpoint."""
        for file in (self._metrics, self._timings, self._events, self._clients, self._assignments):
            file.truncate(round)
        for number, record in numbered_files(self.path / "records"):
            if number > round and _is_record(record):
                record.unlink()
        self._records = self._recorded(round)
        for number, later in checkpoints(self.path):
            if number > round:
                remove_checkpoint(later)
        remove_unfinished_checkpoints(self.path)
        for stale in [*self.path.glob(".*.tmp-*"), *self.path.glob("*/.*.tmp-*")]:
            if is_own_file(stale.relative_to(self.path).as_posix()) and stale.is_file():
                stale.unlink()  # this process holds the lock: nobody is writing it any more
        for model in (self.path / "models").glob("*.safetensors"):
            if _is_model(model):
                model.unlink()
        for last in ("summary.md", TRACEBACK):
            (self.path / last).unlink(missing_ok=True)
        self._set_status("running", rounds_done=max(round, 0))
        self._may_append = True
        if self._environment is not None:
            self._add_environment(self._environment, round)
            self._environment = None

    def check_files(self) -> None:
        """Before anything is changed: a `UserError` if a table cannot be read."""
        for file in (self._metrics, self._timings):
            file.digests()
        self._events.read()
        for table in (self._clients, self._assignments):
            table.numbers()

    def mend_files(self, federation: Federation) -> None:
        """Make vocabulary and description of the federation anew if they cannot be read: the config gives them."""
        if not _is_readable(self.path):
            content = _json(vocabulary.describe(settings_of(self.config_yaml)))
            write_whole(self.path / vocabulary.FILE, content)
            write_federation(self.path, federation)

    def complete_rounds(self) -> int:
        """n, where everything that rounds 1 to n measured is in the tables: a resume can stand on no later one."""
        clients, assignments = self._clients.numbers(), self._assignments.numbers()
        timed = self._timings.digests()
        complete = 0
        for row in read_numbers(self.path / "metrics.csv"):
            number, evaluated = row["round"], any(name.startswith("micro_") for name in row)
            if number != complete + 1 or (evaluated and number not in clients):
                break
            if ("cluster_sizes" in row and number not in assignments) or number not in timed:
                break
            complete = number
        return complete

    def changed(self, round: int) -> str | None:
        """What the checkpoint of `round` stands on and is not as it was written, in words; None if all of it is."""
        stated = self._stated(round)
        for name, file in (("metrics.csv", self._metrics), ("timings.csv", self._timings)):
            if name in stated and file.digests().get(round) != stated[name]:
                return f"{name} is not as it was written"
        if "records" in stated and _digest_of(self._recorded(round)) != stated["records"]:
            return "a table of records/ is missing, or not as it was written"
        return None

    def lost_events(self, round: int) -> str | None:
        """That events from before the checkpoint of `round` are gone, in words: no resume brings them back."""
        stated = self._stated(round).get("events.jsonl")
        if stated is None or self._events.begins_with(stated):
            return None
        return (
            f"events.jsonl is not as it was written: what it said of the rounds up to {round} may be missing."
        )

    def _stated(self, round: int) -> Mapping[str, str]:
        """The digests that the checkpoint of `round` remembers; empty of one of another run."""
        try:
            parts = StoredParts(self.path / "checkpoints" / f"round-{round:06d}")
        except UserError:
            return {}  # its manifest is damaged: whoever loads it says so
        return parts.tables if parts.identity in (None, identity.identity_of(self.path)) else {}

    def _recorded(self, round: int) -> dict[str, str]:
        """{name: digest} of the tables in `records/` of the rounds up to `round`."""
        return {
            path.name: _digest_of_file(path)
            for number, path in numbered_files(self.path / "records")
            if number <= round and not path.name.startswith(_MADE_AT_THE_END) and _is_record(path)
        }

    def adopt(self, other: Path, round: int) -> None:
        """The rounds up to `round` of another, finished run in place of what is here.

        Where that one is damaged: a `UserError`, and this run is as before its first round.
        """
        for file in (self._metrics, self._timings, self._events):
            file.close()
        events = complete_lines(self.path / "events.jsonl")
        try:
            for name in _TABLES:
                _copy(other / name, self.path / name)
            for number, record in numbered_files(other / "records"):
                if number <= round:
                    _copy(record, self.path / "records" / record.name)
            for name in kept_logger_files(other):  # what is later, its logger purges
                (self.path / name).parent.mkdir(exist_ok=True)
                _copy(other / name, self.path / name)
            self.truncate(round)
        except (UserError, ValueError, OSError) as error:
            for name in _TABLES:
                (self.path / name).unlink(missing_ok=True)
            remove_own_files(self.path, "parts")
            if events:
                write_whole(self.path / "events.jsonl", events)
            self.truncate(0)
            raise UserError(f"The rounds of {other} cannot be taken over: {error}") from error

    def finish(
        self,
        models: Mapping[str, npt.NDArray[Any] | Rows] | None = None,
        spec: Any = None,
        sentence: str | None = None,
    ) -> None:
        """Merge the tables, write the final models with their spec (anything JSON can hold), say finished.

        `sentence` says why, where the run was stopped before its last round.
        """
        self.flush(self._status.rounds_done)
        self._clients.merge()
        self._assignments.merge()
        parts = self.path / "parts"
        if parts.exists() and not any(parts.iterdir()):
            parts.rmdir()
        text = json.dumps(spec, separators=(",", ":"))
        (self.path / "models").mkdir(exist_ok=True)
        for name, values in (models or {}).items():
            path = self.path / "models" / f"{quote(name, safe='')}.safetensors"
            about = {"format": MODEL_FORMAT, "spec": text}
            if isinstance(values, Rows):
                write_rows(path, name, values, about)
            else:
                write_arrays(path, {name: values}, about)
        written = {"metrics.csv": _last(self._metrics), "timings.csv": _last(self._timings)}
        identity.seal(self.path, written, [f"{quote(name, safe='')}.safetensors" for name in models or {}])
        self._set_status("finished", sentence=sentence)

    def discard(self) -> None:
        """Remove a run that was refused before its first round; what somebody else put there stays."""
        self._status = replace(self._status, state="discarded")  # nothing more is to be said there
        remove_own_files(self.path)
        for folder in self._made:  # the storage folder, if it was made for this run
            with suppress(OSError):
                folder.rmdir()

    def fail(self, sentence: str) -> None:
        """Say that the run stopped and why; the rounds since the last checkpoint will be run again."""
        self._clients.flush()
        self._assignments.flush()
        self._set_status("failed", sentence=sentence)

    def close(self) -> None:
        """Close the files and let go of the lock."""
        for file in (self._metrics, self._timings, self._events):
            file.close()
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._status.state == "running":
                self.fail(sentence_of(error))
                if isinstance(error, Exception) and not isinstance(error, UserError | RunFailure):
                    write_whole(
                        self.path / TRACEBACK, "".join(traceback.format_exception(error)), durable=False
                    )
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"RunDirectory('{self.path}': {self._status})"

    def _set_status(
        self, state: str, *, rounds_done: int | None = None, sentence: str | None = None, durable: bool = True
    ) -> None:
        done = self._status.rounds_done if rounds_done is None else rounds_done
        self._status = replace(self._status, state=state, rounds_done=done, sentence=sentence)
        write_whole(self.path / "status.json", status_text(self._status), durable=durable)

    def expects_to_compute_on(self, compute: Mapping[str, Any]) -> None:
        """Say so in `environment.json` of a new run, until `computes_on` knows what did the work."""
        path = self.path / "environment.json"
        whole = json.loads(path.read_text(encoding="utf-8"))
        if not whole.get("resumed") and "compute" not in whole:
            whole["compute"] = dict(compute)
            write_whole(path, _json(whole))
            self._only_expected = True

    def computes_on(self, round: int, compute: Mapping[str, Any]) -> None:
        """After a round: what this process's part of the run computed on, in `environment.json`.

        An event says if that is something else than before.
        """
        path = self.path / "environment.json"
        whole = json.loads(path.read_text(encoding="utf-8"))
        parts = [whole, *whole.get("resumed", [])]
        known = [] if self._only_expected else [part["compute"] for part in parts if "compute" in part]
        before = known[-1] if known else compute
        self._only_expected = False
        parts[-1]["compute"] = dict(compute)
        write_whole(path, _json(whole))
        if _arithmetic(before) != _arithmetic(compute):
            self.note(
                round,
                f"Computes on {compute['sentence']} from here on; before, on {before['sentence']}: "
                "results may differ in the last bits.",
            )

    def _add_environment(self, environment: Mapping[str, Any], round: int) -> None:
        path = self.path / "environment.json"
        try:
            first = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            first, warnings = {}, [f"{path.name} was damaged or missing and was written anew."]
        else:
            warnings = environment_differences(first, environment)
        for name in identity.changed_code(self.path):
            warnings = [*warnings, f"The code of {name} is not the one that the run was made with."]
        for warning in warnings:
            self.note(round, warning)
        first["resumed"] = [*first.get("resumed", []), dict(environment)]
        write_whole(path, _json(first))


def _last(file: CsvFile) -> str:
    chain = file.digests()
    return chain[max(chain)] if chain else ""


def _is_readable(run: Path) -> bool:
    """Whether what a report needs of a run's vocabulary and federation is there, as it was written."""
    tables = run / "federation"
    try:
        vocabulary.read_vocabulary(run)
        facts = json.loads((tables / "facts.json").read_text(encoding="utf-8"))
        for name in ("clients", "counts"):
            check_table(tables / f"{name}.parquet")
    except (UserError, OSError, ValueError):
        return False
    return isinstance(facts, dict)


def _arithmetic(compute: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of it may move a bit."""
    return (sorted(compute["devices"]), *(compute[key] for key in ("engine", "precision", "determinism")))


def write_federation(folder: Path, federation: Federation) -> None:
    """`partition.safetensors` (the indices) and `federation/` (tables of what they mean, for figures)."""
    import pyarrow as pa

    write_arrays(folder / "partition.safetensors", federation.indices(), {})
    tables = folder / "federation"
    tables.mkdir(exist_ok=True)
    for name, columns in federation.tables().items():
        whole = [pa.table(columns)]
        write_rounds(tables / f"{name}.parquet", whole.__iter__)
    write_whole(tables / "facts.json", _json(federation.facts()))


def _digest_of_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _digest_of(records: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(records.items())).encode(), digest_size=16).hexdigest()


def _copy(source: Path, target: Path) -> None:
    """Make a file as another one is, all or nothing; that one may not be there."""
    if not source.exists():
        target.unlink(missing_ok=True)
    else:
        with source.open("rb") as given, whole_file(target, durable=False) as file:
            shutil.copyfileobj(given, file)


def _is_record(path: Path) -> bool:
    """Whether `record` wrote it: others may call a file of theirs alike. A damaged one is written again anyway."""
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path).names[:1] == ["round"]
    except (OSError, ValueError):
        return False


def _is_model(path: Path) -> bool:
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


def _record_name(name: str) -> str:
    if not _RECORD_NAME.fullmatch(name):
        raise ValueError(f"'{name}' cannot be the name of a record; use letters, digits and '_'")
    return name


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
