"""Repetitions of one setting: seeds of partitions and of starts, and what a mean and a spread are over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from archipelago.runs.files import RunFiles


class Repeat(NamedTuple):
    """What tells runs of one setting apart: the seed of the partition, and that of the start and all other draws.

    >>> str(Repeat(3, 3)), str(Repeat(0, 3))
    ('3', '0/3')
    """

    partition: int
    start: int

    def __str__(self) -> str:
        return str(self.start) if self.partition == self.start else f"{self.partition}/{self.start}"


def repeat_of(run: RunFiles) -> Repeat:
    """The seeds of a run: without one of its own, the partition has that of everything else."""
    start, partition = run.setting("seed") or 0, run.setting("partition.seed")
    return Repeat(int(start if partition is None else partition), int(start))


def units(by_repeat: Mapping[Repeat, float]) -> dict[int, float]:
    """What a spread is over: partitions, each the mean of its starts; the starts where all share one partition.

    >>> units({Repeat(0, 0): 1.0, Repeat(0, 1): 3.0, Repeat(1, 0): 5.0, Repeat(1, 1): 5.0})
    {0: 2.0, 1: 5.0}
    >>> units({Repeat(0, 0): 1.0, Repeat(0, 1): 3.0})
    {0: 1.0, 1: 3.0}
    """
    partitions = sorted({repeat.partition for repeat in by_repeat})
    if len(partitions) == 1:
        return {repeat.start: value for repeat, value in sorted(by_repeat.items())}
    return {
        each: mean([value for repeat, value in by_repeat.items() if repeat.partition == each])
        for each in partitions
    }


def matched(
    one: Mapping[Repeat, float], other: Mapping[Repeat, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """The units of both, of the repetitions that both have."""
    shared = set(one) & set(other)
    return tuple(units({key: values[key] for key in shared}) for values in (one, other))  # type: ignore[return-value]  # two


def spread_over(repeats: Iterable[Repeat]) -> str:
    """What `units` are, in words.

    >>> spread_over([Repeat(0, 0), Repeat(1, 1)])
    'seeds, each with a partition and a start of its own'
    >>> spread_over([Repeat(0, 0), Repeat(1, 0)]), spread_over([Repeat(0, 0), Repeat(0, 1)])
    ('partitions', 'starts on one partition')
    >>> spread_over([Repeat(0, 0), Repeat(0, 1), Repeat(1, 0), Repeat(1, 1)])
    'partitions, each the mean of its starts'
    """
    found = set(repeats)
    partitions = {repeat.partition for repeat in found}
    if all(repeat.partition == repeat.start for repeat in found):
        return "seeds, each with a partition and a start of its own"
    if len(partitions) == 1:
        return "starts on one partition"
    return "partitions" if len(partitions) == len(found) else "partitions, each the mean of its starts"


def mean(values: Sequence[float]) -> float:
    """The exactly rounded mean; not finite where a value is not."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else float(np.mean(values))


def std(values: Sequence[float]) -> float:
    """
    >>> std([1.0, 3.0])
    1.0
    """
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))
