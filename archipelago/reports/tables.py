"""The tables of a comparison, as numbers: means over seeds, ranks, tests, published values, costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from archipelago.core.citations import CITATIONS
from archipelago.core.errors import UserError
from archipelago.core.registry import nearest
from archipelago.core.vocabulary import Column, Vocabulary, merged
from archipelago.reports.centres import centre_columns, is_of_centres
from archipelago.reports.costs import COSTS, costs
from archipelago.reports.groups import Group, by_block
from archipelago.reports.published import Published, deviations, published_for, rows_of
from archipelago.reports.significance import TESTS, holm, paired_p


@dataclass(frozen=True)
class Cell:
    """One metric of one row, in the units it is shown in; None is a number that does not exist."""

    mean: float | None = None
    std: float | None = None
    rank: int | None = None
    p: float | None = None
    published: Published | None = None

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
    seeds: tuple[int, ...]
    cells: Mapping[str, Cell]
    costs: Mapping[str, float]
    note: str = ""
    group: Group | None = None
    distribution: int | None = (
        None  # of a row about one ground-truth distribution: stands for `*` in a metric's name
    )

    def by_seed(self, name: str) -> dict[int, float]:
        """Seed -> value of one of the table's metrics."""
        if self.group is None:
            return {}
        return self.group.by_seed(
            name if self.distribution is None else name.replace("*", str(self.distribution))
        )


@dataclass(frozen=True)
class Table:
    """All methods on one problem."""

    title: str
    metrics: Sequence[Column]
    rows: Sequence[TableRow]
    notes: Sequence[str] = field(default_factory=tuple)
    tuned: Column | None = (
        None  # the metric on validation data that ranks go by, instead of each column's own
    )
    ranked: bool = True  # rows compete with each other

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
    found = []
    for block, members in by_block(groups).items():
        title = block or "trials that left no run"
        found.append(_table(title, members, test, against, published, metrics))
        if not metrics:
            found += _centres(title, members, published)
    return found


def _row_named(text: str, groups: Sequence[Group]) -> str:
    known = {group.label.lower(): group.label for group in groups}
    known |= {str(group.config.get("method")).lower(): group.label for group in groups if group.config}
    if text.lower() not in known:
        raise UserError(f"Unknown row '{text}' to compare against. {nearest(text.lower(), known)}")
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
    notes = _notes(groups, rows, test, compared)
    if tuned is not None:
        notes[1:1] = _chosen(rows, metrics[0], tuned)
    return Table(title, metrics, rows, notes, tuned)


def _chosen(rows: Sequence[TableRow], shown: Column, tuned: Column) -> list[str]:
    """What tuning came to: the best setting of every method by validation data, and its metric on test data."""
    notes = [
        f"Ranks go by {tuned.label}, in every column: what was tuned is never chosen on test data. A setting with "
        "fewer finished seeds than others has none."
    ]
    best: dict[str, TableRow] = {}
    for row in rows:
        if row.group is not None and row.cells[tuned.name].rank is not None:
            method = row.group.method
            if method not in best or row.cells[tuned.name].rank < best[method].cells[tuned.name].rank:  # type: ignore[operator]  # seen
                best[method] = row
    for row in best.values():
        by, on_test = row.cells[tuned.name], row.cells[shown.name]
        reached = f"{by.mean:.{tuned.digits}f}"
        if on_test.mean is not None and shown.name != tuned.name:
            reached += f"; {shown.label} on test data {on_test.mean:.{shown.digits}f}"
        which = "" if row.clusters is None else f", K = {row.clusters}"
        notes.append(f"Best by validation: {row.label}{which}, {tuned.label} {reached}.")
    return notes


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
    notes = _notes(groups, rows, "t", "")
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
                raise UserError(f"Unknown metric '{name}'. {nearest(name, known)}")
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
    return found + [vocabulary.column(name) for name in extra]


def _row(group: Group, metrics: Sequence[Column], printed: Mapping[str, Published]) -> TableRow:
    cells = {}
    for each in metrics:
        cells[each.name] = replace(_cell(group, each.name, each), published=printed.get(each.name))
    return TableRow(
        group.label, group.clusters, tuple(sorted(group.finished)), cells, costs(group), group.note, group
    )


def _cell(group: Group, name: str, shown: Column) -> Cell:
    average, spread = group.mean(name), group.std(name)
    return Cell(
        None if average is None else shown.scale * average, None if spread is None else shown.scale * spread
    )


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
    whole = max((len(row.seeds) for row in rows), default=0) if tuned is not None else 0
    for each in metrics:
        by = tuned or each
        values = {i: value for i, row in enumerate(rows) if (value := row.cells[by.name].mean) is not None
                  and math.isfinite(value) and len(row.seeds) >= whole
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
    """p-values against one row, corrected over the rows of a column; and against which row."""
    changes: dict[int, dict[str, dict[str, float]]] = {}
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
        base = rows[reference].group.by_seed(each.name)  # type: ignore[union-attr]  # only rows with runs
        found = {}
        for i in with_runs:
            value = None
            if i != reference:
                value = paired_p(rows[i].group.by_seed(each.name), base, test)  # type: ignore[union-attr]
            if value is not None and math.isfinite(value):
                found[str(i)] = value
        for name, value in holm(found).items():
            changes.setdefault(int(name), {})[each.name] = {"p": value}
    made = [_with(row, changes.get(i, {})) for i, row in enumerate(rows)]
    return made, against or "the best row of the column"


def _with(row: TableRow, changes: Mapping[str, Mapping[str, float]]) -> TableRow:
    cells = {name: replace(cell, **changes.get(name, {})) for name, cell in row.cells.items()}  # type: ignore[arg-type]
    return replace(row, cells=cells)


def _engines(rows: Sequence[TableRow]) -> list[str]:
    """A sentence where rows were trained by different engines: they agree to rounding only."""
    by_engine: dict[str, dict[str, None]] = {}
    for row in rows:
        for engine in row.group.engines if row.group is not None else ():
            by_engine.setdefault(engine, {})[row.label] = None
    if len(by_engine) < 2:
        return []
    told = "; ".join(f"{engine}: {', '.join(labels)}" for engine, labels in sorted(by_engine.items()))
    return [f"Rows differ in the engine of local training, whose results agree to rounding only ({told})."]


def _notes(groups: Sequence[Group], rows: Sequence[TableRow], test: str, compared: str) -> list[str]:
    last = {group.settings.get("evaluation.last") for group in groups if group.settings}
    what = f"the last {last.pop()} evaluations" if len(last) == 1 else "the last evaluations"
    notes = [f"Mean ± std over seeds (ddof 0) of the mean of {what} on test data."]
    if any(cell.p is not None for row in rows for cell in row.cells.values()):
        notes.append(f"p: {TESTS[test]}, against {compared}, Holm-corrected over the rows of the column.")
    printed = [cell.published for row in rows for cell in row.cells.values() if cell.published is not None]
    for source in dict.fromkeys(each.source for each in printed):
        tables = ", ".join(sorted({each.table for each in printed if each.source == source}))
        notes.append(
            f"Published: {source}, Table{'s' if ',' in tables else ''} {tables} ({CITATIONS[source].short})."
        )
        other = dict.fromkeys(
            text for group in groups if group.config for text in deviations(group.config, [source])
        )
        if other:
            notes.append(f"Not as published: {', '.join(other)}.")
    if any(row.costs for row in rows):
        notes.append(
            "Costs are per participant and round; computation 1 is one local training, as in FedAvg; megabytes are "
            "those of model values of 4 bytes a parameter."
        )
    notes += _engines(rows)
    for row in rows:
        if row.note and row.group is not None:  # a published row that was not run is seen to be empty
            which = "" if row.clusters is None else f" (K = {row.clusters})"
            notes.append(f"{row.label}{which}: {row.note}.")
    return notes
