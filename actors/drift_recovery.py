"""How long a run needs to recover from a drift: rounds until a metric is back near where it was before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from archipelago.core.metrics import Spec


def watched(specs: Iterable[Spec]) -> dict[str, str]:
    """Column -> the metric of a round whose recovery it counts; the first metric of clients gives the plain name.

    >>> from archipelago.core.metrics import specs
    >>> watched(specs())
    {'recovery_time': 'micro_accuracy', 'recovery_time_ari': 'ari'}
    """
    found: dict[str, str] = {}
    for spec in specs:
        if "recovery" in spec.shown:
            clients = spec.over == "clients"
            column = "recovery_time" if clients and not found else f"recovery_time_{spec.name}"
            found[column] = f"micro_{spec.name}" if clients else spec.name
    return found


class Recovery:
    """Watches metrics from drift to drift.

    A metric has recovered with the first evaluation, after the round of a drift or later, at which it reaches `level`
    times what it was at the last evaluation before: in that very round, the recovery took 0 rounds. Until then there is
    no recovery time. If another drift comes before that, the level to reach stays and the count begins anew.
    """

    def __init__(self, level: float, columns: Mapping[str, str]) -> None:
        self.level, self.columns = level, columns
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
        for name, metric in self.columns.items():
            if (value := metrics.get(metric)) is None:
                continue
            if name in self.before and name not in self.took and value >= self.level * self.before[name]:
                self.took[name] = round - self.drift
            self.last[name] = float(value)
        if self.drift:
            found["rounds_since_drift"] = round - self.drift
            found |= {name: self.took.get(name) for name in self.columns if name in self.before}
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
