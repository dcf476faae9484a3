"""Tables as text: for a terminal, as Markdown, as LaTeX and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from typing import TextIO

from archipelago.core.csv_cells import quoted_cell
from archipelago.core.vocabulary import Column
from archipelago.reports.costs import COSTS, WITH_TRANSFORMS
from archipelago.reports.repeats import Repeat
from archipelago.reports.significance import Paired
from archipelago.reports.table_notes import COSTS_ARE, LIFT, VS
from archipelago.reports.tables import Cell, Table, TableRow

PLUS_MINUS = "±"
_HEADLINE, _SHOWN = 2, 3  # metrics with all that is read first beside them, and metrics that are shown at all
_FIRST = ("lift", "published", "difference", "rank")
Style = Callable[[str, int | None], str]  # (text, rank) -> text


def _plain(text: str, rank: int | None) -> str:
    return text


def folds(table: Table) -> list[str]:
    """For each column of `grid` where it is shown: everywhere (""), or where "details" or "costs" are asked for.

    What everybody reads first fits on a screen: the metrics, and of the headline ones lift, published value and rank.
    """
    kinds = ["", "", ""]
    for at, metric in enumerate(table.metrics):
        kinds.append("" if at < _SHOWN else "details")
        beside = [title for title, _ in _beside(table, metric)]
        kinds += ["" if at < _HEADLINE and title in _FIRST else "details" for title in beside]
    return kinds + ["costs"] * len(table.costs())


def fold_of(note: str) -> str:
    """Which columns a note is about, as `folds` calls them."""
    return "costs" if note == COSTS_ARE else "details" if note.startswith((VS, "p:")) else ""


def grid(
    table: Table, style: Style = _plain, plus_minus: str = f" {PLUS_MINUS} ", *, brief: bool = False
) -> list[list[str]]:
    """The header and the rows of a table as text; a cell that does not exist is empty. Brief: what fits on a screen."""
    header = ["method", "K", "seeds"]
    for each in table.metrics:
        header += [each.label, *(title for title, _ in _beside(table, each))]
    header += [COSTS[name] for name in table.costs()]
    lines = [header, *(_line(table, row, style, plus_minus) for row in [*table.rows, *table.guesses])]
    if not brief:
        return lines
    kept = [at for at, kind in enumerate(folds(table)) if not kind and header[at] != "lift"]
    return [[line[at] for at in kept] for line in lines]


def _line(table: Table, row: TableRow, style: Style, plus_minus: str) -> list[str]:
    cells = [
        row.label,
        "" if row.clusters is None else str(row.clusters),
        repeats_text(row.repeats),
    ]
    for each in table.metrics:
        cell = row.cells[each.name]
        text = mean_text(cell.mean, cell.std, each, plus_minus)
        # Only what can be compared is set off.
        cells.append(style(text, cell.rank if table.compares else None))
        cells += [show(cell) for _, show in _beside(table, each, plus_minus)]
    return cells + [_amount(row.costs.get(name)) for name in table.costs()]


def _beside(
    table: Table, metric: Column, plus_minus: str = f" {PLUS_MINUS} "
) -> list[tuple[str, Callable[[Cell], str]]]:
    columns: list[tuple[str, Callable[[Cell], str]]] = []

    def published(cell: Cell) -> str:
        return (
            mean_text(cell.published.mean, cell.published.std, metric, plus_minus) if cell.published else ""
        )

    def difference(cell: Cell) -> str:
        return "" if cell.difference is None else f"{cell.difference:+.{metric.digits}f}"

    def above(cell: Cell) -> str:
        return "" if cell.lift is None else f"{cell.lift:+.{metric.digits}f}"

    if table.lifts:
        columns.append(("lift", above))
    if table.has_published:
        columns += [("published", published), ("difference", difference)]
    if table.compares:
        columns.append(("rank", lambda cell: "" if cell.rank is None else str(cell.rank)))
    if table.pairs:
        columns.append((f"vs {table.compared}", lambda cell: paired_text(cell.paired, metric)))
    if table.tests:
        columns.append(("p", lambda cell: p_text(cell.p)))
    return columns


def mean_text(
    value: float | None, spread: float | None, metric: Column, plus_minus: str = f" {PLUS_MINUS} "
) -> str:
    """`94.64 ± 1.54`, without the second part where there is one seed, empty where there is none."""
    if value is None:
        return ""
    text = f"{value:.{metric.digits}f}"
    return text if spread is None else f"{text}{plus_minus}{spread:.{metric.digits}f}"


def repeats_text(repeats: Sequence[Repeat]) -> str:
    """How many runs a row stands for: `3`, or `3 x 2` for two starts on each of three partitions.

    >>> repeats_text([Repeat(0, 0), Repeat(1, 1)]), repeats_text([Repeat(p, s) for p in (0, 1, 2) for s in (0, 1)])
    ('2', '3 x 2')
    """
    partitions, starts = (len({each[at] for each in repeats}) for at in (0, 1))
    if min(partitions, starts) > 1 and partitions * starts == len(repeats):
        return f"{partitions} x {starts}"
    return str(len(repeats)) if repeats else ""


def paired_text(found: Paired | None, metric: Column) -> str:
    """
    >>> paired_text(Paired(0.83, -0.5, 2.0, 2, 1, 3), Column("micro_accuracy", "accuracy (%)", 100.0, True, 2))
    '+0.83 [-0.50, +2.00] 2/1'
    """
    if found is None:
        return ""
    mean, low, high = (f"{value:+.{metric.digits}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}] {found.wins}/{found.losses}"


def p_text(value: float | None) -> str:
    """
    >>> p_text(0.0004), p_text(0.0312), p_text(None)
    ('<0.001', '0.031', '')
    """
    if value is None:
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _amount(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# Terminal ---------------------------------------------------------------------------------------------------


def print_tables(tables: Sequence[Table], stream: TextIO, brief: bool = False) -> None:
    """Tables with lines and colours on a terminal, aligned plain text elsewhere; brief ones fit on a screen.

    One that is wider than the terminal is brief, too.
    """
    fancy = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    asked = brief
    for table in tables:
        brief = asked or (fancy and not _fits(table, stream))
        if fancy:
            _print_drawn(table, stream, brief)
        else:
            lines = grid(table, brief=brief)
            widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
            print(table.title, file=stream)
            for line in lines:
                rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
                print("  ".join(["", line[0].ljust(widths[0]), *rest]).rstrip(), file=stream)
        for note in table.notes:
            if not (brief and (fold_of(note) or note.startswith(LIFT))):
                print(f"  {note}", file=stream)
        if brief and any(folds(table)):
            print(
                "  Lifts, paired differences, tests, further metrics and costs are in the report.",
                file=stream,
            )
        print(file=stream)


def _fits(table: Table, stream: TextIO) -> bool:
    """Whether the whole of it has a line of the terminal for each row."""
    from rich.console import Console

    lines = grid(table)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return sum(widths) + 3 * len(widths) + 1 <= Console(file=stream).width


def _print_drawn(table: Table, stream: TextIO, brief: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawn

    def style(text: str, rank: int | None) -> str:
        return {1: f"[bold green]{text}[/]", 2: f"[underline]{text}[/]"}.get(rank or 0, text) if text else ""

    drawn = Drawn(title=escape(table.title), title_justify="left", title_style="bold")
    header, *rows = grid(table, style, brief=brief)
    for position, name in enumerate(header):
        drawn.add_column(escape(name), justify="right" if position else "left")
    for row in rows:
        drawn.add_row(escape(row[0]), *row[1:])
    Console(file=stream).print(drawn)


# Files ------------------------------------------------------------------------------------------------------


def markdown(tables: Sequence[Table]) -> str:
    """The tables as Markdown: best bold, second underlined."""

    def style(text: str, rank: int | None) -> str:
        return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(rank or 0, text) if text else ""

    parts = []
    for table in tables:
        header, *rows = grid(table, style)
        lines = [f"## {table.title}", "", f"| {' | '.join(map(_cell, header))} |"]
        lines.append("|---|" + "---:|" * (len(header) - 1))
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
        parts.append("\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""]))
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def tex(text: str) -> str:
    r"""
    >>> tex("50% & <0.001"), tex("a_b")
    ('50\\% \\& $<$0.001', 'a\\_b')
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def latex(tables: Sequence[Table]) -> str:
    """booktabs tables, best bold and second underlined: one per problem, then all problems side by side."""
    parts = ["% needs \\usepackage{booktabs} and \\usepackage{graphicx}", ""]
    parts += [_latex(table) for table in tables]
    comparable = [
        table for table in tables if table.ranked and any(row.group is not None for row in table.rows)
    ]
    if len(comparable) > 1:
        parts.append(_overview(comparable))
    return "\n".join(parts)


def _latex_style(text: str, rank: int | None) -> str:
    return {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(rank or 0, text) if text else ""


def _latex(table: Table) -> str:
    header, *rows = grid(table, lambda text, rank: _latex_style(tex(text), rank))
    marked = {3 + at for at in _marked_columns(table)}
    body = []
    for row in rows:
        cells = [cell if at in marked else tex(cell) for at, cell in enumerate(row)]
        body.append(" & ".join(cells) + r" \\")
    top = _open(table.title, "l" + "r" * (len(header) - 1))
    return "\n".join([*top, " & ".join(map(tex, header)) + r" \\", r"\midrule", *body, *_close(table.notes)])


def _marked_columns(table: Table) -> list[int]:
    """Where, after method, K and seeds, the cells stand that the style has touched."""
    width = 1 + len(_beside(table, table.metrics[0])) if table.metrics else 1
    return [position * width for position in range(len(table.metrics))]


def _overview(tables: Sequence[Table]) -> str:
    """As the papers print them: a row per method and K, a column per problem and metric."""
    keys = list(dict.fromkeys((row.label, row.clusters) for table in tables for row in table.rows))
    columns = [(table, metric) for table in tables for metric in table.metrics]
    spans = [rf"\multicolumn{{{len(table.metrics)}}}{{c}}{{{tex(table.title)}}}" for table in tables]
    body = []
    for label, clusters in sorted(keys, key=lambda key: key[1] or 0):
        cells = []
        for table, metric in columns:
            row = next((row for row in table.rows if (row.label, row.clusters) == (label, clusters)), None)
            cell = row.cells[metric.name] if row is not None else Cell()
            rank = cell.rank if table.compares else None  # a lone row is not the best of anything
            cells.append(_latex_style(tex(mean_text(cell.mean, cell.std, metric, PLUS_MINUS)), rank))
        body.append(" & ".join(["" if clusters is None else str(clusters), tex(label), *cells]) + r" \\")
    titles = [tex(metric.label) for _, metric in columns]
    top = _open("All problems", "ll" + "r" * len(columns))
    header = ["& & " + " & ".join(spans) + r" \\", "K & method & " + " & ".join(titles) + r" \\"]
    return "\n".join([*top, *header, r"\midrule", *body, *_close(tables[0].notes[:1])])


def _open(title: str, columns: str) -> list[str]:
    return [r"\begin{table}", r"\centering", rf"\caption{{{tex(title)}}}", r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]  # fmt: skip


def _close(notes: Sequence[str]) -> list[str]:
    return [
        r"\bottomrule",
        r"\end{tabular}}",
        r"\par\smallskip\footnotesize " + " ".join(map(tex, notes)),
        r"\end{table}",
        "",
    ]


def as_csv(tables: Sequence[Table]) -> str:
    """One line per row and metric, with every digit; an empty cell is a number that does not exist."""
    names = ["problem", "method", "clusters", "metric", "mean", "std", "seeds", "values", "rank", "p", "published_mean",
             "published_std", "published_in", "difference", "lift", "compared_with", "paired", "paired_low",
             "paired_high", "wins", "losses", *_csv_costs(tables), "note"]  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for table in tables:
        for row in [*table.rows, *table.guesses]:
            for metric in table.metrics:
                writer.writerow(_csv_cells(table, row, metric, _csv_costs(tables)))
    return text.getvalue()


def _csv_costs(tables: Sequence[Table]) -> list[str]:
    """The columns of costs: the same in every file, but for what only runs with transforms have."""
    return [
        name for name in COSTS if name not in WITH_TRANSFORMS or any(name in each.costs() for each in tables)
    ]


def _csv_cells(table: Table, row: TableRow, metric: Column, costs: Sequence[str]) -> list[object]:
    cell = row.cells[metric.name]
    printed = cell.published
    values, paired = row.by_repeat(metric.name), cell.paired
    compared: list[object] = [""] * 6
    if paired is not None:
        compared = [table.compared, paired.mean, paired.low, paired.high, paired.wins, paired.losses]
    shown = [table.title, row.label, row.clusters, metric.label, cell.mean, cell.std,
             " ".join(map(str, values)), " ".join(repr(metric.scale * value) for value in values.values()),
             cell.rank, cell.p, printed and printed.mean, printed and printed.std, printed and printed.where,
             cell.difference, cell.lift, *compared, *(row.costs.get(name) for name in costs), row.note]  # fmt: skip
    text = (0, 1, 3, 12, 15, len(shown) - 1)  # what people may have written; all else are numbers
    return [
        "" if value is None else quoted_cell(str(value)) if at in text else value
        for at, value in enumerate(shown)
    ]
