"""`launch report RUN...`: from run directories to tables, figures and one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from foundation.errors import UserError
from foundation.files import write_whole
from foundation.registry import nearest
from reports.groups import Group, make_groups
from reports.published import find_table
from reports.runs import find_trials
from reports.significance import check_test
from reports.table_text import as_csv, latex, markdown
from reports.tables import Table, build_tables


@dataclass
class ReportRequest:
    """What a report is asked to be; each option can be written as `name=value` on the command line."""

    paths: list[str] = field(default_factory=list)
    out: str = ""  # folder; default: `report` in the one given directory, or here
    table: str = ""  # a published table, all rows of which are listed
    test: str = "t"  # t or wilcoxon
    against: str = ""  # row that the others are tested against; default: the best
    metrics: str = ""  # columns of metrics.csv, with commas
    figures: str = "yes"  # PNG and SVG files too

    @classmethod
    def parse(cls, words: Sequence[str]) -> ReportRequest:
        """Directories and options in any order; a mistake is a sentence."""
        request = cls()
        options = [option.name for option in fields(cls) if option.name != "paths"]
        for word in words:
            name, equals, value = word.partition("=")
            if word.startswith("-") or (equals and name not in options and not Path(word).exists()):
                raise UserError(
                    f"Unknown option '{name.lstrip('-')}' of report. {nearest(name.lstrip('-'), options)}"
                )
            if equals and name in options:
                setattr(request, name, value)
            else:
                request.paths.append(word)
        if not request.paths:
            raise UserError(
                "Expected run directories or sweeps after report, got none: as in "
                "`python -m platform.launch report runs/NAME`."
            )
        if request.figures not in ("yes", "no"):
            raise UserError(f"Expected figures=yes or figures=no, got figures={request.figures}.")
        check_test(request.test)
        return request

    @property
    def folder(self) -> Path:
        """Where the report goes."""
        if self.out:
            return Path(self.out).expanduser()
        return Path(self.paths[0]).expanduser() / "report" if len(self.paths) == 1 else Path("report")


@dataclass(frozen=True)
class Report:
    """What was built: the tables as numbers, and the files that hold them."""

    tables: Sequence[Table]
    groups: Sequence[Group]
    folder: Path
    files: Sequence[Path]


def build_report(request: ReportRequest) -> Report:
    """Read the runs, write the tables and the page; whatever is refused is refused before a file is written."""
    published = find_table(request.table) if request.table else None
    groups = make_groups(find_trials(request.paths))
    if not groups:
        raise UserError(
            f"Expected runs in {', '.join(request.paths)}, found none: the sweep has no trials yet."
        )
    tables = build_tables(
        groups,
        test=request.test,
        against=request.against or None,
        published=published,
        metrics=[name for name in request.metrics.split(",") if name],
    )
    folder = request.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = (
            f"Cannot write the report into {folder} ({error.strerror}): choose another folder with out=..."
        )
        raise UserError(message) from error
    texts = {"table.md": markdown(tables), "table.tex": latex(tables), "table.csv": as_csv(tables)}
    for name, text in texts.items():
        write_whole(folder / name, text, durable=False)
    return Report(tables, groups, folder, [folder / name for name in texts])
