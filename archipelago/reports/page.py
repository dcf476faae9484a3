"""The report as one HTML file that holds everything it needs: tables as text, figures as data, plotly as code."""

from __future__ import annotations

import base64
import gzip
import html
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from archipelago.core.dotted import dotted
from archipelago.core.readings import HEADINGS
from archipelago.core.vocabulary import merged
from archipelago.reports import palette
from archipelago.reports.figures import FIGURES, SECTIONS, Figure
from archipelago.reports.figures_results import title_of
from archipelago.reports.groups import Group, by_block, other_code
from archipelago.reports.page_runs import behind, differences, linked, rows_differ_in, shared
from archipelago.reports.summary import computed_on
from archipelago.reports.table_text import fold_of, folds, grid, mean_text
from archipelago.reports.tables import Table
from archipelago.runs.files import RunFiles

_EVENTS = 40  # shown of one run
_SENTENCES = 2  # about devices, at the top; all are in the set-up
_ON_A_PHONE = 2  # metrics of a table that stand side by side there
_SHIFTS = ("rotations", "label_swaps", "colours", "noises")


def page(
    title: str,
    groups: Sequence[Group],
    tables: Sequence[Table],
    figures: Sequence[Figure],
    notes: Sequence[str],
    folder: Path,
) -> str:
    """The whole file; `folder` is where it will be, so that it can link to the runs."""
    here = Path(__file__).parent
    names = {id(group): _name(group, groups) for group in groups}
    runs = behind(groups, tables, names, folder)
    sections = [_tables(tables, groups), *_figure_sections(figures), runs, _setup(groups, notes, names)]
    links = [("tables", "Tables"), *((name, words) for name, words in SECTIONS.items()
             if any(figure.section == name for figure in figures)), *([("runs", "Runs")] if runs else []),
             ("setup", "Set-up")]  # fmt: skip
    nav = "".join(f'<a href="#{name}">{words}</a>' for name, words in links)
    return "\n".join([
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Nothing may be loaded from anywhere, whatever the code below would like.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src \'unsafe-inline\'; '
        "style-src 'unsafe-inline'; img-src data: blob:; connect-src 'none'\">",
        f"<title>{_text(title)}</title>",
        f"<style>{(here / 'page.css').read_text(encoding='utf-8')}</style></head><body>",
        f"<header><h1>{_text(title)}</h1><p>{_text(_lead(groups))}</p>",
        *(f'<p class="computed">{_text(sentence)}</p>' for sentence in _computed_on(groups)[:_SENTENCES]),
        f"{_tiles(groups, tables)}</header>",
        f'<nav><div>{nav}<button id="theme" type="button" aria-label="Light or dark">◐ theme</button></div></nav>',
        '<main><div id="problem" role="alert"></div>',
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>",
        *sections,
        "</main><footer>Built by Archipelago from run directories alone. Hover for values; click a name in a legend to "
        "hide it.</footer>",
        f'<script type="application/octet-stream" id="figures">{_packed(_figure_data(figures))}</script>',
        f'<script type="application/octet-stream" id="library">{_library()}</script>',
        f'<script type="application/json" id="colors">{json.dumps(palette.for_page())}</script>',
        f"<script>{(here / 'page.js').read_text(encoding='utf-8')}</script>",
        f"<script>{(here / 'page_tools.js').read_text(encoding='utf-8')}</script>",
        "</body></html>",
    ])  # fmt: skip


def figures_in(text: str) -> list[dict[str, Any]]:
    """The figures that a page holds, as data: the way back, for whoever wants the numbers."""
    start = text.index('id="figures">') + len('id="figures">')
    packed = text[start : text.index("</script>", start)]
    found: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


def _text(value: object) -> str:
    return html.escape(str(value))


def _packed(data: bytes) -> str:
    # mtime=0: equal runs give equal files
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _figure_data(figures: Sequence[Figure]) -> bytes:
    entries = [{**vars(figure), "name": figure.name} for figure in figures]
    return json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()


@cache
def _library() -> str:
    """plotly.js, as the Python package of that name carries it; found without importing the package."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None and spec.origin is not None, "plotly is a dependency"
    return _packed((Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes())


# Words ------------------------------------------------------------------------------------------------------


def _lead(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    if not runs:
        return "No run has begun."
    methods = list(dict.fromkeys(group.label for group in groups))
    words = merged(group.vocabulary for group in groups)
    data = list(dict.fromkeys(words.data_label(run.config) for run in runs))
    clients = sorted({run.setting("clients") for run in runs if run.setting("clients") is not None})
    shown = ", ".join(methods[:6]) + (f" and {len(methods) - 6} more" if len(methods) > 6 else "")
    many = "–".join(map(str, dict.fromkeys([clients[0], clients[-1]]))) if clients else "?"
    return f"{shown} on {', '.join(data)}{_shifted(runs)}, {many} clients."


def _shifted(runs: Sequence[RunFiles]) -> str:
    """What makes groups of clients different, where all runs have the same of it."""
    found = {
        tuple(
            (name, run.setting(f"data.{name}")) for name in _SHIFTS if (run.setting(f"data.{name}") or 1) > 1
        )
        for run in runs
    }
    if len(found) != 1:
        return ""
    return "".join(f" with {count} {name.replace('_', ' ')}" for name, count in found.pop())


def _name(group: Group, groups: Sequence[Group]) -> str:
    """A group as a heading: with its problem where there are several."""
    return title_of(group) if len(by_block(groups)) == 1 else f"{title_of(group)} on {group.block}"


def _tiles(groups: Sequence[Group], tables: Sequence[Table]) -> str:
    runs = [run for group in groups for run in group.runs]
    finished = sum(run.status.state == "finished" for run in runs)
    lost = sum(len(group.missing) for group in groups)
    rounds = sorted({run.status.rounds_done for run in runs})
    tiles = [(f"{finished} of {len(runs) + lost}", "runs finished")]
    if rounds:
        tiles.append(("–".join(map(str, dict.fromkeys([rounds[0], rounds[-1]]))), "rounds"))
    seeds = sorted({repeat for group in groups for repeat in group.finished})
    if seeds:
        tiles.append(
            (str(len(seeds)), f"seed{'s' if len(seeds) != 1 else ''}: {', '.join(map(str, seeds[:6]))}")
        )
    for table in [table for table in tables if table.ranked][:2]:
        for metric in table.metrics[:1]:
            best = next((row for row in table.rows if row.cells[metric.name].rank == 1), None)
            if best is not None:
                cell = best.cells[metric.name]
                value = mean_text(cell.mean, cell.std, metric)
                where = f" on {table.title}" if sum(each.ranked for each in tables) > 1 else ""
                chosen = "best" if table.tuned is None else "chosen on validation data, its test"
                tiles.append((value, f"{chosen} {metric.label}: {best.label}{where}"))
    seconds = [row["total"] for run in runs for row in run.timings if "total" in row]
    if seconds:
        tiles.append((_duration(sum(seconds)), "of rounds, all runs together"))
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{_text(value)}</b><span>{_text(words)}</span></div>' for value, words in tiles
    ) + "</div>"  # fmt: skip


def _duration(seconds: float) -> str:
    """
    >>> _duration(42.0), _duration(600.0), _duration(36000.0)
    ('42 s', '10 min', '10.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _tables(tables: Sequence[Table], groups: Sequence[Group]) -> str:
    parts = ['<section id="tables"><h2>Tables</h2><div class="cards">']
    for table in tables:
        header, kinds = grid(table)[0], _folded(table)
        labels = {metric.label for metric in table.metrics}
        body = []
        lines = grid(table, lambda text, rank: f"{rank or 0}|{text}")[1:]
        for row, line in zip([*table.rows, *table.guesses], lines, strict=True):
            cells = []
            guess = ' class="guess"' if any(row is each for each in table.guesses) else ""
            for name, kind, cell in zip(header, kinds, line, strict=True):
                if name in labels:
                    rank, _, text = cell.partition("|")
                    mark = {"1": "main first", "2": "main second"}.get(rank, "main")
                    cells.append(f'<td class="{f"{mark} {kind}".strip()}">{linked(text, row, groups)}</td>')
                elif name == "method":  # a narrow screen may break one before an add-on, and nowhere else
                    cells.append(f"<td{_kind(kind)}>{_text(cell).replace('+', '<wbr>+')}</td>")
                else:  # what a paper printed has no run here
                    shown = _text(cell) if name == "published" else linked(cell, row, groups)
                    cells.append(f"<td{_kind(kind)}>{shown}</td>")
            body.append(f"<tr{guess}>{''.join(cells)}</tr>")
        heads = "".join(
            f"<th{_kind(kind)}>{_text(name)}</th>" for name, kind in zip(header, kinds, strict=True)
        )
        tools = '<input type="search" placeholder="Filter rows" aria-label="Filter rows">'
        for kind in ("details", "costs"):
            # On a phone more is among the details than elsewhere, where there may be none.
            narrow = "" if kind in kinds else ' class="narrow"' if kind == "details" else None
            if narrow is not None:
                tools += f'<button type="button" data-fold="{kind}"{narrow} aria-expanded="false">Show {kind}</button>'
        notes = "".join(f"<li{_kind(fold_of(note))}>{_text(note)}</li>" for note in table.notes)
        parts.append(
            f'<div class="card wide"><h3>{_text(table.title)}</h3>{rows_differ_in(table)}'
            f'<div class="tools" hidden>{tools}</div><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
            f'<tbody>{"".join(body)}</tbody></table></div><ul class="notes">{notes}</ul></div>'
        )
    return "".join([*parts, "</div></section>"])


def _folded(table: Table) -> list[str]:
    """For each column where it is shown, as `folds` says; on a phone ("beside") only methods and two metrics are."""
    labels = [metric.label for metric in table.metrics[:_ON_A_PHONE]]
    return [
        kind or ("" if name in ("method", *labels) else "beside")
        for name, kind in zip(grid(table)[0], folds(table), strict=True)
    ]


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _figure_sections(figures: Sequence[Figure]) -> Iterable[str]:
    for section, words in SECTIONS.items():
        families: dict[str, Figure] = {}
        for figure in figures:
            if figure.section == section:
                families.setdefault(figure.family, figure)
        families = {name: families[name] for name in [*FIGURES.families(), *families] if name in families}
        if not families:
            continue
        cards = "".join(
            f'<div class="card{" wide" if family in FIGURES.wide() else ""}" data-family="{_text(family)}">'
            f'<h3>{_text(figure.title)}</h3><p class="about">{_text(figure.caption)}</p>'
            '<div class="choices"></div><div class="plot waiting"></div><div class="chips"></div></div>'
            for family, figure in families.items()
        )
        yield f'<section id="{section}"><h2>{words}</h2><div class="cards">{cards}</div></section>'


# Set-up -----------------------------------------------------------------------------------------------------


def _setup(groups: Sequence[Group], notes: Sequence[str], names: Mapping[int, str]) -> str:
    parts = [
        '<section id="setup"><h2>Set-up, cost and warnings</h2><div class="cards"><div class="card wide">'
    ]
    parts += [
        f"<p>{_text(note)}</p>"
        for note in [*notes, *_computed_on(groups), *map(_as_sentence, other_code(groups))]
    ]
    parts.append(differences(groups, names))
    same = shared([dotted(run.config, keep_empty=True) for group in groups for run in group.runs])
    if same:
        parts.append(_block("Settings that all runs share", same, is_open=len(groups) == 1))
    own = [
        (names[id(group)], {key: value for key, value in group.settings.items() if same.get(key, object()) != value})
        for group in groups if group.settings
    ]  # fmt: skip
    if len(own) > 1:
        inner = "".join(_block(title, content) for title, content in own)
        parts.append(f"<details><summary>Settings of each of {len(own)} groups</summary>{inner}</details>")
    if others := {name: label for group in groups for name, label in group.vocabulary.others.items()}:
        parts.append(_block("Parts that are not the platform's own, as their authors call them", others))
    parts += _readings(groups)
    parts.append(_block("Identity of each run", _identities(groups, names)))
    environments = _environments(groups)
    parts += [_block(f"Environment{words}", content) for words, content in environments]
    parts.append(_events(groups))
    return "".join([*parts, "</div></div></section>"])


def _readings(groups: Sequence[Group]) -> Iterable[str]:
    """How the papers of the methods were read, as the runs wrote it down."""
    words = merged(group.vocabulary for group in groups)
    heads = "".join(f"<th>{_text(name)}</th>" for name in HEADINGS.values())
    for name, rows in words.readings.items():
        body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row.row())}</tr>" for row in rows)
        title = f"Readings of {words.methods.get(name, name)}: where paper and code are silent or differ"
        yield (
            f'<details class="readings"><summary>{_text(title)}</summary><div class="scroll"><table><thead><tr>{heads}'
            f"</tr></thead><tbody>{body}</tbody></table></div></details>"
        )


def _environments(groups: Sequence[Group]) -> list[tuple[str, dict[str, Any]]]:
    """What runs ran on, each kind of machine and packages once; when and by which command is left to the runs."""
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for group in groups:
        for run in group.runs:
            content = {
                key: value
                for key, value in dotted(run.environment, keep_empty=True).items()
                if key not in ("started", "command") and not key.startswith("compute.")
            }
            key = json.dumps(content, sort_keys=True, default=str)
            found[key] = (content, found.get(key, ({}, 0))[1] + 1)
    if len(found) == 1:
        (only,) = found.values()
        return [("", only[0])]
    return [(f" of {count} runs", content) for content, count in found.values()]


def _as_sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _identities(groups: Sequence[Group], names: Mapping[int, str]) -> dict[str, Any]:
    """The hash of settings, partition and format that each run was made with, and the digests of its own code."""
    found = {}
    for group in groups:
        for run in group.runs:
            code = ", ".join(f"{name} {digest}" for name, digest in run.code.items())
            found[f"{names[id(group)]} | {run.path.name}"] = (run.identity or "(none)") + (
                code and f"; {code}"
            )
    return found


def _computed_on(groups: Sequence[Group]) -> list[str]:
    """Devices, engine, precision and determinism: each kind once, with how many runs had it."""
    found: dict[str, int] = {}
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        for sentence in computed_on(run):
            found[sentence] = found.get(sentence, 0) + 1
    return [
        sentence if count == len(runs) else f"{sentence} ({count} of {len(runs)} runs)"
        for sentence, count in found.items()
    ]


def _block(title: str, content: Mapping[str, Any], *, is_open: bool = False) -> str:
    rows = "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in content.items())
    return f"<details{' open' if is_open else ''}><summary>{_text(title)}</summary><dl>{rows}</dl></details>"


def _events(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        for run in group.runs:
            if not run.events:
                continue
            shown = run.events[:_EVENTS]
            items = "".join(f"<li><b>round {_text(e['round'])}</b> {_text(e['text'])}</li>" for e in shown)
            if len(shown) < len(run.events):
                items += f"<li>and {len(run.events) - len(shown)} more, in events.jsonl</li>"
            title = f"{title_of(group)}, seed {run.setting('seed')}: {len(run.events)} events"
            parts.append(
                f'<details><summary>{_text(title)}</summary><ul class="events">{items}</ul></details>'
            )
    return "".join(parts) or "<p>Nothing out of the ordinary happened in any run.</p>"
