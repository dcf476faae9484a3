"""What a sweep is asked to do, and the trials that come of it; found out before Ray starts.

    sweep:
      methods: [fedavg, ifca+cam]                   # axes (`axes.py`): every combination of one entry from each
      sample: {local.lr: "loguniform(0.001, 1)"}    # a distribution (`distributions.py`) for each setting
      sampler: random                               # which points are taken from them (`samplers.py`)
      scheduler: asha                               # which trials are stopped early (`schedulers.py`)
      seeds: [0, 1, 2]                              # of the start, and of its own partition
      partition_seeds: [0, 1]                       # each with every seed: partitions apart from starts

A combination with the values of a point is a *group*; with a seed it is a *trial*.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.registry import closest, nearest
from archipelago.core.schema import composed
from archipelago.core.settings import ExperimentSettings, SweepSection, SweepSettings
from archipelago.core.vocabulary import registered
from archipelago.experiments.config import (
    Given,
    check,
    fragment,
    full_schema,
    layered,
    leaves,
    read_layers,
    replaced,
)
from archipelago.experiments.given import import_named
from archipelago.experiments.readers import only_read, refuse_unread
from archipelago.sweeps.axes import (
    AXES,
    MOST,
    OTHERS,
    all_filled,
    combinations,
    flat,
    read_axes,
    read_seeds,
    refuse_fixed,
    sections,
    shown,
    with_label,
)
from archipelago.sweeps.distributions import check_whole_numbers, domain, parse_distribution
from archipelago.sweeps.samplers import SAMPLERS, Goal, Sampler
from archipelago.sweeps.schedulers import SCHEDULERS, Scheduler


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `values` are those of its point, and may be changed by a scheduler that exchanges."""

    name: str
    group: str
    seed: int
    config: ExperimentSettings
    combination: str
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Everything that was asked for. `document` is its YAML, from which `sweep_from` makes it again."""

    settings: SweepSettings
    base: ExperimentSettings
    combinations: dict[str, ExperimentSettings]  # by label, with the first seed
    seeds: list[int]
    partitions: list[int | None]  # seeds of the partition; None: the trial's own
    space: dict[str, str]  # setting -> distribution
    document: dict[str, Any]

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Says which points the combinations are run at."""
        entry = SAMPLERS.entry(self.settings.sampler)
        return entry.value(entry.options_from(self.settings), self._goal)

    @functools.cached_property
    def scheduler(self) -> Scheduler:
        """Says which trials are stopped early."""
        entry = SCHEDULERS.entry(self.settings.scheduler)
        return entry.value(entry.options_from(self.settings), self._goal)

    @property
    def _goal(self) -> Goal:
        return Goal(self.settings.metric, self.mode, self.space)

    @property
    def tunes(self) -> bool:
        """Whether anything is decided by what trials report."""
        return self.scheduler.decides or self.sampler.adaptive

    @property
    def chooses(self) -> bool:
        """Whether the best is found on validation data."""
        return bool(self.space) or self.tunes or self.settings.choose

    @property
    def mode(self) -> str:
        """max or min."""
        if self.settings.mode != "auto":
            return self.settings.mode
        return "max" if registered().column(self.settings.metric).higher_is_better else "min"

    def trials(self) -> list[Trial]:
        """Every trial that is known before the first one has run: all of them but those of an adaptive sampler."""
        return [] if self.sampler.adaptive else list(self._trials)

    @functools.cached_property
    def _trials(self) -> list[Trial]:
        found: list[Trial] = []
        for number, label in enumerate(self.combinations):
            for values in self.sampler.points(number):
                found += self.trials_of(label, values)
        return _with_unique_names(found)

    @property
    def planned(self) -> int:
        """How many trials the sweep will have."""
        return self.most if self.sampler.adaptive else len(self._trials)

    @property
    def most(self) -> int:
        """How many trials there are if no point is drawn twice."""
        return len(self.combinations) * self.sampler.count * self.repeats

    @property
    def repeats(self) -> int:
        """How many trials a group has: one for each partition and start."""
        return len(self.partitions) * len(self.seeds)

    def trials_of(self, label: str, values: Mapping[str, Any]) -> list[Trial]:
        """All trials of this combination at these values: every partition with every seed."""
        pairs = itertools.product(self.partitions, self.seeds)
        return [self.trial(label, values, seed, partition) for partition, seed in pairs]

    def trial(self, label: str, values: Mapping[str, Any], seed: int, partition: int | None = None) -> Trial:
        """A trial of this combination at these values."""
        config = dataclasses.replace(self.combinations[label], seed=seed)
        if partition is not None:
            config = dataclasses.replace(
                config, partition=dataclasses.replace(config.partition, seed=partition)
            )
        config = with_values(config, values)
        point = ", ".join(f"{key}={shown(value)}" for key, value in values.items())
        group = " | ".join(part for part in (label, point) if part)
        return Trial(_name(group, seed, partition), group, seed, config, label, dict(values))


# Reading ----------------------------------------------------------------------------------------------------


def load_sweep(
    file: Path | None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    small: bool = False,
) -> Sweep | None:
    """The sweep that a file and overrides ask for, every trial checked; None if they ask for one experiment."""
    of_file, of_overrides, raw = read_layers(file, overrides, small)
    if raw is None:
        return None
    return _build(of_file, of_overrides, raw, str(file) if file is not None else "sweep", env, full=True)


def sweep_from(document: Mapping[str, Any], source: str) -> Sweep:
    """The sweep that `Sweep.document` describes; what this machine can do is not asked again."""
    content = dict(document)
    return _build(
        fragment(content.get("settings") or {}, source), {}, dict(content["sweep"]), source, None, full=False
    )


def _build(
    of_file: dict[str, Given],
    of_overrides: dict[str, Given],
    raw: dict[str, Any],
    source: str,
    env: Mapping[str, str] | None,
    *,
    full: bool,
) -> Sweep:
    settings = _settings(raw, source)
    if full:
        refuse_unread(composed(SweepSection)(sweep=settings))
    axes = read_axes(raw, source)
    seeds = read_seeds(raw.get("seeds"), source)
    partitions = read_seeds(raw.get("partition_seeds"), source, "partition_seeds")
    given_seeds = {"seed": "seeds"} if seeds is not None else {}
    given_seeds |= {"partition.seed": "partition_seeds"} if partitions is not None else {}
    space = _space(raw.get("sample"), settings.sampler, source)
    refuse_fixed(axes, space, given_seeds, {**of_file, **of_overrides})
    found = only_read(dict(combinations(axes, of_file, of_overrides)))
    first = next(iter(found.values()))
    if full:
        for label, config in found.items():
            with_label(functools.partial(check, config, env), label, len(found))
    base = layered(all_filled([of_file, of_overrides]), frozenset(sections(axes)))
    settings_given = {key: given.value for key, given in {**of_file, **of_overrides}.items()}
    sweep = Sweep(
        settings,
        dataclasses.replace(base, fleet=first.fleet),
        found,
        seeds if seeds is not None else [first.seed],
        [None] if partitions is None else [*partitions],
        space,
        {"settings": settings_given, "sweep": raw},
    )
    _check_sweep(sweep)
    return sweep


def _settings(raw: Mapping[str, Any], source: str) -> SweepSettings:
    mine = {name: raw[name] for name in raw if name not in (*AXES, *OTHERS)}
    import_named({"sweep": mine})  # a sampler or scheduler at an import path brings options
    known = [key.removeprefix("sweep.") for key in leaves(composed(SweepSection))]
    for name in mine:
        if name not in known:
            raise UserError(
                f"Unknown setting 'sweep.{name}' in '{source}'. {nearest(name, [*AXES, *OTHERS, *known])}",
                code="unknown-setting", setting=f"sweep.{name}", nearest=closest(name, [*AXES, *OTHERS, *known]),
            )  # fmt: skip
    given = fragment({"sweep": mine}, source)
    values = {key.removeprefix("sweep."): each.value for key, each in given.items()}
    return composed(SweepSettings)(**values)


def _check_sweep(sweep: Sweep) -> None:
    settings, count = sweep.settings, sweep.most
    if count > MOST:
        raise UserError(
            f"Expected at most {MOST} trials, got {count}: leave out entries, seeds or samples.",
            code="too-many", setting="sweep", given=count, most=MOST,
        )  # fmt: skip
    tuned = sweep.chooses
    if tuned and not settings.metric.startswith("validation_"):
        raise UserError(
            f"Expected sweep.metric on validation data, got '{settings.metric}': tuning never looks at test data; "
            "write it as in validation_micro_accuracy.",
            code="test-data", setting="sweep.metric", given=settings.metric,
        )  # fmt: skip
    for label, config in sweep.combinations.items():
        if tuned and config.partition.validation <= 0:
            raise UserError(
                f"Expected partition.validation > 0 to tune on, got 0 in '{label}': tuning never looks at test "
                "data; keep some training samples aside, as in partition.validation=0.2.",
                code="needs-validation", setting="sweep.metric",
            )  # fmt: skip
    if sweep.tunes and sweep.base.fleet.backend == "in_process":
        raise UserError(
            f"Expected fleet.backend=ray beside sweep.scheduler={settings.scheduler} and "
            f"sweep.sampler={settings.sampler}, got in_process: trials that depend on each other need Ray Tune.",
            code="needs", setting="sweep.scheduler", needed="fleet.backend=ray",
        )  # fmt: skip
    if sweep.scheduler.exchanges and (not sweep.space or sweep.sampler.adaptive):
        raise UserError(
            f"Expected sweep.sample and sweep.sampler={_drawing(adaptive=False)} beside "
            f"sweep.scheduler={settings.scheduler}, got sweep.sampler={settings.sampler}: a population starts from "
            "drawn values and exchanges them.",
            code="needs", setting="sweep.scheduler", needed="sweep.sample",
        )  # fmt: skip
    sweep.sampler.check()


def _drawing(**also: bool) -> str:
    """Names of the samplers that take points from sweep.sample."""
    names = [
        name
        for name, entry in SAMPLERS.items()
        if entry.value.draws and all(getattr(entry.value, key) == value for key, value in also.items())
    ]
    return " or ".join(names)


def _space(value: Any, sampler: str, source: str) -> dict[str, str]:
    """The distribution of each setting in `sweep.sample`."""
    draws = SAMPLERS.find(sampler).draws
    if value is None:
        if draws:
            raise UserError(
                f"Expected sweep.sample beside sweep.sampler={sampler}, got none: say what to draw, as in "
                "sample: {local.lr: loguniform(0.001, 1)}.",
                code="needs", setting="sweep.sampler", needed="sweep.sample",
            )  # fmt: skip
        return {}
    space = {key: str(text) for key, text in flat(value, "sample", source).items()}
    if not draws:
        raise UserError(
            f"Expected sweep.sampler={_drawing()} beside sweep.sample, got {sampler}: choose one, or list the values "
            "in sweep.grid.",
            code="needs", setting="sweep.sample", needed="sweep.sampler",
        )  # fmt: skip
    for key, entry in (("seed", "seeds"), ("partition.seed", "partition_seeds")):
        if key in space:
            raise UserError(
                f"Expected seeds in sweep.{entry}, got sweep.sample.{key}={space[key]}: write sweep.{entry}=[...].",
                code="wrong-place", setting=f"sweep.sample.{key}", meant=f"sweep.{entry}",
            )  # fmt: skip
    known = leaves(full_schema())
    for key, text in space.items():
        _, arguments = parse_distribution(key, text)
        corners = arguments[0] if isinstance(arguments[0], list) else arguments[:2]
        for corner in corners:  # a value of the right kind and in range, whatever is drawn
            fragment({key: corner}, source)
        if key in known and known[key].type is int:
            check_whole_numbers(key, text)
        domain(key, text)  # or Tune would refuse it when the first point is drawn
    return space


def with_values(config: ExperimentSettings, values: Mapping[str, Any]) -> ExperimentSettings:
    """The config with drawn values in place of its own; their range was checked with the distribution's."""
    known = leaves(type(config))
    for key, value in values.items():
        config = replaced(config, key, int(value) if known[key].type is int else value)
    return config


# Names ------------------------------------------------------------------------------------------------------


def _name(group: str, seed: int, partition: int | None = None) -> str:
    """A name that a folder can have.

    >>> _name("ifca+cam | digits | K=4", 2), _name("ifca", 2, 7)
    ('ifca+cam-digits-k=4-seed2', 'ifca-partition7-seed2')
    """
    slug = re.sub(r"[^A-Za-z0-9.+=_]+", "-", group).strip("-.").lower() or "trial"
    if len(slug) > 90:
        slug = f"{slug[:80]}-{hashlib.blake2b(group.encode(), digest_size=4).hexdigest()}"
    return f"{slug}-seed{seed}" if partition is None else f"{slug}-partition{partition}-seed{seed}"


def _with_unique_names(trials: list[Trial]) -> list[Trial]:
    """The trials without those that were drawn twice; names that only look the same are made different."""
    unique: dict[str, Trial] = {}
    for trial in trials:
        name = trial.name
        if name in unique and unique[name].group != trial.group:
            name = f"{name}-{hashlib.blake2b(trial.group.encode(), digest_size=4).hexdigest()}"
        unique.setdefault(name, dataclasses.replace(trial, name=name))
    return list(unique.values())
