"""Schedulers: which trials of a sweep are stopped early, paused, or take over the state of others.

A scheduler of your own is a subclass of `Scheduler` in a module of your own, chosen by
`sweep.scheduler=package.module.Mine` or registered under a name in a plug-in; `make` returns any scheduler of Ray Tune.
What the platform must know about it is in its class attributes; nothing here imports Ray before a sweep begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import setting
from archipelago.sweeps.samplers import Goal

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler


class Scheduler(ABC):
    """Decides about trials by the metric that they report after each evaluation; it never sees test data.

    `stops`: trials of a combination compete, and some are ended early. After a resume, what a trial reported before
    is reported again, so that the scheduler knows what it knew.
    `pauses`: trials wait for each other, so that each needs a checkpoint of every round that it reports.
    `exchanges`: trials of one combination and seed are a population that hands states and values from one to
    another; it needs a sampler whose points are known beforehand. It pauses, too.
    """

    Options: ClassVar[type] = NoOptions
    stops: ClassVar[bool] = False
    pauses: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False

    def __init__(self, options: Any, goal: Goal) -> None:
        self.options, self.goal = options, goal

    @property
    def decides(self) -> bool:
        """Whether anything depends on what trials report."""
        return self.stops or self.pauses or self.exchanges

    @property
    def needs_states(self) -> bool:
        """Whether the state of a trial must be at hand after each report, for any node."""
        return self.pauses or self.exchanges

    @property
    def replays(self) -> bool:
        """Whether reports of an earlier process are reported again after a resume."""
        return self.stops and not self.exchanges

    @abstractmethod
    def make(self, rounds: int) -> TrialScheduler:
        """Ray Tune's scheduler for trials of so many rounds; `training_iteration` is the round of a report."""


SCHEDULERS: Registry[type[Scheduler]] = Registry("scheduler", section="sweep", base=Scheduler)


@dataclass(frozen=True)
class GraceOptions:
    """What every rule that stops trials has."""

    grace: int = setting(5, "asha, median: rounds that every trial is given", at_least=1)


@dataclass(frozen=True)
class AshaOptions(GraceOptions):
    """Options of ASHA."""

    reduction: int = setting(3, "asha: one in this many trials continues at each rung", at_least=2)


@dataclass(frozen=True)
class PopulationOptions:
    """Options of population based training."""

    interval: int = setting(5, "pbt: rounds between two exchanges", at_least=1)


@SCHEDULERS.register("none", "every trial runs to its end", label="none")
class NoScheduler(Scheduler):
    """First in, first out."""

    def make(self, rounds: int) -> TrialScheduler:
        """Tune's default."""
        from ray.tune.schedulers import FIFOScheduler

        return FIFOScheduler()


@SCHEDULERS.register("asha", "stops all but the best of each rung", label="ASHA")
class Asha(Scheduler):
    """Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020."""

    Options = AshaOptions
    stops = True

    def make(self, rounds: int) -> TrialScheduler:
        """One bracket, without pauses."""
        from ray.tune.schedulers import AsyncHyperBandScheduler

        return AsyncHyperBandScheduler(
            time_attr="training_iteration", metric=self.goal.metric, mode=self.goal.mode, max_t=rounds,
            grace_period=min(self.options.grace, rounds), reduction_factor=self.options.reduction,
        )  # fmt: skip


@SCHEDULERS.register("median", "stops trials below the median of the others", label="median rule")
class MedianRule(Scheduler):
    """Golovin et al., Google Vizier, KDD 2017, section 3.2."""

    Options = GraceOptions
    stops = True

    def make(self, rounds: int) -> TrialScheduler:
        """Tune's rule, without pauses."""
        from archipelago.sweeps.tune_schedulers import Median

        return Median(
            time_attr="training_iteration", metric=self.goal.metric, mode=self.goal.mode,
            grace_period=self.options.grace,
        )  # fmt: skip


@SCHEDULERS.register(
    "pbt", "lets bad trials take over good ones' models and change their values", label="PBT"
)
class PopulationTraining(Scheduler):
    """Jaderberg et al., Population Based Training of Neural Networks, 2017."""

    Options = PopulationOptions
    exchanges = True

    def make(self, rounds: int) -> TrialScheduler:
        """Synchronous: members wait for each other before they exchange."""
        from archipelago.sweeps.tune_schedulers import population

        return population(self.goal, self.options.interval)
