"""Whether tables are as they were written: a file that reads well may have other numbers in it.

A Parquet file carries the digest of its columns. Rows of a CSV file are chained: the digest of round n is that of
round n - 1 and of the row, empty cells left out, so that a column that comes later changes none. The manifest of a
checkpoint has the digest of the rows that it stands on, `identity.json` of a finished run those of all.
Files from before have none, and are taken as they are.
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

_KEY = b"archipelago-digest"


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

    def metadata(self) -> dict[str, str]:
        """What the file says of itself."""
        parts = [(name, each.hexdigest()) for name, each in sorted(self._columns.items())]
        return {_KEY.decode(): hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()}


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
            stated = (file.metadata.metadata or {}).get(_KEY)
            digest = TableDigest()
            for group in range(file.num_row_groups):
                digest.add(file.read_row_group(group, use_threads=False))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        return " ".join(str(error).split()).rstrip(".")
    if stated is None or not digest._columns:
        return None
    same = stated.decode(errors="replace") in digest.metadata().values()
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
