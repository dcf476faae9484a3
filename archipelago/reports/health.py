"""What a reader must know of a run before comparing it: still rising, a part that is dead, parts that fight.

Worked out from the run's own files, so that old runs say as much as they can. `part_NAME_norm`, `part_NAME_accuracy`
and `part_NAME_variance` of metrics.csv are written by runs of methods that add models up (`actors/parts.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from archipelago.core.vocabulary import Column, of_run
from archipelago.reports.federation import read_federation
from archipelago.reports.guessing import most_frequent
from archipelago.reports.run_tables import assignments
from archipelago.runs.files import Row, RunFiles

LAST = 0.2  # the end of a run: its last fifth
RISING = 0.3  # points per ten rounds from which a run is said to be rising ...
CERTAIN = 2.0  # ... if that is so many standard errors of the slope
DEAD_NORM = 1 / 3  # of a fresh model's
DEAD_SHARE = 0.01  # of the variance of the summed logits
FIGHT = 0.25  # share of the objective's way that goes up, in rounds whose clusters stand still ...
SWING = 0.03  # ... if a step up is, in the mean, so large a part of the largest objective of the run
SEESAW = (
    0.1  # share of the logits' variance that a part wins and loses again from round to round, in the mean
)
# Schedules of an add-on by which a part does not see what the other one has just learned.
TOGETHER = ("simultaneous", "global_first", "global_first_aggregated")
_PART = re.compile(r"part_(.+)_(norm|accuracy|variance)")


def end_of(rows: Sequence[Row], rounds: int) -> list[Row]:
    """The rows of the last fifth of a run."""
    return [row for row in rows if row["round"] > rounds - max(math.ceil(LAST * rounds), 1)]


def slope(run: RunFiles, column: Column) -> float | None:
    """Change per ten rounds over the last fifth, as it is shown (points of a share); None of fewer than three values.

    Not told from zero, or less than `RISING`: 0.
    """
    rows = [row for row in run.metrics if column.name in row]
    if "finetune" in str(run.setting("method")).split("+"):  # its last evaluations jump to other models
        rows = rows[: -(run.setting("evaluation.last") or 3)]
    if not rows:
        return None
    known = [
        (row["round"], column.scale * row[column.name]) for row in end_of(rows, run.metrics[-1]["round"])
    ]
    return trend(known) if len(known) >= 3 else None


def trend(points: Sequence[tuple[float, float]]) -> float:
    """Ten times the slope of the line through (round, value); 0 where it is too small or too uncertain.

    >>> trend([(1, 50.0), (2, 50.2), (3, 50.4), (4, 50.6)])
    2.0
    >>> trend([(1, 50.0), (2, 51.0), (3, 49.0), (4, 50.2)])
    0.0
    """
    x, y = (np.array(values, np.float64) for values in zip(*points, strict=True))
    if not np.isfinite(y).all():
        return 0.0
    away = x - x.mean()
    rise = float(away @ y / (away @ away))
    rest = y - y.mean() - rise * away
    error = math.sqrt(float(rest @ rest) / max(len(x) - 2, 1) / float(away @ away))
    found = round(10 * rise, 6)
    return found if abs(found) >= RISING and abs(rise) >= CERTAIN * error else 0.0


def still_rising(run: RunFiles) -> float:
    """Points per ten rounds by which the first metric of the run was getting better at its end; 0 if it was not."""
    columns = of_run(run.path).headline({name for row in run.metrics for name in row})
    for column in columns[:1]:
        found = slope(run, column) or 0.0
        if column.scale == 100.0 and (found > 0) == column.higher_is_better:
            return abs(found)
    return 0.0


def concerns(run: RunFiles) -> list[str]:
    """What a user should know of the run's numbers, a sentence each."""
    found = []
    if rise := still_rising(run):
        found.append(
            f"Still rising at the end: {rise:+.1f} points per ten rounds over the last fifth; more rounds would "
            "change the result."
        )
    return [*found, *dead_parts(run).values(), *fights(run)]


# Methods that add models up ---------------------------------------------------------------------------------


def parts_of(run: RunFiles) -> dict[str, list[Row]]:
    """Part -> `round`, `norm`, `accuracy`, `variance` of the rounds in which it was measured."""
    found: dict[str, list[Row]] = {}
    for row in run.metrics:
        measured: dict[str, Row] = {}
        for name, value in row.items():
            if (match := _PART.fullmatch(name)) is not None:
                measured.setdefault(match[1], {"round": row["round"]})[match[2]] = value
        for part, values in measured.items():
            found.setdefault(part, []).append(values)
    return found


def dead_parts(run: RunFiles) -> dict[str, str]:
    """A sentence for each part that added nothing in the last fifth: almost zero, or alone no better than a guess."""
    sentences: dict[str, str] = {}
    for part, rows in parts_of(run).items():
        last = end_of(rows, run.metrics[-1]["round"])
        if not last:
            continue
        norms = [row["norm"] for row in last if "norm" in row]
        if norms and max(norms) < DEAD_NORM:
            sentences[part] = (
                f"The {part.replace('_', ' ')} part is dead: for the last fifth of the run its norm was at most "
                f"{max(norms):.2f} of a fresh model's; predictions are those of the others alone."
            )
            continue
        shares = [abs(row["variance"]) for row in last if "variance" in row]
        if shares and max(shares) < DEAD_SHARE:
            sentences[part] = (
                f"The {part.replace('_', ' ')} part is dead: for the last fifth of the run it was at most "
                f"{100 * max(shares):.1f} % of the variance of the summed logits; predictions are those of the others."
            )
            continue
        alone = [row["accuracy"] for row in last if "accuracy" in row]
        floor = _floor(run, part) if alone else None
        if floor is not None and max(alone) <= floor:
            sentences[part] = (
                f"The {part.replace('_', ' ')} part is dead: for the last fifth of the run it was alone no better "
                f"({100 * max(alone):.1f} %) than the most frequent class of the clients that share it "
                f"({100 * floor:.1f} %)."
            )
    return sentences


def _floor(run: RunFiles, part: str) -> float | None:
    """Accuracy of the most frequent class of those who share a part: of each cluster, or of all clients."""
    if not (run.path / "federation" / "counts.parquet").is_file():
        return None
    described = read_federation(run.path)
    if described.facts["classes"] is None:
        return None
    train, test = described.table("train"), described.table("test")
    by = np.zeros(len(train), np.int64)
    if part == "cluster" and (found := assignments(run)):
        by = np.maximum(found[max(found)], -1) + 1
    kept = test.sum(axis=1) > 0
    return most_frequent(train[kept], test[kept], train[kept].sum(axis=1).astype(np.float64), by[kept])


def fights(run: RunFiles) -> list[str]:
    """A sentence where the parts of an additive method correct the same error and overshoot, with what to change."""
    parts = parts_of(run)
    if not parts:
        return []
    share, step = _rises(run.metrics)
    seesaw = max(_seesaw(run.metrics, part) for part in parts)
    if share >= FIGHT and step >= SWING:
        seen = (
            f"{100 * share:.0f} % of the way of the training objective went up, by {100 * step:.0f} % of where it "
            "began at a time"
        )
    elif seesaw >= SEESAW:
        seen = (
            f"{100 * seesaw:.0f} % of the variance of the summed logits went from one part to another and back, "
            "from round to round"
        )
    else:
        return []
    remedy = "a smaller local.lr"
    for name, section in run.config.items():
        schedule = section.get("schedule") if isinstance(section, dict) else None
        if schedule in TOGETHER:
            remedy = f"{name}.schedule=cluster_first instead of {schedule}, or {remedy}"
    return [
        f"The parts fight: in the second half, with unchanged clusters, {seen}; they correct the same error and "
        f"overshoot. Try {remedy}."
    ]


def _seesaw(metrics: Sequence[dict[str, Any]], part: str) -> float:
    """What a part wins and loses again: the mean, over two steps in a row, of the smaller where they are opposite.

    Of the second half, in rounds whose clusters stand still, in shares of the variance. The objective does not show
    this: a sum may fall on while its parts swing.
    """
    name = f"part_{part}_variance"
    rows = [row for row in metrics[len(metrics) // 2 :] if math.isfinite(row.get(name, math.nan))]
    turns = [
        min(abs(now[name] - middle[name]), abs(middle[name] - before[name]))
        if (now[name] - middle[name]) * (middle[name] - before[name]) < 0
        else 0.0
        for before, middle, now in zip(rows, rows[1:], rows[2:], strict=False)
        if not middle.get("changed") and not now.get("changed")
    ]
    return math.fsum(turns) / len(turns) if len(turns) > 1 else 0.0


def _rises(metrics: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Of the second half, between rounds whose clusters stand still: (share of the way that goes up, mean step up).

    A step is measured by the largest objective of the run: one that is almost zero moves by half of itself and means
    nothing.
    """
    rows = [row for row in metrics if math.isfinite(row.get("federated_objective", math.nan))]
    largest = max((row["federated_objective"] for row in rows), default=0.0)
    rows = rows[len(rows) // 2 :]
    steps = [
        now["federated_objective"] - before["federated_objective"]
        for before, now in pairwise(rows)
        if not now.get("changed")
    ]
    up = [step for step in steps if step > 0]
    way = math.fsum(map(abs, steps))
    if not up or not way:
        return 0.0, 0.0
    return math.fsum(up) / way, math.fsum(up) / len(up) / largest if largest > 0 else 0.0
