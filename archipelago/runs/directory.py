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

import os
import shutil
import traceback
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archipelago.core import vocabulary
from archipelago.core.causes import sentence_of
from archipelago.core.errors import RunFailure, UserError
from archipelago.core.files import complete_lines, sync_folder, write_whole
from archipelago.core.own_files import (
    kept_logger_files,
    numbered_files,
    refuse_links,
    remove_own_files,
)
from archipelago.runs import identity
from archipelago.runs.checkpoints import checkpoints, remove_checkpoint, remove_unfinished_checkpoints
from archipelago.runs.environment_file import EnvironmentFile
from archipelago.runs.files import read_numbers
from archipelago.runs.growing_files import CsvFile, EventsFile, LongTable, write_rounds
from archipelago.runs.lock import FolderLock
from archipelago.runs.refusals import check_config, check_identity, refuse_what_is_there, settings_of
from archipelago.runs.status import Status, check_is_run, read_status, status_text
from archipelago.runs.trees import Rows
from archipelago.runs.written import (
    MADE_AT_THE_END,
    as_json,
    copy_file,
    digest_of,
    digest_of_file,
    is_readable,
    is_record,
    record_name,
    recorded_digests,
    remove_unfinished,
    stated_digests,
    write_federation,
    write_models,
    write_new_run,
)

if TYPE_CHECKING:
    from actors.reports import RoundReport
    from archipelago.data import Federation

TRACEBACK = "traceback.txt"  # of a run that failed, for whoever looks for the reason in the code
_TABLES = ("metrics.csv", "timings.csv", "events.jsonl", "clients.parquet", "assignments.parquet")


class RunDirectory:
    """A run directory that this process writes into; made by `create` or `open`, both of which lock it."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        """For `create` and `open` only."""
        self.path = path
        self._made: list[Path] = []  # folders above it that were made for it
        self._environment: Mapping[str, Any] | None = None
        self._environment_file = EnvironmentFile(path / "environment.json")
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
                f"Cannot make the run directory {path} ({error.strerror}); choose a folder to write with storage=...",
                code="unwritable", path=path,
            ) from error  # fmt: skip
        try:
            lock = FolderLock(building, path)
            write_new_run(building, config_yaml, environment, federation, code)
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
        return found | {"events.jsonl": self._events.digest(), "records": digest_of(self._records)}

    def record(self, name: str, round: int, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write `records/NAME-ROUND.parquet`: a table of one round that the figures need."""
        import pyarrow as pa

        rounds = np.full(len(next(iter(columns.values()))), round, np.int32)
        table = pa.table({"round": rounds, **columns})
        path = self.path / "records" / f"{record_name(name)}-{round:06d}.parquet"
        write_rounds(path, lambda: iter([table]))
        if name not in MADE_AT_THE_END:
            self._records[path.name] = digest_of_file(path)

    def truncate(self, round: int) -> None:
        """Forget everything later than `round`, so that the run can be resumed from that round's checkpoint."""
        for file in (self._metrics, self._timings, self._events, self._clients, self._assignments):
            file.truncate(round)
        for number, record in numbered_files(self.path / "records"):
            if number > round and is_record(record):
                record.unlink()
        self._records = recorded_digests(self.path, round)
        for number, later in checkpoints(self.path):
            if number > round:
                remove_checkpoint(later)
        remove_unfinished_checkpoints(self.path)
        remove_unfinished(self.path)
        for last in ("summary.md", TRACEBACK):
            (self.path / last).unlink(missing_ok=True)
        self._set_status("running", rounds_done=max(round, 0))
        self._may_append = True
        if self._environment is not None:
            warnings = self._environment_file.resumed(self._environment)
            for name in identity.changed_code(self.path):
                warnings.append(f"The code of {name} is not the one that the run was made with.")
            for warning in warnings:
                self.note(round, warning)
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
        if not is_readable(self.path):
            content = as_json(vocabulary.describe(settings_of(self.config_yaml)))
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
        stated = stated_digests(self.path, round)
        for name, file in (("metrics.csv", self._metrics), ("timings.csv", self._timings)):
            if name in stated and file.digests().get(round) != stated[name]:
                return f"{name} is not as it was written"
        if "records" in stated and digest_of(recorded_digests(self.path, round)) != stated["records"]:
            return "a table of records/ is missing, or not as it was written"
        return None

    def lost_events(self, round: int) -> str | None:
        """That events from before the checkpoint of `round` are gone, in words: no resume brings them back."""
        stated = stated_digests(self.path, round).get("events.jsonl")
        if stated is None or self._events.begins_with(stated):
            return None
        return (
            f"events.jsonl is not as it was written: what it said of the rounds up to {round} may be missing."
        )

    def adopt(self, other: Path, round: int) -> None:
        """The rounds up to `round` of another, finished run in place of what is here.

        Where that one is damaged: a `UserError`, and this run is as before its first round.
        """
        for file in (self._metrics, self._timings, self._events):
            file.close()
        events = complete_lines(self.path / "events.jsonl")
        try:
            for name in _TABLES:
                copy_file(other / name, self.path / name)
            for number, record in numbered_files(other / "records"):
                if number <= round:
                    copy_file(record, self.path / "records" / record.name)
            for name in kept_logger_files(other):  # what is later, its logger purges
                (self.path / name).parent.mkdir(exist_ok=True)
                copy_file(other / name, self.path / name)
            self.truncate(round)
        except (UserError, ValueError, OSError) as error:
            for name in _TABLES:
                (self.path / name).unlink(missing_ok=True)
            remove_own_files(self.path, "parts")
            if events:
                write_whole(self.path / "events.jsonl", events)
            self.truncate(0)
            sentence = f"The rounds of {other} cannot be taken over: {error}"
            raise UserError(sentence, code="cannot-take-over", run=other) from error

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
        files = write_models(self.path / "models", models or {}, spec)
        written = {"metrics.csv": _last(self._metrics), "timings.csv": _last(self._timings)}
        identity.seal(self.path, written, files)
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
        self._environment_file.expects(compute)

    def computes_on(self, round: int, compute: Mapping[str, Any]) -> None:
        """After a round: what this process's part of the run computed on, in `environment.json`.

        An event says if that is something else than before.
        """
        if (changed := self._environment_file.computed(compute)) is not None:
            self.note(round, changed)


def _last(file: CsvFile) -> str:
    chain = file.digests()
    return chain[max(chain)] if chain else ""
