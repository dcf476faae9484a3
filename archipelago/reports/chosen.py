"""What was chosen on validation data, and what that is worth on test data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from archipelago.core.vocabulary import Column
from archipelago.reports.repeats import matched, mean
from archipelago.reports.significance import paired_difference

if TYPE_CHECKING:
    from archipelago.reports.tables import Table, TableRow


def chosen_notes(rows: Sequence[TableRow], shown: Column, tuned: Column) -> list[str]:
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
    if (found := _runner_up(rows, shown, tuned)) is not None:
        notes.append(found)
    for row in best.values() if len(best) < len(rows) else ():  # else the table itself says as much
        by, on_test = row.cells[tuned.name], row.cells[shown.name]
        reached = f"{by.mean:.{tuned.digits}f}"
        if on_test.mean is not None and shown.name != tuned.name:
            reached += f"; {shown.label} on test data {on_test.mean:.{shown.digits}f}"
        which = "" if row.clusters is None else f", K = {row.clusters}"
        notes.append(f"Best by validation: {row.label}{which}, {tuned.label} {reached}.")
    return notes


def _runner_up(rows: Sequence[TableRow], shown: Column, tuned: Column) -> str | None:
    """The row that validation data chose, and how far it is from the next one on test data."""
    ordered = sorted((row for row in rows if row.cells[tuned.name].rank is not None),
                     key=lambda row: row.cells[tuned.name].rank or 0)  # fmt: skip
    if len(ordered) < 2:
        return None
    compared = _compared([(ordered[0], ordered[1])], shown)
    return None if compared is None else f"Chosen on validation data: {compared}"


def chosen_across(tables: Sequence[Table]) -> str | None:
    """The row that is best by validation data in the mean of several problems, each of the same weight."""
    tuned = {table.tuned for table in tables}
    if len(tables) < 2 or len(tuned) != 1 or (by := tuned.pop()) is None:
        return None
    rows = [{row.label: row for row in table.rows if row.cells[by.name].rank is not None} for table in tables]
    everywhere = [label for label in rows[0] if all(label in each for each in rows)]
    if len(everywhere) < 2:
        return None
    means = {label: mean([_mean(each[label], by) for each in rows]) for label in everywhere}
    first, second = sorted(everywhere, key=means.__getitem__, reverse=by.higher_is_better)[:2]
    compared = _compared([(each[first], each[second]) for each in rows], tables[0].metrics[0])
    if compared is None:
        return None
    return (
        f"One choice for all {len(tables)} problems, by the mean {by.label} over them ({means[first]:.{by.digits}f}, "
        f"the runner-up {means[second]:.{by.digits}f}): {compared}"
    )


def _mean(row: TableRow, by: Column) -> float:
    found = row.cells[by.name].mean
    assert found is not None  # it has a rank
    return found


def _compared(pairs: Sequence[tuple[TableRow, TableRow]], shown: Column) -> str | None:
    """What the first rows are worth beside the second ones on test data, paired in every problem."""
    values: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for first, second in pairs:
        for all_of, own in zip(
            values, matched(first.by_repeat(shown.name), second.by_repeat(shown.name)), strict=True
        ):
            before = len(all_of)
            all_of.update({before + at: shown.scale * own[key] for at, key in enumerate(sorted(own))})
    found = paired_difference(*values, higher_is_better=shown.higher_is_better)
    if found is None:
        return None
    (first, second), *_ = pairs
    interval = f"[{found.low:+.{shown.digits}f}, {found.high:+.{shown.digits}f}]"
    return (
        f"{first.label}; on test data {shown.label} {found.mean:+.{shown.digits}f} {interval} to the runner-up, "
        f"{second.label}, {found.wins} wins and {found.losses} losses"
        + ("." if found.told_apart else ": the two are not told apart.")
    )
