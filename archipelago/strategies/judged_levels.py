"""When a level is done, and who keeps it: levels that are measured, closed one after the other, and pruned.

The part of FeMAM that watches losses; `saturated` (`levels.py`) is its test of convergence.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.strategies.interface import FleetView
from archipelago.strategies.levels import LevelledModels, Timetable, saturated


class JudgedLevels(LevelledModels):
    """Levels of which the newest is trained until it has converged; then clients that it did not help drop it.

    Its options: `schedule`, `patience`, `threshold`, `window`, `prune`.
    """

    per_client: ClassVar[dict[str, float]] = {
        **LevelledModels.per_client, "history": np.nan, "reference": np.nan,
    }  # fmt: skip
    state: ClassVar[tuple[str, ...]] = (
        *LevelledModels.state, "history", "reference", "curve", "before", "closed", "until",
    )  # fmt: skip
    plan: list[int]  # models of every level that there will be
    timetable: Timetable
    closed: bool  # whether the newest level has trained enough
    history: list[npt.NDArray[np.float64]]  # the newest level's validation losses by client id, latest last
    reference: npt.NDArray[np.float64] | None  # the same of the last level each client kept, a mean
    curve: npt.NDArray[np.float64]  # mean validation losses of the newest level, a round each
    before: float  # the same before it was added; NaN of level 1
    until: int  # the last round in which clients train the newest level each for itself, 0: none

    @property
    def trained(self) -> int:
        """Rounds of the newest level so far."""
        return len(self.curve)

    def judge(self, everyone: FleetView) -> None:
        """Measure the newest level; when it has converged, or the run ends, close it and prune."""
        if self.closed:
            return
        if self.number == 1 and not self.context.has_validation and self.watches:
            self.events.append(
                "There are no validation samples (partition.validation=0): FeMAM adds and prunes levels by "
                "training losses."
            )
        loss = np.nan
        if self.watches and self.number >= self.until:  # clients that train alone predict as before
            self.history = [*self.history, self.validate(everyone)][-self.options.window :]
            loss = self.report["stage_loss"] = float(np.nanmean(self.history[-1]))
        self.curve = np.append(self.curve, loss)
        if self.done():
            self.closed = True
            self.prune()
            if (level := self.most_kept()) is not None:
                self.assignment, self.K = self.rows[level].copy(), self.plan[level]
        missing = len(self.plan) - len(self.levels)
        if self.number >= self.context.rounds and missing:
            self.events.append(
                f"{missing} of {len(self.plan)} levels were never added: level {self.newest + 1} was still being "
                "trained; ask for more rounds, or set femam.schedule."
            )

    @property
    def watches(self) -> bool:
        """Whether validation losses decide anything."""
        return not self.options.schedule or self.options.prune != "none"

    def done(self) -> bool:
        """Whether the newest level has trained enough: by schedule, at its deadline, or because it has converged."""
        options, level, rounds = self.options, self.newest, self.context.rounds
        if self.number >= rounds:
            return True
        if options.schedule:
            return level < len(options.schedule) and self.trained >= options.schedule[level]
        if level + 1 == len(self.plan):
            return False  # there is nothing to make way for
        settled = saturated(self.curve, self.before, options.patience, options.threshold)
        if level == 0 and not settled and self.number >= self.timetable.deadline(level):
            self.events.append(
                f"Level 1 still improves, and its share of the rounds is over (femam.share={options.share:g}): the "
                "run may need more rounds, a larger local.lr, or femam.share=1."
            )
        return settled or self.number >= self.timetable.deadline(level)

    def prune(self) -> None:
        """Each client keeps the level only if it has lowered its loss below that of the last level it kept."""
        if not self.watches:
            return
        if not self.history:  # nobody has used the level yet
            return
        loss = np.mean(self.history, axis=0)
        if self.reference is None:  # the global level, which everyone keeps
            self.reference = loss
            return
        level, seen = self.newest, self.rows[self.newest] >= 0
        useless = seen & (loss >= self.reference) & (self.options.prune != "none")
        self.pruned[level] = useless
        self.reference = np.where(useless, self.reference, loss)
        if useless.any():
            kept = "would drop it, and keep using it (bookkeeping)"
            what = "drop it" if self.options.prune == "real" else kept
            self.events.append(
                f"Level {level + 1} did not lower the loss of {int(useless.sum())} of {int(seen.sum())} clients: "
                f"they {what}."
            )
