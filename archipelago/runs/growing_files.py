"""The files of a run that grow round by round: CSV, JSON Lines, and Parquet in parts.

A kill can tear the last line of the first two and nothing else; `truncate(round)` drops that line and every
later round, so that the rounds run again land on the bytes they would have landed on anyway.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.files import complete_lines, whole_file, write_whole
from archipelago.core.own_files import numbered_files
from archipelago.runs.checksums import TableDigest, chain_of, chained, check_table, damaged

if TYPE_CHECKING:  # imported where they are needed: a run directory opens without them
    import pandas as pd
    import pyarrow as pa

_ROWS_PER_GROUP = 1 << 17  # rows of a Parquet row group: a few MB, whatever the number of rounds


class _LinesFile:
    """A text file that is only ever appended to, line by line, or replaced whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def _write(self, text: str) -> None:
        if self._file is None:
            # A file name in a message may hold bytes that are no text: written as JSON writes them.
            self._file = self.path.open("a", newline="", encoding="utf-8", errors="backslashreplace")
        self._file.write(text)
        self._file.flush()  # so that `tail -F` shows the round that just ended

    def sync(self) -> None:
        """Make what was written durable."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class CsvFile(_LinesFile):
    """A CSV file of one row a round whose columns are the union of what the rounds brought."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.columns: list[str] = []
        self.columns = next(self._rows(), [])
        self.chain: dict[
            int, str
        ] = {}  # round -> digest of the rows up to it, of those that this process wrote
        self._digest = ""

    def append(self, round: int, values: Mapping[str, Any]) -> None:
        """Add the row of one round; a name that is new becomes a column, empty for the rounds before."""
        row = {"round": round, **values}
        cells = {name: _cell(name, value) for name, value in row.items()}
        new = [name for name in cells if name not in self.columns]
        if new:
            rows = list(self._rows())[1:]
            self.columns = self.columns + new
            self._replace([row + [""] * len(new) for row in rows])
        self._write(_csv_line([cells.get(name, "") for name in self.columns]))
        self._digest = chained(self._digest, cells)
        self.chain[round] = self._digest

    def digests(self) -> dict[int, str]:
        """Round -> digest of the rows up to it, of those that are in the file."""
        self.columns = []
        self.columns = next(self._rows(), [])
        rows = (dict(zip(self.columns, row, strict=True)) for row in list(self._rows())[1:])
        try:
            return chain_of(rows)
        except (KeyError, ValueError) as error:
            raise damaged(self.path, f"a line begins with no round: {error}") from error

    def truncate(self, round: int) -> None:
        """Keep the rounds up to this one; a torn last line goes too.

        The header stays: a column that a dropped round brought will be brought again. Where no round is kept, nobody
        knows that it is the header of this table, and it goes.
        """
        self.columns = []
        self.columns = next(self._rows(), [])
        kept = [row for row in list(self._rows())[1:] if _round_of(self.path, row) <= round]
        self.columns = self.columns if kept else []
        self._replace(kept)
        self.chain = self.digests()
        self._digest = self.chain[max(self.chain)] if self.chain else ""

    def _replace(self, rows: Iterable[list[str]]) -> None:
        self.close()
        if self.columns:
            write_whole(self.path, "".join(_csv_line(row) for row in [self.columns, *rows]))
        else:
            self.path.unlink(missing_ok=True)  # killed before its header was complete

    def _rows(self) -> Iterator[list[str]]:
        """The complete rows, header first."""
        for number, row in enumerate(csv.reader(io.StringIO(complete_lines(self.path)))):
            if self.columns and len(row) != len(self.columns):
                why = f"line {number + 1} has {len(row)} fields, its header {len(self.columns)}"
                raise damaged(self.path, why)
            yield row


def _round_of(path: Path, row: list[str]) -> int:
    try:
        return int(row[0])
    except (ValueError, IndexError) as error:
        raise damaged(path, f"a line begins with no round: {row[:1]}") from error


def _csv_line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(name: str, value: Any) -> str:
    """Text that reads back as the same number; lists are JSON, None is empty."""
    if value is None:
        return ""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, int):
        return str(int(value))  # True as 1: the file holds numbers
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return json.dumps(list(value))
    raise TypeError(
        f"metric '{name}' is a {type(value).__name__} ({value!r}); expected a number, list or None"
    )


class EventsFile(_LinesFile):
    """A JSON Lines file of things worth telling: the round and a sentence."""

    def append(self, round: int, texts: Iterable[str]) -> None:
        """Add one line per text."""
        for text in texts:
            self._write(json.dumps({"round": round, "text": text}, ensure_ascii=False) + "\n")

    def digest(self) -> str:
        """Of what is in the file now: how many lines, and their digest."""
        return _digest_of_lines(self._lines())

    def begins_with(self, digest: str) -> bool:
        """Whether the file begins with the lines that `digest` was of; later ones may have come."""
        count = int(digest.partition(":")[0])
        return _digest_of_lines(self._lines()[:count]) == digest

    def truncate(self, round: int) -> None:
        """Keep the events up to this round."""
        self.close()
        lines = self._lines()
        kept = [line + "\n" for line in lines if self._read(line)["round"] <= round]
        if kept:
            write_whole(self.path, "".join(kept))
        else:
            self.path.unlink(missing_ok=True)

    def read(self) -> list[dict[str, Any]]:
        """All events, as dictionaries with `round` and `text`."""
        return [self._read(line) for line in self._lines()]

    def _read(self, line: str) -> dict[str, Any]:
        return read_event(self.path, line)

    def _lines(self) -> list[str]:
        # Not splitlines: JSON leaves other line separators inside its strings as they are.
        return complete_lines(self.path).split("\n")[:-1]


def _digest_of_lines(lines: list[str]) -> str:
    content = "\n".join(lines).encode(errors="backslashreplace")
    return f"{len(lines)}:{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def read_event(path: Path, line: str) -> dict[str, Any]:
    """One line of `events.jsonl`: its round and text."""
    try:
        event = json.loads(line)
        return {"round": int(event["round"]), "text": str(event["text"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged (a line of it is no event: {error}); restore it, or remove it to continue without it.",
            code="damaged",
            file=path,
        ) from error


class LongTable:
    """A Parquet table that grows by part files and becomes one file when the run is done.

    Every part holds whole rounds. A round that is found twice (a kill between writing a new file and
    removing the old ones) is the same round twice: the first one found counts.
    """

    def __init__(self, run: Path, name: str) -> None:
        self.final = run / f"{name}.parquet"
        self._parts = run / "parts"
        self._name = name
        self._buffer: list[pa.Table] = []
        self._last = 0
        self._checked: set[Path] = set()

    def append(self, round: int, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Remember the rows of one round until the next `flush`."""
        import pyarrow as pa

        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of {self._name} are not aligned: {lengths}")
        rounds = np.full(next(iter(lengths.values()), 0), round, dtype=np.int32)
        self._buffer.append(pa.table({"round": rounds, **{k: np.asarray(v) for k, v in columns.items()}}))
        self._last = round

    def flush(self) -> None:
        """Write what was remembered as one part, durably."""
        if self._buffer:
            self._parts.mkdir(exist_ok=True)
            write_rounds(self._parts / f"{self._name}-{self._last:06d}.parquet", lambda: iter(self._buffer))
            self._buffer = []

    def truncate(self, round: int) -> None:
        """Drop everything later than `round`, whatever mixture of files an interrupted run left."""
        self._buffer = []
        sources = self._sources()
        kept = self._parts / f"{self._name}-{max(round, 0):06d}.parquet"
        if next(self._rounds(up_to=round), None) is not None:
            self._parts.mkdir(exist_ok=True)
            write_rounds(kept, lambda: self._rounds(up_to=round))
            sources = [source for source in sources if source != kept]
        for source in sources:
            source.unlink()

    def merge(self) -> None:
        """One file in place of the parts; its bytes do not depend on how the rounds were split over parts."""
        self.flush()
        parts = [source for source in self._sources() if source != self.final]
        if parts:
            write_rounds(self.final, self._rounds)
            for part in parts:
                part.unlink()

    def read(self) -> pd.DataFrame:
        """All whole rounds that are on disk, in one data frame."""
        import pandas as pd
        import pyarrow as pa

        for attempt in itertools.count():
            try:
                tables = list(self._rounds())
                break
            except FileNotFoundError:  # the run merged its parts between our listing and our reading
                if attempt == 3:
                    raise
        if not tables:
            return pd.DataFrame()
        return pa.concat_tables(tables, promote_options="permissive").to_pandas()

    def numbers(self) -> set[int]:
        """The rounds that are on disk."""
        return {int(table["round"][0].as_py()) for table in self._rounds()}

    def _sources(self) -> list[Path]:
        parts = [path for _, path in numbered_files(self._parts, self._name)]
        return [self.final, *parts] if self.final.exists() else parts

    def _rounds(self, up_to: int | None = None) -> Iterator[pa.Table]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        seen: set[int] = set()
        for source in self._sources():
            if source not in self._checked:
                check_table(source)
                self._checked.add(source)
            try:
                table = pq.read_table(source)
            except FileNotFoundError:
                raise
            except (OSError, ValueError, pa.ArrowException) as error:
                raise damaged(source, " ".join(str(error).split()).rstrip(".")) from error
            if "round" not in table.column_names:
                raise damaged(source, "it has no column round")
            numbers = table["round"].to_numpy()
            starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            for start, end in itertools.pairwise(starts):
                number = int(numbers[start]) if end > start else None
                if number is None or number in seen or (up_to is not None and number > up_to):
                    continue
                seen.add(number)
                yield table.slice(start, end - start)


def write_rounds(path: Path, rounds: Callable[[], Iterator[pa.Table]]) -> None:
    """Stream the tables that `rounds()` yields into one Parquet file, in row groups cut by rows alone.

    `rounds` is called twice, for the columns and for the rows, so that nothing has to be held in memory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([])
    for table in rounds():
        if table.schema != schema:
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
    with whole_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        pending: list[pa.Table] = []
        digest = TableDigest()

        def write_group() -> None:
            tables = [schema.empty_table(), *pending]
            group = pa.concat_tables(tables, promote_options="permissive")
            digest.add(group)
            writer.write_table(group)
            pending.clear()

        for table in rounds():
            pending.append(table)
            if sum(len(table) for table in pending) >= _ROWS_PER_GROUP:
                write_group()
        if pending:
            write_group()
        writer.add_key_value_metadata(digest.metadata(path))


def read_csv(path: Path) -> pd.DataFrame:
    """A CSV file as `CsvFile` writes it: exact floats, lists as lists, whole numbers where no cell is empty.

    Not pandas' parser: whether that one reads floats exactly depends on its version and its options.
    """
    import pandas as pd

    header, *rows = csv.reader(io.StringIO(complete_lines(path) or "round\n"))
    columns: dict[str, pd.Series] = {}
    for position, name in enumerate(header):
        values = [value_of(row[position]) for row in rows]
        if any(isinstance(value, list) for value in values):
            columns[name] = pd.Series(values, dtype=object)
        elif all(isinstance(value, int) for value in values):
            columns[name] = pd.Series(values, dtype="int64")
        else:
            columns[name] = pd.Series([math.nan if v is None else v for v in values], dtype="float64")
    return pd.DataFrame(columns)


def value_of(cell: str) -> Any:
    """What a cell of a table holds: a list, a whole number, a number, or nothing."""
    if not cell:
        return None
    if cell.startswith("["):
        return json.loads(cell)
    try:
        return int(cell)
    except ValueError:
        return float(cell)
