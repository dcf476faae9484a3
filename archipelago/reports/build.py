"""`launch report RUN...`: from run directories to tables, figures and one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from archipelago.core.citations import bibtex
from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.program import program
from archipelago.core.registry import nearest
from archipelago.core.vocabulary import Labels, registered_labels
from archipelago.reports.figures import Figure, without_lone_choices
from archipelago.reports.figures_results import result_figures, title_of
from archipelago.reports.figures_run import run_figures
from archipelago.reports.groups import Group, by_block, make_groups
from archipelago.reports.page import page
from archipelago.reports.published import find_table
from archipelago.reports.significance import check_test
from archipelago.reports.table_text import as_csv, latex, markdown
from archipelago.reports.tables import Table, build_tables
from archipelago.runs.sweeps import find_trials, table_of

DETAILED = 8  # groups of which one run is shown from the inside
_LARGEST_PAGE = 4_900_000  # bytes
_MANY_FILES = 80  # figures that are drawn as files without being asked for all of them


@dataclass
class ReportRequest:
    """What a report is asked to be; each option can be written as `name=value` on the command line."""

    paths: list[str] = field(default_factory=list)
    out: str = ""  # folder; default: `report` in the one given directory, or here
    table: str = ""  # a published table, all rows of which are listed; default: the one that the sweep names
    test: str = "t"  # t or wilcoxon
    against: str = ""  # row that the others are tested against; default: the best
    metrics: str = ""  # columns of metrics.csv, with commas
    figures: str = "yes"  # PNG and SVG files too; all: of every run shown, however many

    @classmethod
    def parse(cls, words: Sequence[str]) -> ReportRequest:
        """Directories and options in any order; a mistake is a sentence."""
        request = cls()
        options = [option.name for option in fields(cls) if option.name != "paths"]
        for word in words:
            name, equals, value = word.partition("=")
            if word.startswith("-") or (equals and name not in options and not Path(word).exists()):
                raise UserError(
                    f"Unknown option '{name.lstrip('-')}' of report. {nearest(name.lstrip('-'), options)}",
                    code="unknown-option", option=name,
                )  # fmt: skip
            if equals and name in options:
                setattr(request, name, value)
            else:
                request.paths.append(word)
        if not request.paths:
            raise UserError(
                "Expected run directories or sweeps after report, got none: as in "
                f"`{program()} report runs/NAME`.",
                code="missing-word", wanted="run directory",
            )  # fmt: skip
        if request.figures not in ("yes", "no", "all"):
            raise UserError(
                f"Expected figures=yes, no or all, got figures={request.figures}.",
                code="unknown-choice", setting="figures", given=request.figures,
            )  # fmt: skip
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
    warning: str = ""  # what whoever asked for it should know


def build_report(request: ReportRequest, labels: Labels = registered_labels) -> Report:
    """Read the runs, write the tables and the page; whatever is refused is refused before a file is written.

    `labels` are those of methods, asked for only where a run from before does not say what its method is called.
    """
    table = request.table or table_of(request.paths)
    published = find_table(table) if table else None
    groups = make_groups(find_trials(request.paths), labels)
    if not groups:
        raise UserError(
            f"Expected runs in {', '.join(request.paths)}, found none: the sweep has no trials yet.",
            code="no-runs",
        )
    tables = build_tables(
        groups,
        test=request.test,
        against=request.against or None,
        published=published,
        metrics=[name for name in request.metrics.split(",") if name],
    )
    folder = request.folder
    if not request.out:
        _refuse_link(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = (
            f"Cannot write the report into {folder} ({error.strerror}): choose another folder with out=..."
        )
        raise UserError(message, code="unwritable", path=folder) from error
    figures, text, warning = _page_that_fits(groups, tables, request.paths, folder)
    texts = {"table.md": markdown(tables), "table.tex": latex(tables), "table.csv": as_csv(tables)}
    if cited := _cited(tables):
        texts["references.bib"] = bibtex(cited)
    texts["report.html"] = text
    for name, text in texts.items():
        write_whole(folder / name, text, durable=False)
    files = [folder / name for name in texts]
    if request.figures != "no":
        from archipelago.reports.drawing import draw_figures

        files += draw_figures(_for_papers(figures, request.figures), folder / "figures")
    return Report(tables, groups, folder, files, warning)


def _refuse_link(folder: Path) -> None:
    for path in (folder, folder / "figures"):
        if path.is_symlink():
            raise UserError(
                f"Expected {path} to be a folder of its own, got a symbolic link to {path.readlink()}, where files "
                "would be overwritten: remove the link, or choose a folder with out=...",
                code="symbolic-link", path=path,
            )  # fmt: skip


def _page_that_fits(
    groups: Sequence[Group], tables: Sequence[Table], paths: Sequence[str], folder: Path
) -> tuple[list[Figure], str, str]:
    """(figures, the page with them, a warning): as many runs are shown from the inside as a browser can bear."""
    title, overview = page_title(groups, paths), result_figures(groups, tables)
    for detailed in (DETAILED, DETAILED // 2, 1, 0):
        figures, notes = collect_figures(groups, tables, overview, detailed)
        text = page(title, groups, tables, figures, notes, folder)
        if len(text) < _LARGEST_PAGE:
            return figures, text, ""
    warning = (
        f"The page has {len(text) / 1e6:.1f} MB with no run shown from the inside: browsers may be slow with it; "
        "ask for fewer runs at a time."
    )
    return figures, page(title, groups, tables, figures, [*notes, warning], folder), warning


def _cited(tables: Sequence[Table]) -> list[str]:
    """The keys of the works whose numbers stand in the tables."""
    cells = (cell for table in tables for row in table.rows for cell in row.cells.values())
    return sorted({cell.published.source for cell in cells if cell.published is not None})


def _for_papers(figures: Sequence[Figure], asked: str) -> list[Figure]:
    """What is drawn as files: everything, but of very many figures those of one run only, unless all are asked for."""
    if asked == "all" or len(figures) <= _MANY_FILES:
        return list(figures)
    runs = [figure.choice["run"] for figure in figures if "run" in figure.choice]
    return [
        figure for figure in figures if figure.choice.get("run", runs[0] if runs else "") == (runs or [""])[0]
    ]


def collect_figures(
    groups: Sequence[Group], tables: Sequence[Table], overview: Sequence[Figure], detailed: int
) -> tuple[list[Figure], list[str]]:
    """The figures of the comparison and of one run of some groups, and what a reader must know of the choice."""
    figures = list(overview)
    with_runs = sorted((group for group in groups if group.runs), key=_ranks(tables))
    for group in with_runs[:detailed]:
        run = next((run for run in group.runs if run.status.state == "finished"), group.runs[0])
        name = title_of(group) if len(by_block(with_runs)) == 1 else f"{title_of(group)} on {group.block}"
        figures += run_figures(run, f"{name}, seed {run.setting('seed')}", min(detailed, len(with_runs)))
    notes = []
    if len(with_runs) > 1 or any(len(group.runs) > 1 for group in with_runs):
        notes.append(
            "Figures of clusters, of the inside of a method and of its data show the first finished seed."
        )
    if len(with_runs) > detailed:
        left = len(with_runs) - detailed
        notes.append(
            f"They show the {detailed} groups of best rank; {left} more have a report of their own if asked for alone."
        )
    return without_lone_choices(figures), notes


def _ranks(tables: Sequence[Table]) -> Callable[[Group], tuple[int, int]]:
    """The best of every problem first, as its first metric ranks them; those without a number last."""
    ranks: dict[int, tuple[int, int]] = {}
    for table in (table for table in tables if table.ranked):
        for row in table.rows:
            cell = row.cells[table.metrics[0].name] if table.metrics else None
            rank = cell.rank if cell is not None else None
            ranks[id(row.group)] = (rank is None, rank or 0)
    return lambda group: ranks[id(group)]


def page_title(groups: Sequence[Group], paths: Sequence[str]) -> str:
    """What the page is called: the run, the sweep, or how many methods are compared."""
    if len(paths) == 1:
        return Path(paths[0]).expanduser().resolve().name
    labels = list(dict.fromkeys(group.label for group in groups))
    return labels[0] if len(labels) == 1 else f"{len(labels)} methods compared"
