"""Tables as text: for a terminal, as Markdown, as LaTeX and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from typing import TextIO

from archipelago.core.vocabulary import Column
from archipelago.reports.costs import COSTS
from archipelago.reports.tables import Cell, Table, TableRow

PLUS_MINUS = "±"
Style = Callable[[str, int | None], str]  # (text, rank) -> text


def _plain(text: str, rank: int | None) -> str:
    return text


def grid(table: Table, style: Style = _plain, plus_minus: str = f" {PLUS_MINUS} ") -> list[list[str]]:
    """The header and the rows of a table as text; a cell that does not exist is empty."""
    header = ["method", "K", "seeds"]
    for each in table.metrics:
        header += [each.label, *(title for title, _ in _beside(table, each))]
    header += [COSTS[name] for name in table.costs()]
    return [header, *(_line(table, row, style, plus_minus) for row in table.rows)]


def _line(table: Table, row: TableRow, style: Style, plus_minus: str) -> list[str]:
    cells = [
        row.label,
        "" if row.clusters is None else str(row.clusters),
        str(len(row.seeds)) if row.seeds else "",
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

    if table.has_published:
        columns += [("published", published), ("difference", difference)]
    if table.compares:
        columns.append(("rank", lambda cell: "" if cell.rank is None else str(cell.rank)))
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


def print_tables(tables: Sequence[Table], stream: TextIO) -> None:
    """Tables with lines and colours on a terminal, aligned plain text elsewhere."""
    fancy = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    for table in tables:
        if fancy:
            _print_drawn(table, stream)
        else:
            lines = grid(table)
            widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
            print(table.title, file=stream)
            for line in lines:
                rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
                print("  ".join(["", line[0].ljust(widths[0]), *rest]).rstrip(), file=stream)
        for note in table.notes:
            print(f"  {note}", file=stream)
        print(file=stream)


def _print_drawn(table: Table, stream: TextIO) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawn

    def style(text: str, rank: int | None) -> str:
        return {1: f"[bold green]{text}[/]", 2: f"[underline]{text}[/]"}.get(rank or 0, text) if text else ""

    drawn = Drawn(title=escape(table.title), title_justify="left", title_style="bold")
    header, *rows = grid(table, style)
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
             "published_std", "published_in", "difference", *COSTS, "note"]  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for table in tables:
        for row in table.rows:
            for metric in table.metrics:
                writer.writerow(_csv_cells(table, row, metric))
    return text.getvalue()


def _csv_cells(table: Table, row: TableRow, metric: Column) -> list[object]:
    cell = row.cells[metric.name]
    printed = cell.published
    values = row.by_seed(metric.name)
    shown = [table.title, row.label, row.clusters, metric.label, cell.mean, cell.std,
             " ".join(map(str, values)), " ".join(repr(metric.scale * value) for value in values.values()),
             cell.rank, cell.p, printed and printed.mean, printed and printed.std, printed and printed.where,
             cell.difference, *(row.costs.get(name) for name in COSTS), row.note]  # fmt: skip
    return ["" if value is None else value for value in shown]
