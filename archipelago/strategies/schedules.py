"""The clients' learning rate over rounds: `local.lr` times what `local.schedule=...` says of a round.

    local.schedule=step local.step_every=30 local.step_factor=0.1      local.schedule=exponential local.decay=0.99
    local.schedule=cosine local.floor=0.01 local.warmup=5              (warm-up goes with every schedule)

It acts on every local training and on every full-batch gradient step (FedSGD), whatever the method and the engine, and
on the learning rate of a module of the user's own too, as a factor. A schedule of your own is a subclass of `Schedule`
under `@SCHEDULES.register`, or named by its import path. So is any scheduler of torch, which counts rounds as epochs:

    local.schedule=torch.optim.lr_scheduler.CosineAnnealingLR local.schedule_options.T_max=20
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import LocalSettings, setting


class Schedule:
    """What the learning rate of a round is multiplied with. Subclasses give `factor`."""

    Options: ClassVar[type] = NoOptions
    takes_arguments: ClassVar[bool] = False  # reads local.schedule_options

    def __init__(self, options: Any, rounds: int, local: LocalSettings) -> None:
        self.options, self.rounds, self.local = options, rounds, local

    def factor(self, round: int) -> float:
        """Of round 1, 2, ..., `rounds`; after a warm-up, its rounds are not counted."""
        raise NotImplementedError(f"{type(self).__name__} has no factor")


class ScheduleRegistry(Registry[type[Schedule]]):
    """Schedules; an import path may lead to a scheduler of torch as well."""

    def adopt(self, path: str, about: str, found: Any) -> None:
        if isinstance(found, type) and issubclass(found, Schedule):
            super().adopt(path, about, found)
            return
        from torch.optim.lr_scheduler import LRScheduler

        if not (isinstance(found, type) and issubclass(found, LRScheduler)):
            raise UserError(
                f"Expected {self.kind} '{path}' to be a subclass of Schedule or of torch's LRScheduler, got {found!r}: "
                "name another one.",
                code="wrong-kind", kind=self.kind, name=path,
            )  # fmt: skip
        made = type(found.__name__, (TorchSchedule,), {"kind": found, "origin": found, "path": path})
        super().adopt(path, f"{found.__name__} of torch, a round as an epoch", made)


SCHEDULES: ScheduleRegistry = ScheduleRegistry("learning-rate schedule", section="local")


class Rates:
    """What `local.schedule` and `local.warmup` make of the learning rate, round by round."""

    def __init__(self, local: LocalSettings, rounds: int) -> None:
        self.warmup = local.warmup
        entry = SCHEDULES.entry(local.schedule)
        self.schedule = entry.value(entry.options_from(local), max(rounds - local.warmup, 1), local)

    def __call__(self, round: int) -> float:
        """The factor of a round; of what comes before the first round, that of the first."""
        round = max(round, 1)
        if round <= self.warmup:
            return round / (self.warmup + 1)  # the first round after the warm-up has the whole learning rate
        return self.schedule.factor(round - self.warmup)


LOOKED_AT = 10_000  # rounds whose learning rate is looked at before a run begins


def check_schedule(local: LocalSettings, rounds: int) -> None:
    """Refuse a schedule that cannot be made, or that leaves no learning rate to train with."""
    entry = SCHEDULES.entry(local.schedule)
    if local.schedule_options and not entry.value.takes_arguments:
        raise UserError(
            "Expected a scheduler of torch as local.schedule beside local.schedule_options, got "
            f"local.schedule={local.schedule}, which does not read it: leave local.schedule_options out.",
            code="unread", setting="local.schedule_options",
        )  # fmt: skip
    if local.warmup >= rounds:
        raise UserError(
            f"Expected local.warmup < rounds, got local.warmup={local.warmup} and rounds={rounds}: no round would have "
            "the whole learning rate.",
            code="out-of-range", setting="local.warmup", given=local.warmup,
        )  # fmt: skip
    rates = Rates(local, rounds)
    step = max(
        1, rounds // LOOKED_AT
    )  # a run of millions of rounds is looked at here and there, and at its end
    for round in (*range(1, rounds, step), rounds):
        if not (math.isfinite(factor := rates(round)) and factor >= 0):
            raise UserError(
                f"Expected a learning rate of at least 0 in every round, got {factor:g} times local.lr in round "
                f"{round} by local.schedule={local.schedule}: change its options.",
                code="out-of-range", setting="local.schedule", given=factor,
            )  # fmt: skip


@SCHEDULES.register("constant", "the same learning rate in every round")
class Constant(Schedule):
    """1."""

    def factor(self, round: int) -> float:
        return 1.0


@dataclass
class StepOptions:
    """`local.step_every=30 local.step_factor=0.1`"""

    step_every: int = setting(10, "schedule=step: rounds between two steps of the learning rate", at_least=1)
    step_factor: float = setting(0.1, "schedule=step: what a step multiplies the learning rate with", above=0)


@SCHEDULES.register("step", "multiplied by local.step_factor after every local.step_every rounds")
class Step(Schedule):
    """step_factor^floor((t - 1) / step_every)."""

    Options = StepOptions

    def factor(self, round: int) -> float:
        return float(self.options.step_factor ** ((round - 1) // self.options.step_every))


@dataclass
class ExponentialOptions:
    """`local.decay=0.99`"""

    decay: float = setting(
        0.99, "schedule=exponential: learning rate of a round by that of the last", above=0
    )


@SCHEDULES.register("exponential", "multiplied by local.decay after every round")
class Exponential(Schedule):
    """decay^(t - 1)."""

    Options = ExponentialOptions

    def factor(self, round: int) -> float:
        return float(self.options.decay ** (round - 1))


@dataclass
class CosineOptions:
    """`local.floor=0.01`"""

    floor: float = setting(
        0.0, "schedule=cosine: what it falls to, as part of local.lr", at_least=0, at_most=1
    )


@SCHEDULES.register("cosine", "half a cosine from local.lr towards local.floor (Loshchilov and Hutter 2017)")
class Cosine(Schedule):
    """floor + (1 - floor) (1 + cos(pi (t - 1) / T)) / 2: the last round still trains."""

    Options = CosineOptions

    def factor(self, round: int) -> float:
        floor = float(self.options.floor)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * (round - 1) / self.rounds))


class TorchSchedule(Schedule):
    """A scheduler of torch on an optimizer with `local.lr`, stepped once a round; it may set no more than that."""

    takes_arguments = True
    kind: ClassVar[type]
    path: ClassVar[str]

    def __init__(self, options: Any, rounds: int, local: LocalSettings) -> None:
        super().__init__(options, rounds, local)
        self._factors: list[float] = []

    def factor(self, round: int) -> float:
        if not self._factors:
            self._factors = self._all()
        return self._factors[min(round, len(self._factors)) - 1]

    def _all(self) -> list[float]:
        import warnings

        import torch

        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=self.local.lr, momentum=0.9)
        arguments: Mapping[str, Any] = self.local.schedule_options
        found = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there is no optimizer.step between its steps
                scheduler = self.kind(optimizer, **arguments)
                for _ in range(self.rounds):
                    found.append(float(optimizer.param_groups[0]["lr"]) / self.local.lr)
                    scheduler.step()
        except Exception as error:  # whatever torch or the user's own class says of its arguments
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"local.schedule={self.path} cannot be used with {dict(arguments)}: {cause}. Give its arguments as "
                "local.schedule_options.NAME=VALUE; one that needs a metric or a function cannot be used.",
                code="cannot-be-made", name=self.path,
            ) from error  # fmt: skip
        if optimizer.param_groups[0]["momentum"] != 0.9:
            raise UserError(
                f"Expected local.schedule={self.path} to change the learning rate alone, got one that changes the "
                "momentum too: set local.schedule_options.cycle_momentum=false.",
                code="wrong-kind", kind="scheduler", name=self.path,
            )  # fmt: skip
        return found
