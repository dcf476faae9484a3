"""Text of users in CSV files: a spreadsheet takes a cell that begins with = + - or @ for a formula, and runs it."""

from __future__ import annotations

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def quoted_cell(text: str) -> str:
    """The text as a cell that every program reads as text.

    >>> quoted_cell("=1+1"), quoted_cell("IFCA"), plain_cell(quoted_cell("@x")), plain_cell("'tis")
    ("'=1+1", 'IFCA', '@x', "'tis")
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


def plain_cell(cell: str) -> str:
    """What was quoted."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_FORMULA) else cell
