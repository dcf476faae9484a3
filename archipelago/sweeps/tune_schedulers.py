"""Ray Tune's schedulers where a sweep needs them otherwise: a population, and the median rule."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ray.tune.experiment import Trial as Member
from ray.tune.schedulers import MedianStoppingRule, PopulationBasedTraining, TrialScheduler

from archipelago.sweeps.distributions import distribution, parse_distribution
from archipelago.sweeps.samplers import Goal


def population(goal: Goal, interval: int) -> Population:
    """A population that explores the space of a sweep."""
    space = {key: parse_distribution(key, text) for key, text in goal.space.items()}
    return Population(
        time_attr="training_iteration", metric=goal.metric, mode=goal.mode, synch=True,
        perturbation_interval=interval, log_config=False,
        hyperparam_mutations={"payload": {"values": {key: _mutation(*each) for key, each in space.items()}}},
        custom_explore_fn=functools.partial(_kept_inside, space),
    )  # fmt: skip


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
    next member that reports; but after a resume some are ahead of others, and the one that was waited for may be over
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
    """The median rule for trials that are stopped or continue: Tune's own pauses those it cannot judge yet.

    A pause needs a state that is saved at that very round, and gains nothing here: whoever is paused has to be
    finished anyway.
    """

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial that failed before its first report has nothing to compare with."""
        if self._metric in result:
            super().on_trial_complete(tune_controller, trial, result)
