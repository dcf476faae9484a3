"""The tables of a comparison, as numbers: means over seeds, ranks, tests, published values, costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.registry import closest, nearest
from archipelago.core.vocabulary import Column, Vocabulary, merged
from archipelago.reports.centres import centre_columns, is_of_centres
from archipelago.reports.chosen import chosen_across, chosen_notes
from archipelago.reports.costs import COSTS, costs
from archipelago.reports.groups import Group, by_block
from archipelago.reports.guessing import GUESSES
from archipelago.reports.published import Published, published_for, rows_of
from archipelago.reports.repeats import Repeat, matched, mean, std, units
from archipelago.reports.significance import Paired, holm, paired_difference, paired_p
from archipelago.reports.table_notes import notes_of


@dataclass(frozen=True)
class Cell:
    """One metric of one row, in the units it is shown in; None is a number that does not exist."""

    mean: float | None = None
    std: float | None = None
    rank: int | None = None
    p: float | None = None
    published: Published | None = None
    lift: float | None = None  # above always guessing the client's most frequent class
    paired: Paired | None = None  # to the row that others are compared with

    @property
    def difference(self) -> float | None:
        """Ours minus the published one."""
        if self.mean is None or self.published is None:
            return None
        return self.mean - self.published.mean


@dataclass(frozen=True)
class TableRow:
    """One group, or a published row that was not run (`group` is None)."""

    label: str
    clusters: int | None
    repeats: tuple[Repeat, ...]
    cells: Mapping[str, Cell]
    costs: Mapping[str, float]
    note: str = ""
    group: Group | None = None
    distribution: int | None = (
        None  # of a row about one ground-truth distribution: stands for `*` in a metric's name
    )

    def by_repeat(self, name: str) -> dict[Repeat, float]:
        """The values of one of the table's metrics."""
        if self.group is None:
            return {}
        return self.group.by_repeat(
            name if self.distribution is None else name.replace("*", str(self.distribution))
        )


@dataclass(frozen=True)
class Table:
    """All methods on one problem."""

    title: str
    metrics: Sequence[Column]
    rows: Sequence[TableRow]
    notes: list[str] = field(default_factory=list)
    tuned: Column | None = (
        None  # the metric on validation data that ranks go by, instead of each column's own
    )
    ranked: bool = True  # rows compete with each other
    guesses: Sequence[TableRow] = ()  # what guessing is worth, which competes with nobody
    compared: str = ""  # the row that others are compared with

    @property
    def has_published(self) -> bool:
        """Whether any row has a printed number beside it."""
        return any(cell.published is not None for row in self.rows for cell in row.cells.values())

    @property
    def compares(self) -> bool:
        """Whether two rows have numbers, so that ranks mean something."""
        with_numbers = sum(any(cell.mean is not None for cell in row.cells.values()) for row in self.rows)
        return self.ranked and with_numbers > 1

    @property
    def tests(self) -> bool:
        """Whether any difference could be tested."""
        return any(cell.p is not None for row in self.rows for cell in row.cells.values())

    @property
    def lifts(self) -> bool:
        """Whether it is known what guessing is worth."""
        return any(cell.lift is not None for row in self.rows for cell in row.cells.values())

    @property
    def pairs(self) -> bool:
        """Whether any two rows share two partitions or starts."""
        return any(cell.paired is not None for row in self.rows for cell in row.cells.values())

    def costs(self) -> list[str]:
        """The cost columns that any row has."""
        return [name for name in COSTS if any(name in row.costs for row in self.rows)]


def build_tables(
    groups: Sequence[Group],
    *,
    test: str = "t",
    against: str | None = None,
    published: tuple[str, str] | None = None,
    metrics: Sequence[str] = (),
) -> list[Table]:
    """One table for each problem among the groups.

    `against` is the label of the row that the others are tested against (default: the best of each metric);
    `published` a table of a paper, whose rows are all listed, those that were not run with empty cells.
    """
    if against is not None:
        against = _row_named(against, groups)
    found, competing = [], []
    for block, members in by_block(groups).items():
        title = block or "trials that left no run"
        competing.append(_table(title, members, test, against, published, metrics))
        found.append(competing[-1])
        if not metrics:
            found += _centres(title, members, published)
    if (chosen := chosen_across(competing)) is not None:
        competing[-1].notes.insert(1, chosen)
    return found


def _row_named(text: str, groups: Sequence[Group]) -> str:
    known = {group.label.lower(): group.label for group in groups}
    known |= {str(group.config.get("method")).lower(): group.label for group in groups if group.config}
    if text.lower() not in known:
        raise UserError(
            f"Unknown row '{text}' to compare against. {nearest(text.lower(), known)}",
            code="unknown-name", kind="row", name=text, nearest=closest(text.lower(), known),
        )  # fmt: skip
    return known[text.lower()]


def _table(
    title: str,
    groups: Sequence[Group],
    test: str,
    against: str | None,
    table: tuple[str, str] | None,
    wanted: Sequence[str],
) -> Table:
    printed = {
        id(group): published_for(group.config, group.clusters, table) for group in groups if group.config
    }
    metrics = _metrics(groups, printed, wanted)
    tuned = next((by for group in groups if (by := group.tuned) is not None), None)
    if tuned is not None:
        metrics = [*(each for each in metrics if each.name != tuned.name), tuned]
    rows = [_row(group, metrics, printed.get(id(group), {})) for group in groups]
    if table is not None:
        rows += _not_run(groups, table, metrics, rows)
    rows = _ranked(rows, metrics, tuned)
    rows, compared = _tested(rows, metrics, test, against)
    notes = notes_of(groups, rows, test, compared)
    if tuned is not None:
        notes[1:1] = chosen_notes(rows, metrics[0], tuned)
    return Table(
        title, metrics, rows, notes, tuned, guesses=_guesses(groups, metrics), compared=against or "best"
    )


def _guesses(groups: Sequence[Group], metrics: Sequence[Column]) -> list[TableRow]:
    """A row for each way of guessing, over all partitions of the table."""
    found: dict[Repeat, dict[str, dict[str, float]]] = {}
    for group in groups:
        found = {**group.guessed, **found}
    rows = []
    for kind, label in GUESSES.items():
        cells = {}
        for each in metrics:
            values = {
                key: guessed[kind][each.name]
                for key, guessed in found.items()
                if each.name in guessed.get(kind, {})
            }
            known = [each.scale * value for value in units(values).values()]
            cells[each.name] = Cell(mean(known), std(known) if len(known) > 1 else None) if known else Cell()
        if any(cell.mean is not None for cell in cells.values()):
            rows.append(TableRow(label, None, tuple(sorted(found)), cells, {}))
    return rows


def _centres(title: str, groups: Sequence[Group], table: tuple[str, str] | None) -> list[Table]:
    """Every cluster model on every ground-truth distribution, as FedSoft prints it: a row per distribution."""
    rows: list[TableRow] = []
    metrics: dict[str, Column] = {}
    for group in groups:
        known = dict.fromkeys(name for run in group.finished.values() for name in run["final"])
        for name in centre_columns((key.partition("[")[0] for key in known), group.vocabulary):
            count = sum(key.startswith(f"{name}[") for key in known)
            columns = [centre_column(name, served, group.vocabulary) for served in range(math.isqrt(count))]
            printed = published_for(group.config, group.clusters, table) if columns else {}
            metrics |= {each.name: each for each in columns}
            for d in range(len(columns)):
                cells = {}
                for each in columns:
                    own = each.name.replace("*", str(d))
                    cell = _cell(group, own, each)
                    cells[each.name] = replace(cell, published=printed.get(own))
                label = f"{group.label} on distribution {d}"
                rows.append(
                    TableRow(label, group.clusters, tuple(sorted(group.finished)), cells, {}, "", group, d)
                )
    if not rows:
        return []
    rows = [replace(row, cells={name: row.cells.get(name, Cell()) for name in metrics}) for row in rows]
    notes = notes_of(groups, rows, "t", "")
    notes.insert(1, "A row is a ground-truth distribution, a column the cluster model that serves one of them: models "
                    "are matched with distributions so that together they serve all of them best.")  # fmt: skip
    return [
        Table(
            f"{title}: cluster models on ground-truth distributions",
            [*metrics.values()],
            rows,
            notes,
            ranked=False,
        )
    ]


def centre_column(name: str, served: int, vocabulary: Vocabulary) -> Column:
    """The column of the cluster model that serves one distribution."""
    plain = vocabulary.column(name.replace("centre", "micro"))
    return replace(plain, name=f"{name}[*,{served}]", label=f"model for {served}: {plain.label}")


def _metrics(
    groups: Sequence[Group], printed: Mapping[int, Mapping[str, Published]], wanted: Sequence[str]
) -> list[Column]:
    vocabulary = merged(group.vocabulary for group in groups)
    known = list(
        dict.fromkeys(name for group in groups for run in group.finished.values() for name in run["final"])
    )
    if wanted:
        for name in wanted:
            if known and name not in known:
                raise UserError(
                    f"Unknown metric '{name}'. {nearest(name, known)}",
                    code="unknown-name", kind="metric", name=name, nearest=closest(name, known),
                )  # fmt: skip
        return [vocabulary.column(name) for name in wanted]
    found = vocabulary.headline(known) or [
        vocabulary.column(f"micro_{spec.name}")
        for spec in vocabulary.shown("table")
        if "classes" in spec.tasks
    ]
    have = {each.name for each in found}
    extra = dict.fromkeys(
        name
        for each in printed.values()
        for name in each
        if name in known and name not in have and not is_of_centres(name)  # these have a table of their own
    )
    apart = [spec.name for spec in vocabulary.shown("table", over="clusters")]  # where there are clusters
    # Of clients without attackers, after local training; with noise; where data changed.
    apart += [f"{whose}_{each.name}" for whose in ("honest", "personal") for each in found]
    apart += ["epsilon", "recovery_time", *(f"recovery_time_{name}" for name in vocabulary.metrics)]
    return found + [vocabulary.column(name) for name in [*extra, *apart] if name in known]


def _row(group: Group, metrics: Sequence[Column], printed: Mapping[str, Published]) -> TableRow:
    cells = {}
    for each in metrics:
        cells[each.name] = replace(_cell(group, each.name, each), published=printed.get(each.name))
    return TableRow(
        group.label, group.clusters, tuple(sorted(group.finished)), cells, costs(group), group.note, group
    )


def _cell(group: Group, name: str, shown: Column) -> Cell:
    average, spread, above = (
        None if value is None else shown.scale * value
        for value in (group.mean(name), group.std(name), group.lift(name))
    )
    return Cell(average, spread, lift=above)


def _not_run(
    groups: Sequence[Group], table: tuple[str, str], metrics: Sequence[Column], rows: Sequence[TableRow]
) -> list[TableRow]:
    """The printed rows of this problem that no group stands for."""
    there = [cell.published for row in rows for cell in row.cells.values() if cell.published is not None]
    if not there:
        return []
    block = (there[0].dataset, there[0].partition)
    have = {(each.method, each.clusters) for each in there}
    missing: dict[tuple[str, int | None], dict[str, Cell]] = {}
    for each in rows_of(table, block):
        if (each.method, each.clusters) not in have and each.metric in {metric.name for metric in metrics}:
            missing.setdefault((each.method, each.clusters), {})[each.metric] = Cell(published=each)
    return [
        TableRow(method, clusters, (), {m.name: cells.get(m.name, Cell()) for m in metrics}, {}, "not run")
        for (method, clusters), cells in missing.items()
    ]


def _ranked(
    rows: Sequence[TableRow], metrics: Sequence[Column], tuned: Column | None = None
) -> list[TableRow]:
    """Rank 1 is the best mean, of the tuned metric in every column if there is one; equal means share a rank."""
    ranks: list[dict[str, int]] = [{} for _ in rows]
    # A setting of which a scheduler stopped the worse seeds must not win by the others.
    whole = max((len(row.repeats) for row in rows), default=0) if tuned is not None else 0
    for each in metrics:
        by = tuned or each
        values = {i: value for i, row in enumerate(rows) if (value := row.cells[by.name].mean) is not None
                  and math.isfinite(value) and len(row.repeats) >= whole
                  and not (row.group is not None and row.group.has_no_rank)}  # fmt: skip
        for i, value in values.items():
            better = (other > value if by.higher_is_better else other < value for other in values.values())
            ranks[i][each.name] = 1 + sum(better)
    return [
        _with(row, {name: {"rank": rank} for name, rank in found.items()})
        for row, found in zip(rows, ranks, strict=True)
    ]


def _tested(
    rows: Sequence[TableRow], metrics: Sequence[Column], test: str, against: str | None
) -> tuple[list[TableRow], str]:
    """Differences to one row and their p-values, corrected over the rows of a column; and which row that is."""
    changes: dict[int, dict[str, dict[str, Any]]] = {}
    for each in metrics:
        with_runs = [
            i for i, row in enumerate(rows) if row.group is not None and row.cells[each.name].rank is not None
        ]
        if against is None:
            reference = next((i for i in with_runs if rows[i].cells[each.name].rank == 1), None)
        else:
            reference = next((i for i in with_runs if rows[i].label == against), None)
        if reference is None:
            continue
        base = rows[reference].by_repeat(each.name)
        found = {}
        for i in with_runs:
            if i == reference:
                continue
            own, other = matched(rows[i].by_repeat(each.name), base)
            value = paired_p(own, other, test)
            if value is not None and math.isfinite(value):
                found[str(i)] = value
            scaled = ({key: each.scale * value for key, value in values.items()} for values in (own, other))
            paired = paired_difference(*scaled, higher_is_better=each.higher_is_better)
            changes.setdefault(i, {})[each.name] = {"paired": paired}
        for name, value in holm(found).items():
            changes[int(name)][each.name]["p"] = value
    made = [_with(row, changes.get(i, {})) for i, row in enumerate(rows)]
    return made, against or "the best row of the column"


def _with(row: TableRow, changes: Mapping[str, Mapping[str, Any]]) -> TableRow:
    cells = {name: replace(cell, **changes.get(name, {})) for name, cell in row.cells.items()}
    return replace(row, cells=cells)
