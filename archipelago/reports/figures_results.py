"""Figures of a comparison: curves and bars over seeds, clients, what it cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from archipelago.core.traffic import bytes_moved
from archipelago.core.vocabulary import Column, Vocabulary, merged
from archipelago.reports.costs import model_size
from archipelago.reports.figures import FIGURES, Figure, numbers, short
from archipelago.reports.groups import Group, by_block
from archipelago.reports.guessing import GUESSES, guessing
from archipelago.reports.repeats import Repeat, mean, repeat_of, spread_over, std, units
from archipelago.reports.tables import Cell, Table
from archipelago.runs.files import RunFiles

_MOST_POINTS = 101  # values that stand for the clients of a group
_STAGES = 6  # stages of a round with a colour of their own


@dataclass(frozen=True)
class Problem:
    """What a comparison is drawn from: the groups with runs that solve one problem, and their table."""

    title: str
    groups: Sequence[Group]
    table: Table
    columns: Sequence[str]  # that any of their runs measured

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What all of them call things."""
        return merged(group.vocabulary for group in self.groups)

    @cached_property
    def colors(self) -> dict[int, int]:
        """id of a group -> its place in the palette."""
        return {id(group): at for at, group in enumerate(self.groups)}


def result_figures(groups: Sequence[Group], tables: Sequence[Table]) -> list[Figure]:
    """Everything that compares groups, problem by problem."""
    makers = FIGURES.of("problem").values()
    return [figure for problem in problems(groups, tables) for maker in makers for figure in maker(problem)]


def problems(groups: Sequence[Group], tables: Sequence[Table]) -> list[Problem]:
    """The problems that any run has begun to solve."""
    found = []
    for title, members in by_block(groups).items():
        with_runs = [group for group in members if any(run.metrics for run in group.runs)]
        if with_runs:
            (table,) = [table for table in tables if table.title == title]
            found.append(Problem(title, with_runs, table, _measured(with_runs)))
    return found


def title_of(group: Group) -> str:
    """The label of a group with its K."""
    return group.label if group.clusters is None else f"{group.label}, K = {group.clusters}"


def _measured(groups: Sequence[Group]) -> list[str]:
    return list(
        dict.fromkeys(name for group in groups for run in group.runs for row in run.metrics for name in row)
    )


def curve(group: Group, name: str) -> dict[str, Any] | None:
    """Mean and std over seeds of a metric, at the rounds that all finished runs of the group measured."""
    values = [{row["round"]: row[name] for row in run.metrics if name in row} for run in group.shown]
    by_round = _in_all(values)
    if not by_round:
        return None
    seeds = len(next(iter(by_round.values())))
    return {"x": list(by_round), "mean": [mean(each) for each in by_round.values()], "seeds": seeds,
            "std": [std(each) for each in by_round.values()] if seeds > 1 else None}  # fmt: skip


def _in_all(values: Sequence[Mapping[int, float]]) -> dict[int, list[float]]:
    """Round -> the value of each run, in rounds that all runs with any value have."""
    known = [found for found in values if found]
    rounds = sorted(set(known[0]).intersection(*known[1:])) if known else []
    return {number: [found[number] for found in known] for number in rounds}


@FIGURES.register(
    "convergence", "metrics over rounds", label="Convergence", of="problem", wide=("convergence",)
)
def convergence(problem: Problem) -> list[Figure]:
    """A curve of every group for each metric that is drawn over rounds."""
    return [f for each in problem.vocabulary.curves(problem.columns) for f in _convergence(problem, each)]


def _convergence(problem: Problem, each: Column) -> list[Figure]:
    series = []
    for group in problem.groups:
        found = curve(group, each.name)
        if found is None:
            continue
        centre = [each.scale * value for value in found["mean"]]
        low = high = None
        if found["std"] is not None:
            low = short(m - each.scale * s for m, s in zip(centre, found["std"], strict=True))
            high = short(m + each.scale * s for m, s in zip(centre, found["std"], strict=True))
        series.append({
            "name": title_of(group), "x": found["x"], "y": numbers(centre), "low": low, "high": high,
            "marks": level_rounds(group.shown[0]), "color": problem.colors[id(group)], "dash": 0,
        })  # fmt: skip
    if not series:
        return []
    marked = any(one["marks"] for one in series)
    over = spread_over(repeat_of(run) for group in problem.groups for run in group.shown)
    about = f"Test data, mean over {over}; the band is one standard deviation." + (
        " A dotted line is a round in which the first seed added a level of models." if marked else ""
    )
    if guesses := _guess_lines(problem, each, series):
        series += guesses
        about += " A grey line is what guessing scores, without any training."
    data = {"x": "round", "y": each.label, "series": series}
    return [Figure("convergence", "results", "Convergence", about, "lines", data,
                   {"problem": problem.title, "metric": each.label})]  # fmt: skip


def _guess_lines(problem: Problem, each: Column, series: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What always predicting the most frequent class scores: a level line for each way of guessing."""
    rounds = sorted({x for one in series for x in one["x"]})
    found: dict[Repeat, dict[str, dict[str, float]]] = {}
    for group in problem.groups:
        found = {repeat_of(run): guessing(run) for run in group.shown} | found
    lines = []
    for dash, (kind, label) in enumerate(GUESSES.items(), start=1):
        values = {
            key: guessed[kind][each.name]
            for key, guessed in found.items()
            if each.name in guessed.get(kind, {})
        }
        if values:
            level = each.scale * mean(list(units(values).values()))
            lines.append({"name": label, "x": rounds, "y": numbers([level] * len(rounds)), "low": None, "high": None,
                          "marks": [], "color": -1, "dash": dash})  # fmt: skip
    return lines


def level_rounds(run: RunFiles) -> list[int]:
    """The rounds after which FeMAM had one level more than before."""
    levels = [(row["round"], row["levels"]) for row in run.metrics if "levels" in row]
    return [number for (_, before), (number, now) in pairwise(levels) if now > before]


@FIGURES.register("bars", "final metrics with published ones", label="Final results", of="problem")
def bars(problem: Problem) -> list[Figure]:
    """Final metrics of every row of the table."""
    figures, table = [], problem.table
    for each in table.metrics:
        rows = [
            row
            for row in table.rows
            if row.cells[each.name].mean is not None or row.cells[each.name].published
        ]
        cells = [row.cells[each.name] for row in rows]
        means = [cell.mean for cell in cells if cell.mean is not None and math.isfinite(cell.mean)]
        if not means:
            continue
        low, high = _axis(cells)
        data = {
            "y": each.label,
            "names": [
                row.label if row.clusters is None else f"{row.label}, K = {row.clusters}" for row in rows
            ],
            "values": numbers(cell.mean for cell in cells),
            "errors": numbers(cell.std for cell in cells),
            "published": numbers(cell.published.mean if cell.published else None for cell in cells),
            "colors": [problem.colors.get(id(row.group), 8) for row in rows],
            "range": [low, high],
        }
        about = "Mean of the last evaluations; whiskers are one standard deviation over seeds."
        if low > 0:
            about += " The axis does not begin at 0."
        if any(cell.published for cell in cells):
            about += " A diamond is the published value."
        figures.append(Figure("bars", "results", "Final results", about, "bars", data,
                              {"problem": problem.title, "metric": each.label}))  # fmt: skip
    return figures


def _axis(cells: Sequence[Cell]) -> tuple[float, float]:
    """From where to where bars are drawn: all means, whiskers and published values with a margin.

    A bar that stands alone begins at 0: there is nothing that it could be told apart from.
    """
    ends = [cell.published.mean for cell in cells if cell.published]
    for cell in cells:
        if cell.mean is not None:
            ends += [cell.mean - (cell.std or 0.0), cell.mean + (cell.std or 0.0)]
    known = [value for value in ends if math.isfinite(value)]
    least, most = min(known), max(known)
    margin = max((most - least) * 0.35, abs(most) * 0.02)
    if least == most >= 0:
        return 0.0, most + margin * 0.6
    return max(0.0, least - margin) if least > 0 else least - margin, most + margin * 0.6


@FIGURES.register("clients", "the first metric of every client", label="Per-client results", of="problem")
def clients(problem: Problem) -> list[Figure]:
    """The spread of clients around the headline."""
    groups = problem.groups
    first = problem.vocabulary.headline(problem.columns)[:1]
    if not first:
        return []
    (each,) = first
    name = each.name.removeprefix("micro_")
    series = []
    for group in groups:
        values = client_values(group, name)
        if len(values):
            shown = (
                values
                if len(values) <= 2 * _MOST_POINTS
                else np.quantile(values, np.linspace(0, 1, _MOST_POINTS))
            )
            series.append({"name": title_of(group), "values": numbers(each.scale * shown), "clients": len(values),
                           "color": problem.colors[id(group)]})  # fmt: skip
    if not series:
        return []
    about = (
        "Each client's own value on test data, mean of the last evaluations, all seeds together. Many clients are "
        f"shown by {_MOST_POINTS} evenly spaced quantiles."
    )
    if any(group.settings.get("holdout_clients") for group in groups):
        about += " Clients that were held out are not among them."
    return [Figure("clients", "clients", "Per-client results", about, "spread", {"y": each.label, "series": series},
                   {"problem": problem.title})]  # fmt: skip


def client_values(group: Group, name: str) -> Any:
    """One value per client that trains and finished seed: the mean of its last evaluations."""
    found = []
    for run, figures in zip(group.counted, group.finished.values(), strict=True):
        if not figures["evaluations"]:
            continue
        table = run.table("clients", ["round", "client", "held_out", name], figures["evaluations"])
        if name in table:
            # As in the headline, which is over clients that train.
            trains = ~np.asarray(table.get("held_out", np.zeros(len(table[name]))), bool)
            order = np.unique(table["client"][trains], return_inverse=True)[1]
            sums = np.bincount(order, weights=table[name][trains].astype(np.float64))
            found.append(sums / np.bincount(order))
    values = np.concatenate(found) if found else np.zeros(0)
    return values[np.isfinite(values)]


# Cost -------------------------------------------------------------------------------------------------------


@FIGURES.register(
    "work", "the first metric for what was spent on it", label="Results for their cost", of="problem"
)
def work(problem: Problem) -> list[Figure]:
    """The headline over megabytes moved, and over seconds."""
    vocabulary = problem.vocabulary
    figures = []
    for each in vocabulary.headline(problem.columns)[:1]:
        label = vocabulary.metrics[each.name.removeprefix("micro_")].label
        for axis, along in (("megabytes moved per client", _megabytes), ("seconds", _seconds)):
            series = []
            for group in problem.groups:
                found, spent = curve(group, each.name), along(group)
                if found is None or not spent:
                    continue
                points = [(spent[number], value) for number, value in zip(found["x"], found["mean"], strict=True)
                          if number in spent]  # fmt: skip
                series.append({"name": title_of(group), "x": short(x for x, _ in points),
                               "y": short(each.scale * y for _, y in points), "low": None, "high": None,
                               "marks": [], "color": problem.colors[id(group)], "dash": 0})  # fmt: skip
            if series:
                data = {"x": axis, "y": each.label, "series": series}
                about = (
                    "What is reached for what was spent so far, means over seeds: bytes moved per participant "
                    "(updates as they were sent, compressed or not), or time."
                )
                title = f"{label[0].upper()}{label[1:]} for its cost"
                choice = {"problem": problem.title, "cost": axis}
                figures.append(Figure("work", "cost", title, about, "lines", data, choice))
    return figures


def _megabytes(group: Group) -> dict[int, float]:
    size = next((found for run in group.shown if (found := model_size(run.path)) is not None), None)
    if size is None:
        return {}
    spent = [
        {
            row["round"]: sum(moved.values()) / 1e6
            for row in run.metrics
            if (moved := bytes_moved(row, 4 * size)) is not None
        }
        for run in group.shown
    ]
    return _spent(spent)


def _seconds(group: Group) -> dict[int, float]:
    return _spent(
        [{row["round"]: row["total"] for row in run.timings if "total" in row} for run in group.shown]
    )


def _spent(by_run: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Round -> what was spent up to it, mean over the runs; of each run is given what each round took."""
    totals = [
        dict(zip(each, np.cumsum(list(each.values())).tolist(), strict=True)) for each in by_run if each
    ]
    return {number: mean(values) for number, values in _in_all(totals).items()}


def _is_stage(column: str) -> bool:
    """Whether a column of timings.csv holds the seconds of a stage; `share_...` is a share of its work."""
    return column != "round" and not column.startswith("share_")


@FIGURES.register("time", "seconds by stage", label="Where the time goes", of="problem")
def time(problem: Problem) -> list[Figure]:
    """Seconds per round by stage."""
    groups = problem.groups
    medians: list[dict[str, float]] = []
    for group in groups:
        rows = [row for run in group.shown for row in run.timings]
        names = dict.fromkeys(name for row in rows for name in row if _is_stage(name))
        found = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}
        total = found.pop("total", math.fsum(found.values()))
        found["server and the rest"] = max(total - math.fsum(found.values()), 0.0)
        medians.append(found)
    sizes: dict[str, float] = {}
    for found in medians:
        for name, value in found.items():
            sizes[name] = max(sizes.get(name, 0.0), value)
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_STAGES]
    if not any(sizes.values()):
        return []
    series = [{"name": name, "y": [found.get(name, 0.0) for found in medians], "color": at}
              for at, name in enumerate(largest)]  # fmt: skip
    data = {
        "x": "",
        "y": "seconds per round",
        "at": [title_of(group) for group in groups],
        "series": series,
        "bars": True,
    }
    about = "Medians over rounds and seeds of the seconds that the server waited for each stage."
    return [Figure("time", "cost", "Where the time goes", about, "stack", data, {"problem": problem.title})]


@FIGURES.register("communication", "models moved", label="Communication", of="problem")
def communication(problem: Problem) -> list[Figure]:
    """Models received and delivered per round."""
    groups = problem.groups
    series = []
    for at, (key, name) in enumerate((("cost_models_down", "received"), ("cost_models_up", "delivered"))):
        values = [[row[key] for run in group.shown for row in run.metrics if key in row] for group in groups]
        if not all(values):
            return []
        series.append({"name": name, "y": [mean(each) for each in values], "color": at})
    data = {"x": "", "y": "models per participant and round", "at": [title_of(group) for group in groups],
            "series": series, "bars": True}  # fmt: skip
    about = (
        "Whole models received from and delivered to the server, mean over rounds; FedAvg moves one each way."
    )
    return [
        Figure("communication", "cost", "Communication", about, "stack", data, {"problem": problem.title})
    ]
