"""Parameter arithmetic: models as flat float32 vectors, and sums that do not depend on who adds first.

A model value is one vector of P numbers: trainable parameters first, floating-point buffers (BatchNorm's
running statistics) after them. Integer buffers are not part of a model value. `ModelSpec` says which
columns are what.

Sums over clients are taken in fixed point: every product weight x value is rounded once to a multiple of
2**-s and the 64-bit integers are added, which is exact, so the result has the same bits for any number of
actors, any packing and any order. s is as large as the data allows, so what is lost stays below float32's
own rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Sums = npt.NDArray[np.int64]
PartialSums = tuple[npt.NDArray[np.int64], Sums]  # (rows that are in use, ascending; their sums)

_CHUNK = 1 << 15  # columns that are summed at a time: three arrays of 256 KB, in the cache of any processor

PARTS = ("all", "parameters", "backbone", "head", "classifier", "buffers")


@dataclass(frozen=True)
class ModelEntry:
    """One tensor of a model: where it stands in the vector and what it is."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    kind: str  # "parameter" or "buffer"
    part: str  # "backbone" or "head"
    classifier: bool = False  # the weight matrix of the last layer, which the papers cluster on


@dataclass(frozen=True)
class ModelSpec:
    """The layout of a model value."""

    entries: tuple[ModelEntry, ...]

    @property
    def size(self) -> int:
        """P: the length of the vector, buffers included."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def parameters(self) -> int:
        """How many leading columns are trainable parameters."""
        return sum(entry.stop - entry.start for entry in self.entries if entry.kind == "parameter")

    def columns(self, part: str) -> npt.NDArray[np.int64]:
        """The columns of a part of the model, one of `PARTS`.

        >>> spec = ModelSpec((ModelEntry("w", (2,), 0, 2, "parameter", "backbone"),
        ...                   ModelEntry("fc", (1,), 2, 3, "parameter", "head", classifier=True)))
        >>> spec.columns("head").tolist(), spec.columns("all").tolist()
        ([2], [0, 1, 2])
        """
        if part not in PARTS:
            raise ValueError(f"expected a part of {', '.join(PARTS)}, got {part!r}")
        chosen = [np.arange(entry.start, entry.stop) for entry in self.entries if _belongs(entry, part)]
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)

    def last_layer(self) -> npt.NDArray[np.int64]:
        """The columns of the classifier, weight and bias.

        >>> spec = ModelSpec((ModelEntry("w", (2,), 0, 2, "parameter", "backbone"),
        ...                   ModelEntry("fc.weight", (1,), 2, 3, "parameter", "head", classifier=True),
        ...                   ModelEntry("fc.bias", (1,), 3, 4, "parameter", "head")))
        >>> spec.last_layer().tolist()
        [2, 3]
        """
        names = {entry.name for entry in self.entries if entry.classifier}
        names |= {f"{name.removesuffix('.weight')}.bias" for name in names}
        chosen = [np.arange(entry.start, entry.stop) for entry in self.entries if entry.name in names]
        return np.concatenate(chosen)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data, for a run directory."""
        return [{**entry.__dict__, "shape": list(entry.shape)} for entry in self.entries]

    @staticmethod
    def from_json(data: list[dict[str, Any]]) -> ModelSpec:
        """The inverse of `to_json`."""
        return ModelSpec(tuple(ModelEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in data))


def _belongs(entry: ModelEntry, part: str) -> bool:
    if part == "all":
        return True
    if part == "buffers":
        return entry.kind == "buffer"
    if entry.kind == "buffer":
        return False
    return part == "parameters" or part == entry.part or (part == "classifier" and entry.classifier)


def merged(base: Vector, other: Vector, columns: npt.NDArray[np.int64]) -> Vector:
    """`base` with some columns of `other`, as a value of its own.

    >>> merged(np.float32([1, 2, 3]), np.float32([7, 8, 9]), np.array([2])).tolist()
    [1.0, 2.0, 9.0]
    """
    value = base.copy()
    value[columns] = other[columns]
    value.flags.writeable = False
    return value


def mixed(models: Matrix, weights: npt.ArrayLike) -> Vector:
    """The weighted mean of K models, added up in their order; one model alone keeps its bits.

    >>> mixed(np.float32([[1, 2], [3, 6]]), [1, 3]).tolist()
    [2.5, 5.0]
    """
    total = np.zeros(models.shape[1])
    for weight, model in zip(normalised_rows(np.asarray(weights)[None])[0], models, strict=True):
        total += weight * model
    return _value(total)


def summed(models: Sequence[Vector], factors: Sequence[float]) -> Vector:
    """The models times their factors, added up in their order.

    >>> summed([np.float32([1, 2]), np.float32([3, 6])], [2.0, -1.0]).tolist()
    [-1.0, -2.0]
    """
    total = np.zeros(models[0].shape)
    for factor, model in zip(factors, models, strict=True):
        total += factor * model.astype(np.float64)
    return _value(total)


def length_of(values: npt.NDArray[np.float32]) -> float:
    """The Euclidean length, summed in float64.

    >>> length_of(np.float32([3, 4]))
    5.0
    """
    wide = values.astype(np.float64)
    return math.sqrt(float(np.add.reduce(wide * wide)))


def moved(start: Vector, towards: Vector, share: float) -> Vector:
    """(1 - share) * start + share * towards, as a value of its own; share 1 gives `towards` to the last bit.

    >>> moved(np.float32([1, 2]), np.float32([2, 6]), 0.5).tolist()
    [1.5, 4.0]
    """
    value = (1.0 - share) * start.astype(np.float64) + share * towards.astype(np.float64)
    return _value(value)


def descended(start: Vector, slope: Vector, step: float) -> Vector:
    """start - step * slope, as a value of its own.

    >>> descended(np.float32([1, 2]), np.float32([4, -4]), 0.25).tolist()
    [0.0, 3.0]
    """
    return _value(start.astype(np.float64) - step * slope.astype(np.float64))


def _value(numbers: Weights) -> Vector:
    value = numbers.astype(np.float32)
    value.flags.writeable = False
    return value


def normalised_rows(weights: npt.ArrayLike) -> Weights:
    """Each row divided by its sum; a row of zeros (an empty cluster) stays zero.

    >>> normalised_rows([[1, 3], [0, 0]]).tolist()
    [[0.25, 0.75], [0.0, 0.0]]
    """
    matrix = np.asarray(weights, np.float64)
    # fsum: exact, so the weights cannot depend on how a library orders its additions.
    totals = np.array([math.fsum(row) for row in matrix])[:, None]
    return np.divide(matrix, totals, out=np.zeros_like(matrix), where=totals != 0)


def one_hot(rows: npt.ArrayLike, count: int, weights: npt.ArrayLike) -> Weights:
    """(count, n) weights with which client j feeds row `rows[j]` by `weights[j]`; row -1 feeds none.

    >>> one_hot([1, 0, 1], 2, [5, 6, 7]).tolist()
    [[0.0, 6.0, 0.0], [5.0, 0.0, 7.0]]
    """
    index = np.asarray(rows, np.int64)
    matrix = np.zeros((count, len(index)))
    member = index >= 0
    matrix[index[member], np.flatnonzero(member)] = np.broadcast_to(
        np.asarray(weights, np.float64), index.shape
    )[member]
    return matrix


def fixed_point_exponents(weights: Weights, magnitudes: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """For each row k the largest s with sum_j |w_kj| * magnitude_j * 2**s below 2**62.

    One for each row: a cluster with huge values must not cost the others their precision.
    """
    sizes = np.asarray(magnitudes, np.float64)
    # fsum: exact, so that no library's threads can move the bound.
    bounds = [math.fsum(np.abs(row) * sizes) for row in weights]
    if not all(math.isfinite(bound) for bound in bounds):
        raise OverflowError("a sum of models needs finite weights and values")
    # One spare bit covers the rounding of the products; 1000 keeps 2.0**s finite.
    return np.array([min(62 - math.frexp(bound)[1] - 1, 1000) if bound else 0 for bound in bounds], np.int64)


def partial_sums(values: list[Vector], weights: Weights, exponents: npt.NDArray[np.int64], size: int) -> Sums:
    """(K, size) fixed-point sums of some clients' models; the sums of any split add up to the same bits.

    Row k is the sum over j of round(weights[k, j] * values[j] * 2**exponents[k]), rounded once a product.
    """
    totals = np.zeros((weights.shape[0], size), np.int64)
    pairs = [
        (totals[row], values[column], float(weights[row, column]) * 2.0 ** int(exponents[row]))
        for row, column in zip(*np.nonzero(weights), strict=True)
    ]
    width = min(_CHUNK, size)
    products, rounded = np.empty(width), np.empty(width, np.int64)
    # Chunk by chunk, so that products and integers never leave the cache, and no temporary copy needs fresh memory.
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        product, integer = products[: stop - start], rounded[: stop - start]
        for total, value, scale in pairs:
            np.multiply(value[start:stop], scale, out=product, dtype=np.float64)
            np.rint(product, out=product)
            np.copyto(integer, product, casting="unsafe")
            part = total[start:stop]
            np.add(part, integer, out=part)
    return totals


def used_rows(weights: Weights) -> npt.NDArray[np.int64]:
    """The rows of a weight matrix that anybody feeds.

    >>> used_rows(np.array([[0.0, 0.0], [0.0, 0.5]])).tolist()
    [1]
    """
    return np.flatnonzero(weights.any(axis=1))


def add_sums(parts: Sequence[PartialSums]) -> PartialSums:
    """Partial sums of several groups of clients, added up: exact, so in any order.

    >>> rows, sums = add_sums([(np.array([0, 2]), np.array([[1], [2]])), (np.array([2]), np.array([[5]]))])
    >>> rows.tolist(), sums.tolist()
    ([0, 2], [[1], [7]])
    """
    rows = functools.reduce(np.union1d, (rows for rows, _ in parts))
    first, sums = parts[0]
    if np.array_equal(first, rows):
        totals = sums.copy()
    else:
        totals = np.zeros((len(rows), sums.shape[1]), np.int64)
        totals[np.searchsorted(rows, first)] = sums
    for used, sums in parts[1:]:
        for row, values in zip(np.searchsorted(rows, used), sums, strict=True):
            np.add(totals[row], values, out=totals[row])
    return rows, totals


def from_fixed_point(totals: Sums, exponents: npt.NDArray[np.int64]) -> Matrix:
    """Fixed-point sums as float32 models.

    Times a power of two: the same number as `ldexp`, which takes ten times as long.
    """
    values = np.empty(totals.shape, np.float32)
    for row, total, exponent in zip(values, totals, exponents, strict=True):
        np.multiply(total, 2.0 ** -int(exponent), out=row, dtype=np.float64, casting="same_kind")
    return values


def weighted_sums(values: list[Vector], weights: npt.ArrayLike) -> Matrix:
    """The (K, P) weighted sums of models that are all at hand.

    >>> weighted_sums([np.float32([1, 2]), np.float32([3, 6])], [[0.5, 0.5]]).tolist()
    [[2.0, 4.0]]
    """
    matrix = np.asarray(weights, np.float64)
    magnitudes = [float(np.max(np.abs(value), initial=0.0)) for value in values]
    exponents = fixed_point_exponents(matrix, magnitudes)
    return from_fixed_point(partial_sums(values, matrix, exponents, len(values[0])), exponents)
