"""Which trial comes next, and which is stopped: Ray Tune's samplers and schedulers around a sweep's own list."""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ray.tune import Callback
from ray.tune.experiment import Trial as Member
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.sweeps.config import Sweep, Trial, distribution, domain, parse_distribution

_REDRAWS = 50  # times that a point may be drawn which was drawn before

Payload = Callable[[Trial], dict[str, Any]]


def scheduler_of(sweep: Sweep, rounds: int) -> TrialScheduler:
    """Tune's scheduler; it only ever sees figures on validation data, by round."""
    settings, mode = sweep.settings, sweep.mode
    if settings.scheduler == "asha":
        return AsyncHyperBandScheduler(
            time_attr="training_iteration", metric=settings.metric, mode=mode, max_t=rounds,
            grace_period=min(settings.grace, rounds), reduction_factor=settings.reduction,
        )  # fmt: skip
    if settings.scheduler == "median":
        return Median(
            time_attr="training_iteration", metric=settings.metric, mode=mode, grace_period=settings.grace
        )
    if settings.scheduler == "pbt":
        space = {key: parse_distribution(key, text) for key, text in sweep.space.items()}
        return Population(
            time_attr="training_iteration", metric=settings.metric, mode=mode, synch=True,
            perturbation_interval=settings.interval, log_config=False,
            hyperparam_mutations={"payload": {"values": {key: _mutation(*each) for key, each in space.items()}}},
            custom_explore_fn=functools.partial(_kept_inside, space),
        )  # fmt: skip
    return FIFOScheduler()


def _mutation(name: str, arguments: list[Any]) -> Any:
    """What Tune changes a value by: it moves along a list, and multiplies values of a distribution."""
    return arguments[0] if name == "choice" else distribution(name, arguments)


def _kept_inside(space: Mapping[str, tuple[str, list[Any]]], config: dict[str, Any]) -> dict[str, Any]:
    """The config that Tune came to, its values back inside the distributions: a product may lie anywhere."""
    values = config["payload"]["values"]
    for key, (name, arguments) in space.items():
        if name == "choice":
            continue
        low, high = arguments[:2]
        if name == "quniform":
            values[key] = round(values[key] / arguments[2]) * arguments[2]
        if name in ("randint", "lograndint"):  # without their upper bound
            values[key] = min(max(int(values[key]), low), high - 1)
        else:
            values[key] = float(min(max(values[key], low), high))
    return config


class Population(PopulationBasedTraining):
    """A population in which nobody waits for ever, and nobody skips rounds.

    Members wait for each other before they exchange states. In Tune's own rule those who wait are released by the
    next member that reports; but after a resume some are ahead of others, and whoever was waited for may be over
    before it reports again. A state from further ahead is not taken over: the rounds between would be nobody's.
    """

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """As Tune does; where all members wait and nobody is left to wait for, the next stretch begins."""
        live = tune_controller.get_live_trials()
        if live and all(trial.status == Member.PAUSED for trial in live):
            reached = min(self._trial_state[trial].last_train_time for trial in live)
            if reached >= self._next_perturbation_sync:
                self._next_perturbation_sync = reached + self._perturbation_interval
        return super().choose_trial_to_run(tune_controller)

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        ours, theirs = (self._trial_state[each].last_train_time for each in (trial, trial_to_clone))
        if theirs <= ours:
            super()._exploit(tune_controller, trial, trial_to_clone)


class Median(MedianStoppingRule):
    """The median rule for trials that are stopped or go on: Tune's own pauses those it cannot judge yet.

    A pause needs a state that is saved at that very round, and gains nothing here: whoever is paused has to be
    finished anyway.
    """

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial that failed before its first figure has nothing to compare with."""
        if self._metric in result:
            super().on_trial_complete(tune_controller, trial, result)


class Queue(Searcher):
    """Hands out trials that are known, in order, as soon as they may begin; then those that a study suggests."""

    def __init__(
        self,
        trials: Iterable[Trial],
        payload: Payload,
        study: Study | None = None,
        may_begin: Callable[[Trial], bool] = lambda trial: True,
    ) -> None:
        super().__init__()
        self._may_begin = may_begin
        self._ready = deque(trials)
        self._payload, self._study = payload, study
        self._given: dict[str, Trial] = {}

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
    ) -> bool:
        """The list is the space."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """The next trial; None if one must first be over."""
        if not self._ready and self._study is not None:
            self._ready.extend(self._study.next())
        if not self._ready:
            return Searcher.FINISHED
        trial = next((trial for trial in self._ready if self._may_begin(trial)), None)
        if trial is None:
            return None
        self._ready.remove(trial)
        self._given[trial_id] = trial
        return self._payload(trial)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """What a trial came to."""
        if self._study is not None:
            self._study.tell(self._given[trial_id], result or {})

    def save(self, checkpoint_path: str) -> None:
        """A sweep is resumed from its directory, not from Tune's own state."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps a copy to restore from, which a sweep never does: its directory says where it is."""
        return {}


class Watcher(Callback):
    """Keeps the sweep's directory and the live view up to date with what Tune does."""

    def __init__(self, sweep: Listener) -> None:
        self._sweep = sweep

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial has a process."""
        self._sweep.started(str(trial))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        """A trial has come further."""
        self._sweep.told(str(trial), result)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Tune is done with a trial."""
        self._sweep.over(str(trial), trial.last_result or {})

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial is begun again."""
        self._sweep.again(str(trial), _in_short(trial.get_error()))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial was begun again too often."""
        self._sweep.lost(str(trial), _in_short(trial.get_error()))

    def __getstate__(self) -> dict[str, Any]:
        """See `Queue`."""
        return {}


class Listener(Protocol):
    """Who wants to know; all but the first argument say what happened to the trial of that name."""

    def started(self, trial: str) -> None:
        """It has a process."""

    def told(self, trial: str, result: Mapping[str, Any]) -> None:
        """It has come further."""

    def over(self, trial: str, result: Mapping[str, Any]) -> None:
        """It is done with."""

    def again(self, trial: str, why: str) -> None:
        """It is begun again."""

    def lost(self, trial: str, why: str) -> None:
        """It is given up."""


def _in_short(error: Any) -> str:
    """Why Tune had to begin a trial again."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if (
        error is None
        or not lines
        or any("ActorDiedError" in line or "RayActorError" in line for line in lines)
    ):
        return "its process or node was lost"
    # The class of an exception says nothing to who reads a table.
    return re.sub(r"^(\w+\.)*ActorsLost: ", "its actors were lost: ", lines[-1])


class Study:
    """Optuna, through Ray Tune: every point it suggests becomes one trial for each seed, and learns their mean.

    `past` has what earlier processes drew: per group its values and the figures of its trials that are over.
    """

    def __init__(
        self,
        sweep: Sweep,
        label: str,
        past: Mapping[str, tuple[Mapping[str, Any], list[float]]],
        added: Callable[[list[Trial]], None],
    ) -> None:
        try:
            from ray.tune.search.optuna import OptunaSearch
        except ImportError as error:
            raise UserError(NO_OPTUNA) from error

        settings = sweep.settings
        self._sweep, self._label, self._added = sweep, label, added
        # Another stream after a stop: the first points of the same one are drawn already.
        draw = generator(settings.sampler_seed, "optuna", slot=label, round=len(past))
        self._optuna = OptunaSearch(
            space={key: domain(key, text) for key, text in sweep.space.items()},
            metric=settings.metric, mode=sweep.mode, seed=int(draw.integers(2**31)),
        )  # fmt: skip
        self._left = settings.samples - len(past)
        self._known = set(past)
        self._open: dict[
            str, tuple[str, list[float], int]
        ] = {}  # group -> (Optuna's id, figures, trials open)
        self._awaited: set[str] = set()  # trials that Optuna has not learnt of

    def resume(
        self, trials: Iterable[Trial], past: Mapping[str, tuple[Mapping[str, Any], list[float]]]
    ) -> None:
        """Points of an earlier process: Optuna learns of those that are over now, of the others when they are."""
        waiting: dict[str, int] = {}
        for trial in trials:
            waiting[trial.group] = waiting.get(trial.group, 0) + 1
            self._awaited.add(trial.name)
        for group, (values, figures) in past.items():
            if group in waiting:
                self._open[group] = ("", list(figures), waiting[group])
            elif figures:
                self._optuna.add_evaluated_point(dict(values), sum(figures) / len(figures))

    def next(self) -> list[Trial]:
        """The trials of the next point; none when all were given."""
        for attempt in range(_REDRAWS):
            if self._left <= 0:
                break
            name = f"point-{self._left}-{attempt}"
            values = self._optuna.suggest(name)
            if not isinstance(values, dict):
                break
            trials = [self._sweep.trial(self._label, values, seed) for seed in self._sweep.seeds]
            group = trials[0].group
            if group in self._known:  # drawn twice: it is not run twice
                self._optuna.on_trial_complete(name, error=True)
                continue
            self._left -= 1
            self._known.add(group)
            self._open[group] = (name, [], len(trials))
            self._awaited |= {trial.name for trial in trials}
            self._added(trials)
            return trials
        return []

    def tell(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """A trial is over; its point is, too, when all its seeds are. What a scheduler alone is told again is old."""
        if trial.name not in self._awaited:
            return
        self._awaited.remove(trial.name)
        name, figures, left = self._open[trial.group]
        value = result.get(self._sweep.settings.metric)
        if isinstance(value, int | float) and math.isfinite(value) and result.get("state") != "failed":
            figures.append(float(value))
        self._open[trial.group] = (name, figures, left - 1)
        if left > 1:
            return
        mean = sum(figures) / len(figures) if figures else None
        if name:
            told = {self._sweep.settings.metric: mean} if mean is not None else None
            self._optuna.on_trial_complete(name, result=told, error=mean is None)
        elif mean is not None:
            self._optuna.add_evaluated_point(dict(trial.values), mean)


NO_OPTUNA = (
    "Expected the package optuna for sweep.sampler=optuna, but it is not installed: pip install optuna, or use "
    "sweep.sampler=random."
)
