"""What was chosen on validation data, and what that is worth on test data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from archipelago.core.vocabulary import Column
from archipelago.reports.repeats import matched
from archipelago.reports.significance import paired_difference

if TYPE_CHECKING:
    from archipelago.reports.tables import TableRow


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
    first, second = ordered[:2]
    own, other = matched(first.by_repeat(shown.name), second.by_repeat(shown.name))
    scaled = ({key: shown.scale * value for key, value in values.items()} for values in (own, other))
    found = paired_difference(*scaled, higher_is_better=shown.higher_is_better)
    if found is None:
        return None
    interval = f"[{found.low:+.{shown.digits}f}, {found.high:+.{shown.digits}f}]"
    return (
        f"Chosen on validation data: {first.label}; on test data {shown.label} {found.mean:+.{shown.digits}f} "
        f"{interval} to the runner-up, {second.label}, {found.wins} wins and {found.losses} losses"
        + ("." if found.told_apart else ": the two are not told apart.")
    )
