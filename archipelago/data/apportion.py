"""Divide whole numbers in given proportions, exactly: the largest remainder method and its relatives."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def apportion(total: int, weights: NDArray[Any], ties: NDArray[Any] | None = None) -> Integers:
    """Split `total` into whole numbers proportional to `weights`, by largest remainder.

    Every part is its exact quota rounded down or up, the parts sum to `total`, and a weight of zero gets
    nothing. Equal remainders go to the smallest value of `ties` (where the caller wants them evened out),
    then to the lowest position. Integer weights are divided in integer arithmetic, without rounding.

    Quotas 4.28, 2.85, 1.43, 1.43 of ten: the rounded-down 4, 2, 1, 1 leave two, for the second (.85) and
    the third (.43, tied with the fourth).

    >>> apportion(10, np.array([3, 2, 1, 1])).tolist()
    [4, 3, 2, 1]
    >>> apportion(10, np.array([3, 2, 1, 1]), ties=np.array([0, 0, 9, 5])).tolist()
    [4, 3, 1, 2]
    """
    if total == 0:
        return np.zeros(len(weights), dtype=np.int64)
    scale = weights.sum()
    if not scale > 0:
        raise ValueError(f"cannot split {total} by weights that sum to {scale}")
    scaled = weights * total
    whole = scaled // scale
    rest = scaled - whole * scale
    parts: Integers = whole.astype(np.int64)
    left = total - int(parts.sum())
    order = np.argsort(-rest, kind="stable") if ties is None else np.lexsort((ties, -rest))
    parts[order[:left]] += 1
    return parts


def apportion_at_least(
    total: int, weights: NDArray[Any], floor: Integers, ties: NDArray[Any] | None = None
) -> Integers:
    """As `apportion`, but part i is at least `floor[i]`; those above their floor give what is missing.

    Without floors 8, 2, 0, 0; the two that are missing are split by the 7 and the 1 above their floors.

    >>> apportion_at_least(10, np.array([80, 15, 4, 1]), np.array([1, 1, 1, 1])).tolist()
    [6, 2, 1, 1]
    """
    if int(floor.sum()) > total:
        raise ValueError(f"the floors sum to {int(floor.sum())}, more than the {total} there are")
    parts = apportion(total, weights, ties)
    missing = np.maximum(floor - parts, 0)
    # What a part has above its floor is never exceeded by its share of what is missing: the shares are
    # integer quotas of weights that sum to at least as much.
    above = np.maximum(parts - floor, 0)
    return parts + missing - apportion(int(missing.sum()), above)


def apportion_rows(totals: Integers, shares: NDArray[np.float64]) -> Integers:
    """Split each `totals[k]` by the row `shares[k]`: (rows,), (rows, columns) -> (rows, columns).

    Ties go to the column that has least so far, so that equal shares give even columns. A row without any
    share stays zero.

    >>> apportion_rows(np.array([3, 3]), np.full((2, 2), 0.5)).tolist()
    [[2, 1], [1, 2]]
    """
    counts = np.zeros(shares.shape, dtype=np.int64)
    sizes = np.zeros(shares.shape[1], dtype=np.int64)
    for row, total in enumerate(totals):
        if shares[row].any():
            counts[row] = apportion(int(total), shares[row], ties=sizes)
            sizes += counts[row]
    return counts


def apportion_groups(
    totals: Integers, weights: Integers, groups: Integers, ties: NDArray[Any] | None = None
) -> Integers:
    """`apportion` for many totals at once: `totals[g]` by the whole-number weights of the members of group g.

    A group whose weights are all zero must have nothing to split. Equal remainders go to the smallest of `ties`, then
    to the lowest position.

    >>> apportion_groups(np.array([10, 1]), np.array([3, 2, 1, 1, 5, 7]), np.array([0, 0, 0, 0, 1, 1])).tolist()
    [4, 3, 2, 1, 0, 1]
    """
    count = len(totals)
    scale = np.zeros(count, dtype=np.int64)
    np.add.at(scale, groups, weights)
    if (totals[scale == 0] > 0).any():
        raise ValueError("cannot split something by weights that are all zero")
    scaled = weights * totals[groups]
    parts: Integers = scaled // np.maximum(scale, 1)[groups]
    rest = scaled - parts * scale[groups]
    left = totals.copy()
    np.subtract.at(left, groups, parts)
    order = np.lexsort((-rest, groups) if ties is None else (ties, -rest, groups))
    parts[order[ranks(groups[order]) < left[groups[order]]]] += 1
    return parts


def ranks(values: Integers) -> Integers:
    """For each element of a sorted array, how many equal ones stand before it.

    >>> ranks(np.array([0, 0, 0, 2, 5, 5])).tolist()
    [0, 1, 2, 0, 0, 1]
    """
    first = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.arange(len(values)) - np.repeat(first, np.diff(first, append=len(values)))
