"""How a paper was read: one table in every method's docstring, the same for readers, `list METHOD` and reports.

The table ends the docstring. It begins with a line `Readings`; each row is a topic at the margin, and below it what the
paper says, what the authors' released code does, what is done here, and the option that chooses otherwise:

    Readings

    What K-means sees
        paper   the flattened parameters
        code    the last layer's weight matrix
        here    as the code
        option  fesem.features=head|parameters

A cell may run on over lines that are indented further. `here` must be there; a source that is silent, or a choice that
nobody can make, is left out. Where the paper has no released code, no row has one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from archipelago.core.registry import Entry

HEADINGS = {"topic": "", "paper": "paper", "code": "released code", "here": "here", "option": "option"}
NOTHING = "–"  # a cell of a source that is silent

_TITLE = re.compile(r"^Readings\n", re.MULTILINE)
_CELL = re.compile(r" {4}(paper|code|here|option) {2,}(\S.*)")
_MORE = re.compile(r" {8,}(\S.*)")


@dataclass(frozen=True)
class Reading:
    """One row: where the sources are silent, ambiguous or disagree, and what was made of it."""

    topic: str
    here: str
    paper: str = ""
    code: str = ""
    option: str = ""

    def row(self) -> tuple[str, ...]:
        """Its cells in the order of `HEADINGS`."""
        return tuple(getattr(self, name) or NOTHING for name in HEADINGS)

    def stored(self) -> dict[str, str]:
        """Plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value}


def split_readings(text: str) -> tuple[str, tuple[Reading, ...]]:
    """A docstring without its table, and the rows of the table; no rows where it has none.

    >>> table = ["Readings", "Ties", "    code    the largest", "    here    the lowest, as", " " * 12 + "argmin does"]
    >>> text = "IFCA: K models.\\n\\n" + "\\n".join(table)
    >>> about, rows = split_readings(text)
    >>> about, rows[0].row()
    ('IFCA: K models.', ('Ties', '–', 'the largest', 'the lowest, as argmin does', '–'))
    """
    found = _TITLE.search(text)
    if found is None:
        return text.strip(), ()
    about, table = text[: found.start()].strip(), text[found.end() :]
    return about, tuple(Reading(**cells) for cells in _rows(table.splitlines()))


def _rows(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    row: dict[str, str] = {}
    last = ""
    for line in filter(str.strip, lines):
        if not line.startswith(" "):
            if row:
                yield _whole(row)
            row, last = {"topic": line.strip()}, "topic"
        elif (cell := _CELL.fullmatch(line.rstrip())) and cell[1] not in row and row:
            last = cell[1]
            row[last] = cell[2]
        elif (more := _MORE.fullmatch(line.rstrip())) and last not in ("", "topic"):
            row[last] += " " + more[1]
        else:
            raise ValueError(
                f"expected a topic, or one of paper, code, here, option below it, once each; got {line!r}"
            )
    if row:
        yield _whole(row)


def _whole(row: dict[str, str]) -> dict[str, str]:
    if "here" not in row:
        raise ValueError(f"the reading '{row['topic']}' does not say what is done here")
    return row


def documentation(entry: Entry[Any]) -> str:
    """What its module says (the paper, its symbols, its readings) where an entry is a class, or a function in a module
    that ends with readings; else the function's own docstring."""
    defined = getattr(entry.value, "origin", entry.value)  # a record around a function may name it
    module = str(inspect.getdoc(inspect.getmodule(defined)) or "")
    whole = isinstance(defined, type) or _TITLE.search(module) is not None
    return (module if whole else str(inspect.getdoc(defined) or "")).strip()


def readings_of(entry: Entry[Any]) -> tuple[Reading, ...]:
    """The table of an entry's documentation; none where it has none, or one of another form (somebody's own method)."""
    try:
        return split_readings(documentation(entry))[1]
    except ValueError:
        return ()
