"""The handle of a call: models that stay where they were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archipelago.strategies.parameters import (
    Matrix,
    PartialSums,
    Vector,
    fixed_point_exponents,
    from_fixed_point,
    normalised_rows,
    one_hot,
    used_rows,
)
from archipelago.strategies.references import Indices, Models, Reference

if TYPE_CHECKING:
    from actors.fleet import Fleet

SUMS = 64e6  # bytes of partial sums that travel at a time


class Trained:
    """Models that clients made and that stayed where they were made, one for each of `ids`."""

    def __init__(
        self,
        view: Fleet,
        handle: str,
        objective: npt.NDArray[np.float64],
        magnitude: npt.NDArray[np.float64],
        start: Reference | None = None,
        steps: npt.NDArray[np.float64] | None = None,
        under: Sequence[Reference] = (),
    ) -> None:
        self.under = list(under)  # what the models were trained on top of, aligned with `ids`
        self._view, self.handle, self.ids = view, handle, view.ids
        self.start = start  # what a reference to this handle means for a client that did not arrive
        self.objective = objective
        self.arrived = np.isfinite(objective) & np.isfinite(magnitude)
        # Local steps of each client; none of one that did not take part, or where no training was.
        self.steps = np.zeros(len(view.ids)) if steps is None else np.nan_to_num(steps)
        self._magnitude = np.where(self.arrived, magnitude, 0.0)

    @property
    def slot(self) -> str:
        """What the call was for, the same in every round."""
        return self.handle.partition(":")[2]

    def some(self, at: Indices) -> Trained:
        """The same handle for some positions of `ids`, ascending."""
        view = self._view.select(self.ids[at])
        return Trained(view, self.handle, self.objective[at], self._magnitude[at], self.start, self.steps[at])

    def combine(self, weights: npt.ArrayLike, otherwise: Models | None = None) -> Models:
        """The (K, n) weighted means of the models: rows are normalised over the clients that arrived."""
        matrix = np.asarray(weights, np.float64)
        if matrix.ndim != 2 or matrix.shape[1] != len(self.ids):
            raise ValueError(f"expected a (K, {len(self.ids)}) weight matrix, got shape {matrix.shape}")
        matrix = normalised_rows(matrix * self.arrived)
        view = self._view
        view.ledger.up(self.handle, self.ids[matrix.any(axis=0)])
        if view.ledger.exposure is not None:
            view.ledger.exposure.sums(self.handle, matrix, self.ids)
        exponents = fixed_point_exponents(matrix, self._magnitude)
        values = np.zeros((len(matrix), view.spec.size), np.float32)
        for columns, (rows, sums) in self._sums(matrix, exponents):
            values[rows, columns] = from_fixed_point(sums, exponents[rows])
        for k in np.flatnonzero(~matrix.any(axis=1)):
            # An empty cluster has nothing to average: it keeps the model it had.
            if otherwise is None:
                raise ValueError(f"row {k} weighs nothing and there is no model to keep")
            values[k] = otherwise.values[k]
        return Models(values)

    def _seen(self) -> None:
        """Single models are looked at."""
        if self._view.ledger.exposure is not None:
            self._view.ledger.exposure.alone(self.handle)

    def _sums(
        self, weights: npt.NDArray[np.float64], exponents: npt.NDArray[np.int64]
    ) -> Iterator[tuple[slice, PartialSums]]:
        """Fixed-point sums over all clients, some columns at a time.

        No process ever holds more than a few pieces of `SUMS` bytes, whatever the number of models and blocks.
        """
        view = self._view
        clients = {b: at for b, at in view.participants().items() if weights[:, at].any()}
        if not clients:
            return
        size, width = view.spec.size, max(1, int(SUMS // (8 * len(used_rows(weights)))))
        pieces = [(start, min(start + width, size)) for start in range(0, size, width)]
        calls = (
            {b: (self.handle, view.names(at), weights[:, at], exponents, piece) for b, at in clients.items()}
            for piece in pieces
        )
        for piece, sums in zip(pieces, view._summed("combine", calls), strict=True):
            yield slice(*piece), sums

    def average(
        self,
        by: Indices | None = None,
        weights: npt.ArrayLike = 1.0,
        clusters: int | None = None,
        otherwise: Models | Vector | None = None,
    ) -> Any:
        """The weighted mean of all models (a vector), or of each cluster `by` (a `Models`)."""
        w = np.broadcast_to(np.asarray(weights, np.float64), self.ids.shape)
        if by is None:
            keep = None if otherwise is None else Models(np.asarray(otherwise)[None])
            return self.combine(w[None], keep)[0]
        if clusters is None:
            raise ValueError("averaging by cluster needs the number of clusters")
        return self.combine(one_hot(by, clusters, w), otherwise)  # type: ignore[arg-type]  # Models beside `by`

    def features(self, part: str) -> Matrix:
        """(n, d): the columns of a part of each model, in id order."""
        return self.gather(self._view.spec.columns(part))

    def gather(self, columns: npt.ArrayLike | None = None) -> Matrix:
        """(n, d): chosen columns of every model, in id order; zeros for a client that did not arrive."""
        chosen = None if columns is None else np.asarray(columns, np.int64)
        view = self._view
        view.ledger.up(self.handle, self.ids[self.arrived])
        self._seen()
        clients = view.participants()
        parts = view._reach(
            "columns", {b: (self.handle, view.names(at), chosen) for b, at in clients.items()}
        )
        width = view.spec.size if chosen is None else len(chosen)
        table = np.zeros((len(self.ids), width), np.float32)
        for b, at in clients.items():
            table[at] = parts[b]
        return table

    def chunks(self, memory: float = 256e6) -> Iterator[tuple[Indices, Matrix]]:
        """(columns, (n, columns) array) pieces of all models, none larger than `memory` bytes."""
        size = self._view.spec.size
        step = max(1, int(memory // (4 * max(len(self.ids), 1))))
        for at in range(0, size, step):
            columns = np.arange(at, min(at + step, size))
            yield columns, self.gather(columns)

    def distances(self, to: Reference) -> npt.NDArray[np.float64]:
        """Euclidean distance of each client's model to its reference."""
        self._seen()
        return self._view.distances(self.handle, to)
