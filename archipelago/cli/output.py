"""What a command prints: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from archipelago.core.readings import HEADINGS, Reading


def print_table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal; aligned plain lines, never cut, anywhere else."""
    if not rows:
        print(f"{title}\n  none\n")
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for column in range(len(rows[0])):
            table.add_column(style="cyan" if column == 0 else None, overflow="fold", no_wrap=column == 0)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        Console().print(table, "")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    print(title)
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  " + "  ".join([*cells, row[-1]]))
    print()


def print_readings(rows: Sequence[Reading]) -> None:
    """How a paper was read: a table on a terminal; anywhere else a block for each row, never cut."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Readings", title_justify="left", title_style="bold", show_lines=True)
        for name, heading in HEADINGS.items():
            table.add_column(heading, style="cyan" if name == "topic" else None, overflow="fold")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row.row()))
        Console().print(table)
        return
    print("Readings")
    for row in rows:
        print(f"\n{row.topic}")
        for (name, heading), cell in zip(HEADINGS.items(), row.row(), strict=True):
            if name != "topic":
                print(f"    {heading:15}{cell}")


def print_json(document: Any) -> None:
    """One JSON document; what JSON has no type for (a class, a path) is its text."""
    print(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def count(number: float, name: str) -> str:
    """
    >>> count(1, "node"), count(2.0, "CPU")
    ('1 node', '2 CPUs')
    """
    return f"{number:g} {name}" + ("" if number == 1 else "s")
