"""How long a run needs to recover from a drift: rounds until a metric is back near where it was before."""

from __future__ import annotations

from typing import Any

# Columns that are watched: what it is called, and how a round's metrics say it (the first that is there counts).
WATCHED = {"recovery_time": ("micro_accuracy",), "recovery_time_ari": ("ari",)}


class Recovery:
    """Watches metrics from drift to drift.

    A metric has recovered with the first evaluation, after the round of a drift or later, at which it reaches `level`
    times what it was at the last evaluation before: in that very round, the recovery took 0 rounds. Until then there is
    no recovery time. If another drift comes before that, the level to reach stays and the count begins anew.
    """

    def __init__(self, level: float) -> None:
        self.level = level
        self.drift = 0  # round of the last drift; 0: none yet
        self.last: dict[str, float] = {}  # at the last evaluation
        self.before: dict[str, float] = {}  # at the last one before the drift
        self.took: dict[str, int] = {}

    def starts(self, round: int) -> None:
        """Data has changed before this round; what has not recovered from the drift before keeps its level."""
        lost = {name: level for name, level in self.before.items() if name not in self.took}
        self.drift, self.before, self.took = round, {**self.last, **lost}, {}

    def sees(self, round: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """The columns of a round; `metrics` are those that it has already."""
        found: dict[str, Any] = {}
        for name, columns in WATCHED.items():
            value = next((metrics[each] for each in columns if metrics.get(each) is not None), None)
            if value is None:
                continue
            if name in self.before and name not in self.took and value >= self.level * self.before[name]:
                self.took[name] = round - self.drift
            self.last[name] = float(value)
        if self.drift:
            found["rounds_since_drift"] = round - self.drift
            found |= {name: self.took.get(name) for name in WATCHED if name in self.before}
        return found

    def save_state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {
            "drift": self.drift,
            "last": dict(self.last),
            "before": dict(self.before),
            "took": dict(self.took),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `save_state`."""
        self.drift = int(state["drift"])
        self.last, self.before = (
            {name: float(value) for name, value in state[each].items()} for each in ("last", "before")
        )
        self.took = {name: int(value) for name, value in state["took"].items()}
