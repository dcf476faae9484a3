"""The parts of the page about single runs: what differs between rows, and the run behind each number."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archipelago.reports.groups import Group, varying
from archipelago.reports.names import value_text
from archipelago.reports.repeats import repeat_of
from archipelago.reports.tables import Table, TableRow
from archipelago.runs.files import RunFiles

_FIRST = ("method", "ensemble", "clusters")  # in this order before all others
_COLUMNS = 12  # of settings beside each other; more are a list


def shared(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of them have, with the same value.

    >>> shared([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    {'a': 1}
    """
    if not settings:
        return {}
    first, *others = settings
    return {
        key: value
        for key, value in first.items()
        if all(other.get(key, object()) == value for other in others)
    }


def differing(groups: Sequence[Group]) -> list[str]:
    """The settings that do not have one value in all rows that have them, those that everybody asks for first."""
    keys = varying([group.settings for group in groups])
    return sorted(keys, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))


def differences(groups: Sequence[Group], names: Mapping[int, str]) -> str:
    """A table of the settings that differ, one row a group; nothing where nothing differs."""
    keys = differing(groups)
    rows = [group for group in groups if group.settings]
    if not keys or len(rows) < 2:
        return ""
    words = f"Settings that differ between rows: {', '.join(keys[:_COLUMNS])}"
    if len(keys) > _COLUMNS:
        words += f" and {len(keys) - _COLUMNS} more"
    lines = [[_text(names[id(group)]), *(_value(group, key) for key in keys[:_COLUMNS])] for group in rows]
    table = _table(["row", *keys[:_COLUMNS]], lines)
    return f'<details open class="differences"><summary>{_text(words)}</summary>{table}</details>'


def _value(group: Group, key: str) -> str:
    return _text(value_text(group.vocabulary.value(group.settings[key]))) if key in group.settings else ""


def rows_differ_in(table: Table) -> str:
    """Above a table: in what its rows differ, apart from their names."""
    groups = list({id(row.group): row.group for row in table.rows if row.group is not None}.values())
    keys = differing(groups)
    shown = ", ".join(f"<code>{_text(key)}</code>" for key in keys[:_COLUMNS])
    return f'<p class="about">Rows differ in {shown}.</p>' if shown else ""


# The run behind a number ------------------------------------------------------------------------------------


def anchor(group: Group, groups: Sequence[Group]) -> str:
    """Where the page lists the runs of a group."""
    return f"runs-{next(at for at, each in enumerate(groups) if each is group)}"


def linked(text: str, row: TableRow, groups: Sequence[Group]) -> str:
    """A number of a table, as a link to the runs that it is the mean of."""
    listed = any(each is row.group for each in groups)
    if row.group is None or not listed or not row.group.counted or not text:
        return _text(text)
    return f'<a href="#{anchor(row.group, groups)}">{_text(text)}</a>'


def behind(groups: Sequence[Group], tables: Sequence[Table], names: Mapping[int, str], folder: Path) -> str:
    """Every run: its seed, what it came to, and its files, by addresses relative to the page."""
    parts = []
    for group in groups:
        if group.runs:
            count = f"{len(group.runs)} run{'s' if len(group.runs) != 1 else ''}"
            title = f"<summary>{_text(names[id(group)])}: {count}</summary>"
            parts.append(
                f'<details id="{anchor(group, groups)}">{title}{_runs_of(group, tables, folder)}</details>'
            )
    if not parts:
        return ""
    about = (
        "Each number of a table leads here. Links work where the runs lie as they did when the page was made."
    )
    return (
        f'<section id="runs"><h2>The runs behind the numbers</h2><div class="cards"><div class="card wide">'
        f'<p class="about">{about}</p>{"".join(parts)}</div></div></section>'
    )


def _runs_of(group: Group, tables: Sequence[Table], folder: Path) -> str:
    """The runs of one group as a table."""
    table = next((t for t in tables if t.ranked and any(row.group is group for row in t.rows)), None)
    metrics = list(table.metrics) if table is not None else []
    lines = []
    for run in group.runs:
        seed = repeat_of(run)
        final = group.finished[seed]["final"] if run in group.counted else {}
        values = [(metric, final.get(metric.name)) for metric in metrics]
        shown = [
            f"{metric.scale * value:.{metric.digits}f}" if isinstance(value, int | float) else ""
            for metric, value in values
        ]
        state = (
            [] if all(each.status.state == "finished" for each in group.runs) else [_text(run.status.state)]
        )
        lines.append([_text(seed), *shown, *state, _files(run, folder)])
    states = ["state"] if lines and len(lines[0]) > len(metrics) + 2 else []
    return _table(["seed", *(metric.label for metric in metrics), *states, "files"], lines)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A plain table; cells are HTML already."""
    heads = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _files(run: RunFiles, folder: Path) -> str:
    """Links to what a reader may want of a run, those that are there."""
    try:
        base = Path(os.path.relpath(run.path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # another drive
        return _text(run.path)
    named = {
        "report/report.html": "report",
        "summary.md": "summary",
        "metrics.csv": "metrics",
        "config.yaml": "config",
    }
    own = run.path.resolve() == folder.resolve().parent  # its own report is this page
    there = [
        name for name in named if (run.path / name).exists() and not (own and name.startswith("report/"))
    ]
    return " ".join(f'<a href="{_text(f"{base}/{name}")}">{named[name]}</a>' for name in there)


def _text(value: object) -> str:
    return html.escape(str(value))
