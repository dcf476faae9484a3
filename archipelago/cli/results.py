"""What is shown of a run or a sweep when it ends: its table, its report, and where everything is."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.cli.stopping import Stopped, how_to_resume
from archipelago.core.program import program

if TYPE_CHECKING:
    from archipelago.reports.build import Report


def show_results(path: Path, address: str) -> None:
    """The table of a run, and where its report and its files are."""
    from archipelago.reports.summary import print_table

    print_table(path)
    print(f"Report: {_report(path, address)[1]}{_drawn(address)}")
    print(f"Results: {address} (summary.md says what is in it)")


def show_sweep(address: str, demonstration: bool = False) -> None:
    """The table of a sweep, why trials failed, and where everything is; the demonstration also says what it shows."""
    from archipelago.cli.demonstration import findings, next_steps, offer_to_open
    from archipelago.reports.table_text import print_tables
    from archipelago.runs.storage import is_address, reading
    from archipelago.runs.sweeps import read_rows

    with reading(address) as folder:
        built, page = _report(folder, address)
    print_tables(built.tables, sys.stdout, brief=True)
    rows = read_rows(address)
    for row in rows:
        if row.status == "failed":
            print(f"Failed: {row.trial}: {row.reason}")
    if demonstration:
        print("\n".join([*findings(built.tables), next_steps()]))
    print(f"Results: {address}")
    print(f"Report: {page}{_drawn(address)}")
    if rows and all(row.status == "failed" for row in rows):
        every = "its only trial" if len(rows) == 1 else f"all {len(rows)} trials"
        raise Stopped(1, f"Failed: {every}, each for the reason above. {how_to_resume(address)}")
    if demonstration and not is_address(page):
        offer_to_open(Path(page).resolve().as_uri())


def _report(folder: Path, address: str) -> tuple[Report, str]:
    """The report of a run or a sweep whose files are in `folder`, kept with it where it is stored; and where.

    Without PNG and SVG files, which take longest: the command `report` makes them at any time.
    """
    from archipelago.reports.build import ReportRequest, build_report
    from archipelago.runs.storage import join

    built = build_report(ReportRequest([str(folder)], figures="no"), method_labels)
    return built, keep_report(built, join(address, "report"))


def method_labels() -> dict[str, str]:
    """What the platform's methods are called, for reports of runs from before runs wrote it down."""
    import archipelago.strategies  # noqa: F401  (registers them)
    from archipelago.core.vocabulary import registered_labels

    return registered_labels()


def keep_report(built: Report, folder: str) -> str:
    """Where the page of a report is that belongs into `folder`: sent there if that is in an object store."""
    from archipelago.runs.storage import Mirror, is_address, join

    if built.warning:
        print(built.warning, file=sys.stderr)
    if not is_address(folder):
        return str(built.folder / "report.html")
    Mirror(built.folder, folder).push()
    return join(folder, "report.html")


def _drawn(address: str) -> str:
    return f" (its figures as PNG and SVG: {program()} report {shlex.quote(address)})"
