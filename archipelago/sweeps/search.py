"""Which trial comes next: Ray Tune's search algorithms around a sweep's own list, and what Tune says about trials."""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ray.tune import Callback, Stopper
from ray.tune.search import Searcher

from archipelago.sweeps.config import Sweep, Trial

_REDRAWS = 50  # times that a point may be chosen which was chosen before

Payload = Callable[[Trial], dict[str, Any]]


class Queue(Searcher):
    """Hands out trials that are known, in order, as soon as they may begin; then those that a study chooses."""

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
            self._study.learn(self._given[trial_id], result or {})

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
        self._sweep.reported(str(trial), result)

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


class StopAll(Stopper):
    """Ends every trial of a sweep as soon as `when` says so."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self._when = when

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No trial is ended for what it reports."""
        return False

    def stop_all(self) -> bool:
        """Whether no trial is to continue."""
        return self._when()

    def __getstate__(self) -> dict[str, Any]:
        """See `Queue`."""
        return {}


class Listener(Protocol):
    """Who wants to know; all but the first argument say what happened to the trial of that name."""

    def started(self, trial: str) -> None:
        """It has a process."""

    def reported(self, trial: str, result: Mapping[str, Any]) -> None:
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
    """An adaptive sampler in one combination: every point it suggests becomes one trial for each seed, and learns their
    mean.

    `past` has what earlier processes chose: per group its values and the metrics of its trials that are over.
    """

    def __init__(
        self,
        sweep: Sweep,
        label: str,
        past: Mapping[str, tuple[Mapping[str, Any], list[float]]],
        added: Callable[[list[Trial]], None],
    ) -> None:
        self._sweep, self._label, self._added = sweep, label, added
        self._searcher = sweep.sampler.searcher(label, len(past))
        self._left = sweep.sampler.count - len(past)
        self._known = set(past)
        self._open: dict[str, _Point] = {}  # by group
        self._awaited: set[str] = set()  # trials that the sampler has not learnt of

    def resume(
        self, trials: Iterable[Trial], past: Mapping[str, tuple[Mapping[str, Any], list[float]]]
    ) -> None:
        """Points of an earlier process: the sampler learns of those that are over now, of the others when they are."""
        waiting: dict[str, int] = {}
        for trial in trials:
            waiting[trial.group] = waiting.get(trial.group, 0) + 1
            self._awaited.add(trial.name)
        for group, (values, metrics) in past.items():
            if group in waiting:
                self._open[group] = _Point("", list(metrics), waiting[group])
            elif metrics:
                self._learn_earlier(values, sum(metrics) / len(metrics))

    def next(self) -> list[Trial]:
        """The trials of the next point; none when all were given."""
        for attempt in range(_REDRAWS):
            if self._left <= 0:
                break
            name = f"point-{self._left}-{attempt}"
            values = self._searcher.suggest(name)
            if not isinstance(values, dict):
                break
            trials = self._sweep.trials_of(self._label, values)
            group = trials[0].group
            if group in self._known:  # chosen twice: it is not run twice
                self._searcher.on_trial_complete(name, error=True)
                continue
            self._left -= 1
            self._known.add(group)
            self._open[group] = _Point(name, [], len(trials))
            self._awaited |= {trial.name for trial in trials}
            self._added(trials)
            return trials
        return []

    def learn(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """A trial is over; its point is, too, when all its seeds are. What a scheduler has reported again is old."""
        if trial.name not in self._awaited:
            return
        self._awaited.remove(trial.name)
        point, metric = self._open[trial.group], self._sweep.settings.metric
        value = result.get(metric)
        if isinstance(value, int | float) and math.isfinite(value) and result.get("state") != "failed":
            point.metrics.append(float(value))
        point.left -= 1
        if point.left:
            return
        mean = sum(point.metrics) / len(point.metrics) if point.metrics else None
        if point.name:
            learnt = {metric: mean} if mean is not None else None
            self._searcher.on_trial_complete(point.name, result=learnt, error=mean is None)
        elif mean is not None:
            self._learn_earlier(trial.values, mean)

    def _learn_earlier(self, values: Mapping[str, Any], mean: float) -> None:
        """Of a point that an earlier process chose; a search algorithm that takes none starts with an empty memory."""
        with contextlib.suppress(NotImplementedError):
            self._searcher.add_evaluated_point(dict(values), mean)


@dataclass
class _Point:
    """A point under way: the sampler's name for it, the metrics of its trials that are over, how many are not."""

    name: str
    metrics: list[float]
    left: int
