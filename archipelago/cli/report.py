"""`report RUN ... [option=value ...]`: tables, figures and one HTML file of runs and sweeps."""

from __future__ import annotations

import csv
import io
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archipelago.cli import suggestions
from archipelago.cli.app import Described
from archipelago.cli.output import print_json
from archipelago.cli.request import Request
from archipelago.cli.results import keep_report, method_labels
from archipelago.cli.words import AsJson

if TYPE_CHECKING:
    from archipelago.reports.build import Report


@dataclass(kw_only=True)
class MakeReport(Request):
    """Tables, figures and one HTML file of runs and sweeps."""

    words: list[str] = field(default_factory=list)  # directories, addresses and options
    as_json: bool = False

    def execute(self) -> None:
        """Write the report, print its tables and where it is."""
        from archipelago.reports.table_text import print_tables

        built, page, files = self._build()
        if self.as_json:
            print_json({"report": page, "files": files, "tables": _tables(built)})
            return
        print_tables(built.tables, sys.stdout)
        print(f"Report: {page} (beside it: tables, and figures/ for papers)")

    def _build(self) -> tuple[Report, str, list[str]]:
        """The report, the address of its page and of every file written."""
        from archipelago.reports.build import ReportRequest, build_report
        from archipelago.runs.storage import is_address, join, reading, scratch

        addresses = [word for word in self.words if is_address(word) and "=" not in word.partition("://")[0]]
        with ExitStack() as stack:
            words = [
                str(stack.enter_context(reading(word))) if word in addresses else word for word in self.words
            ]
            asked = ReportRequest.parse(words)
            into = asked.out
            if is_address(into):
                asked.out = str(stack.enter_context(scratch(into)))
            elif addresses and len(asked.paths) == 1 and not into:
                into = join(addresses[0], "report")
            built = build_report(asked, method_labels)
            page = keep_report(built, into)
            files = [
                join(into, file.relative_to(built.folder).as_posix()) if is_address(into) else str(file)
                for file in built.files
            ]
        return built, page, files


def _tables(built: Report) -> list[dict[str, Any]]:
    """The rows of table.csv, with numbers as numbers and null for a number that does not exist."""
    from archipelago.reports.table_text import as_csv

    return [
        {"title": table.title, "notes": list(table.notes), "rows": _rows(as_csv([table]))}
        for table in built.tables
    ]


def _rows(text: str) -> list[dict[str, Any]]:
    return [
        {name: _value(name, cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))
    ]


def _value(name: str, cell: str) -> Any:
    """
    >>> _value("mean", "91.5"), _value("seeds", "0 1"), _value("p", ""), _value("method", "IFCA")
    (91.5, [0, 1], None, 'IFCA')
    """
    if name in ("seeds", "values"):
        return [_number(each) for each in cell.split()]
    return _number(cell) if cell else None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def report(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN ...",
            help="Directories of runs and sweeps, or their addresses in an object store.",
            autocompletion=suggestions.of_report,
        ),
    ] = None,
    as_json: AsJson = False,
) -> MakeReport:
    """Write tables (Markdown, LaTeX, CSV), figures (PNG, SVG) and one HTML file of runs and sweeps.

    Runs that differ in their seed alone become one row, with mean and standard deviation.
    """
    return MakeReport(words=list(words or []), as_json=as_json)


COMMAND = Described(
    "report",
    report,
    "RUN ... [option=value ...] [--json]",
    "tables, figures and one HTML file of runs and sweeps; options are out=FOLDER, table=3.1 (published), test=t or "
    "wilcoxon, against=METHOD, metrics=NAME,NAME, figures=no, yes or all "
    "(of many figures, `yes` draws those of one run)",
    [
        ("One run, with its figures as PNG and SVG", "report runs/my-run"),
        ("Two sweeps compared, without figures", "report runs/first runs/second out=comparison figures=no"),
        ("A published table beside ours, tested by Wilcoxon", "report runs/table table=3.1 test=wilcoxon"),
        ("The numbers for another program", "report runs/my-run figures=no --json"),
    ],
    values=[
        ("out=FOLDER", "Where the report goes (default: `report` in the one given directory, or here)."),
        (
            "table=NUMBER",
            "A published table, as in 3.1, to compare with (default: the one that the sweep names).",
        ),
        ("test=t|wilcoxon", "How differences between rows are tested."),
        ("against=METHOD", "The row that the others are tested against (default: the best)."),
        ("metrics=NAME,NAME", "Columns of metrics.csv (default: the headline metrics)."),
        (
            "figures=no|yes|all",
            "PNG and SVG files too; of more than 80 figures, `yes` draws those of one run.",
        ),
    ],
)
