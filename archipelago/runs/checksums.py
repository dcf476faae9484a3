"""Whether tables are as they were written: a file that reads well may have other numbers in it.

A Parquet file carries the digest of its columns, and its name in the run, so that another table is not taken for it.
Rows of a CSV file are chained: the digest of round n is that of round n - 1 and of the row, empty cells left out, so
that a column that comes later changes none. The manifest of a checkpoint has the digest of the rows that it stands on,
`identity.json` of a finished run those of all. Files from before have none, and are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError
from archipelago.core.files import check_regular

if TYPE_CHECKING:
    import pyarrow as pa

_KEY, _NAME = b"archipelago-digest", b"archipelago-table"
_INNER = ("federation", "parts", "records")  # folders of a run that have tables


def chained(before: str, cells: Mapping[str, str]) -> str:
    """The digest of the rows up to this one, given that of those before.

    >>> chained("", {"round": "1", "loss": "0.5", "new": ""}) == chained("", {"round": "1", "loss": "0.5"})
    True
    """
    content = json.dumps([before, sorted((name, cell) for name, cell in cells.items() if cell)])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def chain_of(rows: Iterable[Mapping[str, str]]) -> dict[int, str]:
    """{round: digest of the rows up to it}."""
    found: dict[int, str] = {}
    before = ""
    for row in rows:
        before = chained(before, row)
        found[int(row["round"])] = before
    return found


class TableDigest:
    """The digest of a table that comes in pieces, however it is cut."""

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}

    def add(self, table: pa.Table) -> None:
        """The next rows."""
        for name, column in zip(table.column_names, table.columns, strict=True):
            digest = self._columns.setdefault(name, hashlib.blake2b(digest_size=16))
            values = column.to_numpy()
            digest.update(str(values.tolist()).encode() if values.dtype.hasobject else values.tobytes())

    def text(self) -> str:
        """The digest."""
        parts = [(name, each.hexdigest()) for name, each in sorted(self._columns.items())]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def metadata(self, path: Path) -> dict[str, str]:
        """What the file at this path says of itself."""
        return {_KEY.decode(): self.text(), _NAME.decode(): _name_of(path)}


def _name_of(path: Path) -> str:
    """The name of a table in its run, whatever the run is called."""
    inner = path.parent.name in _INNER and not (path.parent / "config.yaml").exists()
    return f"{path.parent.name}/{path.name}" if inner else path.name


def check_table(path: Path) -> None:
    """A `UserError` if a Parquet file cannot be read, or holds other values than were written."""
    check_regular(path)
    if (fault := fault_of_table(path)) is not None:
        raise damaged(path, fault)


def fault_of_table(path: Path) -> str | None:
    """Why a Parquet file cannot be used, in words; None if it can."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=False) as file:
            said = file.metadata.metadata or {}
            stated, name = said.get(_KEY), said.get(_NAME, b"").decode(errors="replace")
            digest = TableDigest()
            for group in range(file.num_row_groups):
                digest.add(file.read_row_group(group, use_threads=False))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        return " ".join(str(error).split()).rstrip(".")
    if name not in ("", _name_of(path)):
        return f"it was written as {name}"
    if stated is None or not digest._columns:
        return None
    same = stated.decode(errors="replace") == digest.text()
    return None if same else "its values are not those that were written"


def check_header(path: Path) -> None:
    """A `UserError` if a safetensors file is cut short, or does not begin as one: without reading its arrays."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:  # or as much memory would be taken as it says
            raise ValueError("it does not begin as such a file does")
        with safe_open(str(path), framework="numpy") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, why: str) -> UserError:
    """The sentence about a file of a run that cannot be used, and what can be saved."""
    from archipelago.runs.salvage import what_can_be_saved

    return UserError(f"{path} is damaged ({why}); {what_can_be_saved(path)}.", code="damaged", file=path)
