"""What stands beneath a table: what its numbers are, where they come from, what a reader must know of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from archipelago.core.citations import CITATIONS
from archipelago.reports.groups import Group
from archipelago.reports.health import dead_parts, fights, still_rising
from archipelago.reports.published import deviations
from archipelago.reports.repeats import mean, repeat_of, spread_over
from archipelago.reports.significance import HELD, LEVEL, TESTS

if TYPE_CHECKING:
    from archipelago.reports.tables import TableRow

COSTS_ARE = (
    "Costs are per participant and round; computation 1 is one local training, as in FedAvg; megabytes are those of "
    "model values of 4 bytes a parameter."
)

LIFT, VS = "lift:", "vs:"  # how the notes about these columns begin


def notes_of(groups: Sequence[Group], rows: Sequence[TableRow], test: str, compared: str) -> list[str]:
    """The sentences beneath a table, in their order."""
    cells = [cell for row in rows for cell in row.cells.values()]
    over = spread_over(repeat for row in rows for repeat in row.repeats)
    notes = [_what(groups, over, spread=any(cell.std is not None for cell in cells))]
    if any(cell.lift is not None for cell in cells):
        notes.append(
            "The last rows always predict the most frequent training class, of the client or of its ground-truth group."
        )
        notes.append(f"{LIFT} points above the first of them, on the same partitions.")
    if pairs := [cell.paired.pairs for cell in cells if cell.paired is not None]:
        held = [f"{HELD[n]} times in 100 of {n} pairs" for n in sorted(set(pairs)) if n in HELD]
        few = f"; such an interval holds the true difference only {', '.join(held)}" if held else ""
        notes.append(
            f"{VS} difference to {compared}, paired over {over.partition(',')[0]}, with its {100 * LEVEL:.0f} % "
            f"bootstrap interval and wins/losses{few}."
        )
    if any(cell.p is not None for cell in cells):
        named = TESTS[test].format(over=over.partition(",")[0])
        notes.append(f"p: {named}, against {compared}, Holm-corrected over the rows of the column.")
    notes += _published(groups, rows)
    if any(row.costs for row in rows):
        notes.append(COSTS_ARE)
    notes += [*_engines(rows), *_rising(groups), *_health(groups)]
    for row in rows:
        if row.note and row.group is not None:  # a published row that was not run is seen to be empty
            which = "" if row.clusters is None else f" (K = {row.clusters})"
            notes.append(f"{row.label}{which}: {row.note}.")
    return notes


def _what(groups: Sequence[Group], over: str, *, spread: bool) -> str:
    last = {group.settings.get("evaluation.last") for group in groups if group.settings}
    what = f"the last {last.pop()} evaluations" if len(last) == 1 else "the last evaluations"
    if not spread:
        return f"Mean of {what} on test data."
    return f"Mean of {what} on test data; ± is one standard deviation (ddof 0) over {over}."


def _published(groups: Sequence[Group], rows: Sequence[TableRow]) -> list[str]:
    notes = []
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
    return notes


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


def _rising(groups: Sequence[Group]) -> list[str]:
    """Which rows were still getting better when they ended: their order may change with more rounds."""
    found = []
    for group in groups:
        rises = [still_rising(run) for run in group.counted]
        if any(rises):
            found.append(f"{group.label} {mean(rises):+.1f}")
    if not found:
        return []
    return [f"Still rising at the end (points per ten rounds over the last fifth): {', '.join(found)}."]


def _health(groups: Sequence[Group]) -> list[str]:
    """What is wrong with the parts of methods that add models up: which rows, and with which seeds."""
    dead: dict[str, list[str]] = {}
    fighting: dict[str, list[str]] = {}
    for group in groups:
        for run in group.counted:
            seed = str(repeat_of(run))
            for part in dead_parts(run):
                dead.setdefault(f"{group.label}, {part.replace('_', ' ')} part", []).append(seed)
            for sentence in fights(run):
                fighting.setdefault(f"{group.label}: try {sentence.partition('Try ')[2]}", []).append(seed)
    notes = []
    if dead:
        notes.append(
            "Dead for the last fifth of the run (norm below a third of a fresh model's, less than 1 % of the summed "
            f"logits' variance, or alone no better than the most frequent class): {_with_seeds(dead)}."
        )
    if fighting:
        notes.append(
            "Parts fight (the objective, or who explains the logits, goes up and down while clusters stand still): "
            f"{_with_seeds({name.rstrip('.'): seeds for name, seeds in fighting.items()})}."
        )
    return notes


def _with_seeds(found: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{name} (seed {', '.join(seeds)})" for name, seeds in found.items())
