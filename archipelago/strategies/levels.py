"""Levels of models whose outputs add up: which model of each level a client holds, also one that was never seen.

What a method of several levels (FeMAM) has beside its algorithm. Level 1 is one global model, a level without models on
the server is personal: the clients hold it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.strategies.base import UNASSIGNED, Strategy, lowest
from archipelago.strategies.interface import FleetView
from archipelago.strategies.references import Indices, Models, Prediction, Private, Reference

NOTHING = -2  # of a level whose model a client dropped, or never had
PERSONAL = "personal"


@dataclass(frozen=True)
class Timetable:
    """The rounds that levels may take: those scheduled, or a `share` for the first, the rest for the others alike."""

    levels: int
    rounds: int
    share: float
    schedule: Sequence[int] = ()

    def deadline(self, level: int) -> int:
        """The last round of a level.

        >>> [Timetable(3, 10, 0.6).deadline(level) for level in range(3)]
        [6, 8, 10]
        """
        later = level / max(self.levels - 1, 1)
        return int(self.rounds * (self.share + (1.0 - self.share) * later) + 1e-9)

    def left(self, level: int, number: int) -> int:
        """Rounds that a level has which is added in round `number`, at most."""
        if level < len(self.schedule):
            return self.schedule[level]
        return (self.rounds if self.schedule else self.deadline(level)) - number + 1


class LevelledModels(Strategy):
    """A method whose clients predict with at most one model of each level."""

    private = True
    additive = True
    combine: ClassVar[Any] = "logit_mean"  # how the outputs of a client's models add up
    drops: ClassVar[Any] = True  # whether clients do without the levels that they pruned
    per_client: ClassVar[dict[str, float]] = {"assignment": UNASSIGNED, "rows": UNASSIGNED, "pruned": 0}
    state: ClassVar[tuple[str, ...]] = ("levels", "rows", "pruned")
    levels: list[Models | None]  # None: the personal level, which the clients hold
    rows: list[Indices]  # of each level: the model that each client id holds, UNASSIGNED where not known
    pruned: list[npt.NDArray[np.bool_]]  # of each level: the client ids that it did not help

    def setup(self, fleet: FleetView) -> None:
        self.levels, self.rows, self.pruned = [], [], []

    @property
    def newest(self) -> int:
        """The level that was added last."""
        return len(self.levels) - 1

    @property
    def shared(self) -> Models:
        """Level 1, the global model."""
        assert self.levels[0] is not None
        return self.levels[0]

    def add_level(self, start: Models | None) -> None:
        """A new level of these models, or a personal one; nobody holds a model of it yet, but of level 1."""
        clients, first = self.context.clients, not self.levels
        self.levels.append(None if start is None else Models(start.values.copy()))
        self.rows.append(np.full(clients, 0 if first else UNASSIGNED, np.int64))
        self.pruned.append(np.zeros(clients, bool))

    def dropped(self, level: int) -> npt.NDArray[np.bool_]:
        """Which client ids do without this level."""
        return self.pruned[level] & bool(self.drops)

    def structure(self, fleet: FleetView, count: int) -> list[Indices]:
        """C_l(i) of the first `count` levels: the model each client holds, negative where it holds none."""
        held: list[Indices] = []
        for level in range(count):
            rows = self.rows[level][fleet.ids].copy()
            rows[self.dropped(level)[fleet.ids]] = NOTHING
            held.append(self.completed(fleet, level, rows, held, may_skip=bool(self.drops)))
        return held

    def completed(
        self, fleet: FleetView, level: int, rows: Indices, below: list[Indices], may_skip: bool = False
    ) -> Indices:
        """`rows` with the model of least loss, for now, for clients that the level has not seen."""
        unseen = rows == UNASSIGNED
        if unseen.any():
            new, older = fleet.select(fleet.ids[unseen]), [each[unseen] for each in below]
            rows[unseen] = self.adopt(new, level, older, may_skip)
        return rows

    def adopt(self, fleet: FleetView, level: int, below: list[Indices], may_skip: bool) -> Indices:
        """What clients that a level has not seen get of it; nothing, if they may, where every model would hurt."""
        models = self.levels[level]
        if models is None:
            return np.full(len(fleet.ids), NOTHING, np.int64)
        if level == 0:  # the global model, which everyone has
            return np.zeros(len(fleet.ids), np.int64)
        older = self.references(below)
        tried = [self.training_loss(fleet, [*older, models[k]]) for k in range(len(models))]
        losses = np.stack(tried, axis=1)
        c = lowest(losses)
        if may_skip:
            c[losses[np.arange(len(c)), c] > self.training_loss(fleet, older)] = NOTHING
        return c

    def references(self, held: list[Indices]) -> list[Reference]:
        """The models of these levels as references, levels that nobody holds left out."""
        found: list[Reference] = []
        for level, rows in enumerate(held):
            models = self.levels[level]
            if (rows >= 0).any():
                found.append(Private(PERSONAL) if models is None else models[rows])
        return found

    def with_clients(self, held: list[Indices], first: bool) -> int:
        """How many of `references(held)` clients have from earlier rounds: all, in the `first` round after a level was
        closed all but that one."""
        there = [bool((rows >= 0).any()) for rows in held]
        return sum(there) - (first and bool(there) and there[-1])

    def training_loss(self, fleet: FleetView, models: list[Reference]) -> npt.NDArray[np.float64]:
        """Each client's training loss under the added models."""
        found = fleet.evaluate(Prediction(models, combine=self.combine), "train")
        return np.asarray(found["loss"], np.float64)

    def prediction(self, fleet: FleetView) -> Prediction:
        held = self.structure(fleet, len(self.levels))
        holds = np.stack([rows >= 0 for rows in held if (rows >= 0).any()], axis=1)
        # A dropped personal model is still in the client's hands: only a weight of 0 keeps it out.
        weights = holds.astype(np.float64) if self.dropped(self.newest)[fleet.ids].any() else None
        names = [f"level_{level + 1}" for level, rows in enumerate(held) if (rows >= 0).any()]
        return Prediction(
            self.references(held), weights, self.combine, names=names if len(names) > 1 else None
        )

    def describe(self, everyone: FleetView) -> None:
        """The structure, for the metrics table and the figures."""
        rows, pruned = np.stack(self.rows), np.stack(self.pruned)
        holds = (rows >= 0) & ~(pruned & bool(self.drops))
        self.report["levels"] = int(holds.any(axis=1).sum())
        self.report["models_per_client"] = float(holds.sum(axis=0)[everyone.ids].mean())
        levels, m = rows.shape
        self.records["levels"] = {
            "level": np.repeat(np.arange(1, levels + 1), m),
            "client": np.tile(np.arange(m), levels),
            "cluster": rows.ravel(),
            "pruned": pruned.ravel(),
        }

    def most_kept(self) -> int | None:
        """Of the levels with several models the one that most clients keep, the latest of equals; None: none."""
        several = [
            level for level, models in enumerate(self.levels) if models is not None and len(models) > 1
        ]
        kept = {level: int(((self.rows[level] >= 0) & ~self.pruned[level]).sum()) for level in several}
        return max(several, key=lambda level: (kept[level], level)) if several else None

    def validate(self, fleet: FleetView) -> npt.NDArray[np.float64]:
        """Validation losses by client id (training losses where nobody keeps such samples), NaN for clients without."""
        split = "validation" if self.context.has_validation else "train"
        found = fleet.evaluate(self.prediction(fleet), split)
        losses = np.full(self.context.clients, np.nan)
        measured = np.where(np.isnan(found["loss"]), np.inf, found["loss"])
        losses[fleet.ids] = np.where(found["samples"] > 0, measured, np.nan)
        return losses

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        held = [(level, models) for level, models in enumerate(self.levels) if models is not None]
        return {f"level{level + 1}": models.values for level, models in held}


def saturated(curve: npt.NDArray[np.float64], before: float, patience: int, threshold: float) -> bool:
    """Whether the best loss gained at most `threshold` of all that was gained, in the last `patience` rounds.

    `before` is the loss that the level began with; NaN: count from its first round. A level that has gained nothing
    ends when its best loss is `patience` rounds old. A loss that has hardly begun to fall never saturates.

    >>> fast = np.array([2.0, 1.0, 0.6, 0.58, 0.57])
    >>> saturated(fast, 2.3, 2, 0.05), saturated(fast[:4], 2.3, 2, 0.05)
    (True, False)
    >>> saturated(np.array([2.30, 2.29, 2.28, 2.27]), 2.31, 2, 0.05), saturated(np.array([1.0, 1.1, 1.2]), 0.9, 2, 0.05)
    (False, True)
    """
    if len(curve) <= patience:
        return False
    best = np.minimum.accumulate(np.where(np.isnan(curve), np.inf, curve))
    if not np.isfinite(best[-1 - patience]):
        return False
    began = curve[0] if np.isnan(before) else before
    return bool(best[-1 - patience] - best[-1] <= threshold * max(began - best[-1], 0.0))


def some_columns(count: int, most: int, seed: int) -> Indices:
    """`count` columns, or as many of them as `most`, the same throughout a run.

    >>> some_columns(3, 5, seed=0).tolist(), len(some_columns(9, 5, seed=0))
    ([0, 1, 2], 5)
    """
    if count <= most:
        return np.arange(count)
    return np.sort(generator(seed, "parameters that k-means sees").choice(count, most, replace=False))
