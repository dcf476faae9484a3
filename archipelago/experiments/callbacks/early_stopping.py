"""Early stopping (Prechelt, "Early Stopping - But When?", 1998): end a run that no longer improves on validation data.

`callbacks=[early_stopping] early_stopping.patience=5 partition.validation=0.2`. The decision looks at the run's own
`metrics.csv` alone, so a run that is killed and resumed stops after the same round, with the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings, setting
from archipelago.experiments.callbacks.base import CALLBACKS, Callback, LiveRun

if TYPE_CHECKING:
    from actors.reports import RoundReport


@dataclass
class EarlyStoppingOptions:
    """`early_stopping.patience=5`."""

    metric: str = setting("validation_micro_loss", "what must improve: a metric on validation data")
    patience: int = setting(10, "evaluations without an improvement after which the run ends", at_least=1)
    min_delta: float = setting(0.0, "change that does not count as an improvement yet", at_least=0)
    mode: str = setting(
        "auto", "whether more is better; auto: as the metric says", choices=("auto", "max", "min")
    )


@CALLBACKS.register(
    "early_stopping", "end a run that no longer improves on validation data", label="early stopping"
)
class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row that are not better, by more than `min_delta`, than the best one."""

    Options = EarlyStoppingOptions

    def __init__(self, options: EarlyStoppingOptions | None = None) -> None:
        self.options = options or EarlyStoppingOptions()
        self._forget()

    @classmethod
    def check(cls, options: Any, config: ExperimentSettings) -> None:
        """Only validation data may decide when training ends."""
        if not options.metric.startswith("validation_"):
            raise UserError(
                f"Expected early_stopping.metric on validation data, got '{options.metric}': test data must not decide "
                "when training ends; write it as in validation_micro_loss.",
                code="test-data", setting="early_stopping.metric", given=options.metric,
            )  # fmt: skip
        if config.partition.validation <= 0:
            raise UserError(
                "Expected partition.validation > 0 for callbacks=[early_stopping], got 0: keep some training samples "
                "aside, as in partition.validation=0.2.",
                code="needs-validation", setting="callbacks",
            )  # fmt: skip

    def on_start(self, run: LiveRun) -> None:
        """Take in what an earlier process measured."""
        self._forget()
        for row in run.history:
            self._see(run, row["round"], row.get(self.options.metric))

    def on_rollback(self, run: LiveRun, round: int) -> None:
        """The rounds after `round` will be reported again."""
        self.on_start(run)

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """Compare with the best evaluation so far."""
        self._see(run, report.round, report.metrics.get(self.options.metric))

    def _forget(self) -> None:
        self._best: float | None = None
        self._best_round = 0
        self._worse = 0  # evaluations since

    def _see(self, run: LiveRun, round: int, value: Any) -> None:
        if not isinstance(value, int | float):  # not evaluated in this round
            return
        if self._improves(value):
            self._best, self._best_round, self._worse = float(value), round, 0
            return
        self._worse += 1
        if self._worse >= self.options.patience:
            best = "never a number" if self._best is None else f"{self._best:.6g} in round {self._best_round}"
            run.stop(
                f"Stopped early after round {round}: {self.options.metric} has not improved for {self._worse} "
                f"evaluation{'' if self._worse == 1 else 's'} (best: {best})."
            )

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        gain = value - self._best if self._more_is_better() else self._best - value
        return gain > self.options.min_delta

    def _more_is_better(self) -> bool:
        from archipelago.core.vocabulary import registered

        mode = self.options.mode
        return registered().column(self.options.metric).higher_is_better if mode == "auto" else mode == "max"
