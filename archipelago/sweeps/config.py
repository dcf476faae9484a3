"""What a sweep is asked to do: its axes, and the trials that come of them; found out before Ray starts.

    methods: [fedavg, ifca+cam, {label: FedAvg+, ensemble: ["fedavg*{clusters}"]}]
    data: [digits]            partitions: [iid, {partition: dirichlet, partition.alpha: 0.1}]
    clusters: [5, 10]         grid: {local.lr: [0.01, 0.1]}
    seeds: [0, 1, 2]          sample: {local.lr: "loguniform(0.001, 1)"}     cases: [{rounds: 5}, {rounds: 50}]

An entry is a value, or settings as a file holds them, with an optional `label`. Every combination of one entry
from each axis is a *combination*; with values drawn for `sample` it is a *group*; with a seed it is a *trial*.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import nearest
from archipelago.core.settings import ExperimentSettings, SweepSection, SweepSettings
from archipelago.core.vocabulary import registered
from archipelago.experiments.config import (
    Given,
    check,
    fragment,
    full_schema,
    layered,
    leaves,
    method_parts,
    methods_of,
    quote,
    read_layers,
    replaced,
)

# The axes with names of their own, the setting that a plain value of each stands for, and what it is.
AXES = {
    "methods": ("method", "methods or ensembles to compare"),
    "data": ("data", "data sets"),
    "partitions": ("partition", "partitions"),
    "clusters": ("clusters", "numbers of clusters K; methods that use no K are run once"),
}
OTHERS = {
    "cases": "any settings that go together",
    "grid": "settings and the values of each, all combined",
    "sample": "settings and the distribution of each, as in loguniform(0.001, 1)",
    "seeds": "seeds, or how many: trials of the same group",
}
_PLACEHOLDER = "{clusters}"
_MOST = 20_000  # trials; more are a mistake in the file rather than a wish


@dataclass(frozen=True)
class Choice:
    """One entry of an axis: the settings it stands for and the words it is shown by."""

    label: str
    given: dict[str, Given]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `values` are those that a sampler drew, and may be changed by PBT."""

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
    space: dict[str, str]  # setting -> distribution
    document: dict[str, Any]

    @property
    def tunes(self) -> bool:
        """Whether anything is decided by what trials report."""
        return self.settings.scheduler != "none" or self.settings.sampler == "optuna"

    @property
    def mode(self) -> str:
        """max or min."""
        if self.settings.mode != "auto":
            return self.settings.mode
        return "max" if registered().column(self.settings.metric).higher_is_better else "min"

    def trials(self) -> list[Trial]:
        """Every trial that is known before the first one has run: all of them but those of Optuna."""
        return [] if self.settings.sampler == "optuna" else list(self._trials)

    @functools.cached_property
    def _trials(self) -> list[Trial]:
        points: list[dict[str, Any]] = [{}]
        found: list[Trial] = []
        for number, label in enumerate(self.combinations):
            if self.settings.sampler == "random":
                points = draw(self.space, self.settings.samples, self.settings.sampler_seed, number)
            for values, seed in itertools.product(points, self.seeds):
                found.append(self.trial(label, values, seed))
        return _with_unique_names(found)

    @property
    def planned(self) -> int:
        """How many trials the sweep will have."""
        return self.most if self.settings.sampler == "optuna" else len(self._trials)

    @property
    def most(self) -> int:
        """How many trials there are if no point is drawn twice."""
        points = 1 if self.settings.sampler == "grid" else self.settings.samples
        return len(self.combinations) * points * len(self.seeds)

    def trial(self, label: str, values: Mapping[str, Any], seed: int) -> Trial:
        """A trial of this combination at these values."""
        config = with_values(dataclasses.replace(self.combinations[label], seed=seed), values)
        shown = ", ".join(f"{key}={_shown(value)}" for key, value in values.items())
        group = " | ".join(part for part in (label, shown) if part)
        return Trial(_name(group, seed), group, seed, config, label, dict(values))


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
    axes = _axes(raw, source)
    seeds = _seeds(raw.get("seeds"), source)
    space = _space(raw.get("sample"), settings, source)
    _refuse_fixed(axes, space, seeds is not None, {**of_file, **of_overrides})
    combinations = dict(_combinations(axes, of_file, of_overrides))
    first = next(iter(combinations.values()))
    if full:
        for label, config in combinations.items():
            with_label(functools.partial(check, config, env), label, len(combinations))
    base = layered(_all_filled([of_file, of_overrides]), frozenset(_sections(axes)))
    settings_given = {key: given.value for key, given in {**of_file, **of_overrides}.items()}
    sweep = Sweep(
        settings,
        dataclasses.replace(base, fleet=first.fleet),
        combinations,
        seeds if seeds is not None else [first.seed],
        space,
        {"settings": settings_given, "sweep": raw},
    )
    _check_sweep(sweep)
    return sweep


def _settings(raw: Mapping[str, Any], source: str) -> SweepSettings:
    known = {key.removeprefix("sweep."): leaf for key, leaf in leaves(SweepSection).items()}
    names = [*AXES, *OTHERS, *known]
    for name in raw:
        if name not in names:
            raise UserError(f"Unknown setting 'sweep.{name}' in '{source}'. {nearest(name, names)}")
    given = fragment({"sweep": {name: raw[name] for name in raw if name in known}}, source)
    values = {key.removeprefix("sweep."): each.value for key, each in given.items()}
    return SweepSettings(**values)


def _seeds(value: Any, source: str) -> list[int] | None:
    if value is None:
        return None
    seeds = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value
    whole = isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or len(set(seeds)) < len(seeds):
        raise UserError(
            f"Expected sweep.seeds to be a list of different whole numbers, or how many, got {quote(value)} in "
            f"'{source}': as in [0, 1, 2], or 3."
        )
    return seeds


def _axes(raw: Mapping[str, Any], source: str) -> dict[str, list[Choice]]:
    axes: dict[str, list[Choice]] = {}
    for name, (key, _) in AXES.items():
        if name in raw:
            axes[name] = [_choice(entry, key, source) for entry in _entries(raw[name], name, source)]
    for key, values in _flat(raw.get("grid") or {}, "grid", source).items():
        if key in axes:
            raise UserError(
                f"Expected {key} in one axis, got it in sweep.{key} and sweep.grid: leave one out."
            )
        entries = _entries(values, f"grid.{key}", source)
        axes[key] = [Choice(f"{key}={_shown(value)}", fragment({key: value}, source)) for value in entries]
    if "cases" in raw:
        axes["cases"] = [_choice(entry, None, source) for entry in _entries(raw["cases"], "cases", source)]
    for name, choices in axes.items():
        labels = [choice.label for choice in choices]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise UserError(f"Expected every entry of sweep.{name} once, got '{twice}' twice: leave one out.")
    return axes


def _entries(value: Any, name: str, source: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f"Expected sweep.{name} to be a list with an entry at least, got {quote(value)} in '{source}': "
            "write it in brackets."
        )
    return value


def _choice(entry: Any, key: str | None, source: str) -> Choice:
    if not isinstance(entry, dict):
        if key is None:
            raise UserError(
                f"Expected an entry of sweep.cases to be settings, got {quote(entry)} in '{source}': as in "
                "{rounds: 5}."
            )
        chosen = {"ensemble": entry} if isinstance(entry, list) else {key: entry}
        return Choice(_label(chosen, key), fragment(chosen, source))
    content = dict(entry)
    label = content.pop("label", None)
    return Choice(str(label) if label is not None else _label(content, key), fragment(content, source))


def _label(content: Mapping[str, Any], key: str | None) -> str:
    flat = _flat(content, "", "")
    words = []
    for name, value in flat.items():
        bare = name == key or name in ("method", "ensemble", "data", "partition") or name.endswith(".name")
        if name == "clusters" and key == "clusters":
            words.append(f"K={value}")
        else:
            words.append(_shown(value) if bare else f"{name}={_shown(value)}")
    return " ".join(words)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{','.join(_shown(item) for item in value)}]"
    return str(value)


def _flat(content: Any, name: str, source: str, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"Expected settings inside sweep.{name}, got {quote(content)} in '{source}'.")
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= _flat(value, name, source, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


# Combinations -----------------------------------------------------------------------------------------------


def _sections(axes: Mapping[str, list[Choice]]) -> set[str]:
    """Names of the methods and add-ons that some trial runs: a file may hold options of each."""
    found: set[str] = set()
    for choice in itertools.chain.from_iterable(axes.values()):
        for key in ("method", "ensemble"):
            if key in choice.given and choice.given[key].value:
                found |= method_parts(_filled(choice.given[key], 1).value)
    return found


def _filled(given: Given, clusters: int) -> Given:
    """The setting with `{clusters}` replaced, in the members of an ensemble."""
    if isinstance(given.value, list):
        values = [
            item.replace(_PLACEHOLDER, str(clusters)) if isinstance(item, str) else item
            for item in given.value
        ]
        return dataclasses.replace(given, value=values)
    return given


def _all_filled(layers: Sequence[Mapping[str, Given]]) -> list[dict[str, Given]]:
    """The layers with the number of clusters that they say, all together."""
    count = _value("clusters", layers, leaves(ExperimentSettings)["clusters"].default)
    return [{key: _filled(given, count) for key, given in layer.items()} for layer in layers]


def _combinations(
    axes: Mapping[str, list[Choice]], of_file: dict[str, Given], of_overrides: dict[str, Given]
) -> Iterator[tuple[str, ExperimentSettings]]:
    sections = frozenset(_sections(axes))
    seen: set[str] = set()
    names = [name for name in axes if name != "clusters"]
    for chosen in itertools.product(*(axes[name] for name in names)):
        picked = dict(zip(names, chosen, strict=True))
        for clusters in _numbers_of_clusters(axes, [of_file, *(each.given for each in chosen), of_overrides]):
            parts = [*chosen, *([clusters] if clusters is not None else [])]
            label = " | ".join(
                choice.label
                for name, choice in [*picked.items(), ("clusters", clusters)]
                if choice is not None and (name in ("methods", "cases") or len(axes[name]) > 1)
            )
            layers = _all_filled([of_file, *(choice.given for choice in parts), of_overrides])
            label = label or _shown(methods_of(layers).value)
            config = with_label(functools.partial(layered, layers, sections), label, 2)
            if label in seen:
                raise UserError(
                    f"Expected different combinations, got '{label}' twice: give its entries labels."
                )
            seen.add(label)
            if len(seen) > _MOST:
                raise UserError(
                    f"Expected at most {_MOST} combinations, got more: leave out entries of an axis."
                )
            yield label, config


def _value(key: str, layers: Sequence[Mapping[str, Given]], default: Any) -> Any:
    for layer in reversed(layers):
        if key in layer:
            return layer[key].value
    return default


def _numbers_of_clusters(
    axes: Mapping[str, list[Choice]], layers: Sequence[dict[str, Given]]
) -> Sequence[Choice | None]:
    """The entries of the clusters axis; a method that uses no K is not run once for each of them."""
    if "clusters" not in axes:
        return [None]
    methods = methods_of(layers).value
    if _PLACEHOLDER in str(methods):
        return axes["clusters"]
    from archipelago.strategies import METHODS, expand, parse_method

    members = expand(methods) if isinstance(methods, list) else [methods]
    bases = [METHODS.find(parse_method(str(member))[0]) for member in members]
    uses = any(base.clustered or base.reads_clusters for base in bases)
    return axes["clusters"] if uses else [None]


def _refuse_fixed(
    axes: Mapping[str, list[Choice]], space: Mapping[str, str], seeds: bool, fixed: Mapping[str, Given]
) -> None:
    """One thing is said in one place: an axis, the sampled space, or the command line."""
    owners: dict[str, str] = {"seed": "seeds"} if seeds else {}
    for name, choices in axes.items():
        for key in {key for choice in choices for key in choice.given}:
            owner = name if name in AXES or name == "cases" else f"grid.{name}"
            if owners.setdefault(key, owner) != owner:
                raise UserError(
                    f"Expected {key} in one axis, got it in sweep.{owners[key]} and sweep.{owner}."
                )
    for key in space:
        if key in owners:
            raise UserError(
                f"Expected {key} in sweep.sample or in sweep.{owners[key]}, got both: leave one out."
            )
    for key, given in fixed.items():
        if key in owners and not given.file:
            raise UserError(
                f"Expected sweep.{owners[key]}=[...] on the command line, got {key}={given.shown}: the sweep "
                f"varies it."
            )


def with_label(action: Callable[[], Any], label: str, of: int) -> Any:
    """Do it; a mistake says in which combination it is."""
    try:
        return action()
    except UserError as error:
        if of < 2:
            raise
        raise UserError(f"In the sweep's combination '{label}': {error}") from error


def _check_sweep(sweep: Sweep) -> None:
    settings, count = sweep.settings, sweep.most
    if count > _MOST:
        raise UserError(f"Expected at most {_MOST} trials, got {count}: leave out entries, seeds or samples.")
    tuned = bool(sweep.space) or sweep.tunes
    if tuned and not settings.metric.startswith("validation_"):
        raise UserError(
            f"Expected sweep.metric on validation data, got '{settings.metric}': tuning never looks at test data; "
            "write it as in validation_micro_accuracy."
        )
    for label, config in sweep.combinations.items():
        if tuned and config.partition.validation <= 0:
            raise UserError(
                f"Expected partition.validation > 0 to tune on, got 0 in '{label}': tuning never looks at test "
                "data; keep some training samples aside, as in partition.validation=0.2."
            )
    if sweep.tunes and sweep.base.fleet.backend == "in_process":
        raise UserError(
            f"Expected fleet.backend=ray beside sweep.scheduler={settings.scheduler} and "
            f"sweep.sampler={settings.sampler}, got in_process: trials that depend on each other need Ray Tune."
        )
    if settings.scheduler == "pbt" and (not sweep.space or settings.sampler != "random"):
        raise UserError(
            "Expected sweep.sample and sweep.sampler=random beside sweep.scheduler=pbt, got "
            f"sweep.sampler={settings.sampler}: a population starts from drawn values and exchanges them."
        )


# Sampling ---------------------------------------------------------------------------------------------------


def _space(value: Any, settings: SweepSettings, source: str) -> dict[str, str]:
    if value is None:
        if settings.sampler != "grid":
            raise UserError(
                f"Expected sweep.sample beside sweep.sampler={settings.sampler}, got none: say what to draw, as in "
                "sample: {local.lr: loguniform(0.001, 1)}."
            )
        return {}
    space = {key: str(text) for key, text in _flat(value, "sample", source).items()}
    if settings.sampler == "grid":
        raise UserError(
            "Expected sweep.sampler=random or optuna beside sweep.sample, got grid: choose one, or list the values in "
            "sweep.grid."
        )
    if "seed" in space:
        raise UserError(
            f"Expected seeds in sweep.seeds, got sweep.sample.seed={space['seed']}: write sweep.seeds=[...]."
        )
    for key, text in space.items():
        _, arguments = parse_distribution(key, text)
        corners = arguments[0] if isinstance(arguments[0], list) else arguments[:2]
        for corner in corners:  # a value of the right kind and in range, whatever is drawn
            fragment({key: corner}, source)
        _check_whole(key, text)
        domain(key, text)  # or Tune would refuse it when the first point is drawn
    return space


def _check_whole(key: str, text: str) -> None:
    """What is drawn for a whole number is one: a trial is known by its values, and 5.37 and 5.12 would both be 5."""
    name, arguments = parse_distribution(key, text)
    whole = name == "quniform" and all(float(each).is_integer() for each in arguments)
    leaf = leaves(full_schema()).get(key)
    if leaf is not None and leaf.type is int and name in ("uniform", "loguniform", "quniform") and not whole:
        instead = "lograndint" if name == "loguniform" else "randint"
        raise UserError(
            f"Expected a distribution of whole numbers for sweep.sample.{key}, got {quote(text)}: use {instead}(low, "
            "high), whose high is left out, or choice([...])."
        )


_KINDS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "lograndint": 2, "choice": 1}


def parse_distribution(key: str, text: str) -> tuple[str, list[Any]]:
    """(name, arguments) of `loguniform(0.001, 1)` or `choice([16, 32])`.

    >>> parse_distribution("local.lr", "loguniform(1e-3, 1)")
    ('loguniform', [0.001, 1])
    """
    from omegaconf import OmegaConf

    found = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text)
    name = found.group(1) if found else ""
    try:
        listed: Any = OmegaConf.to_container(OmegaConf.create(f"value: [{found.group(2) if found else ''}]"))
        arguments = listed["value"]
    except Exception:  # whatever a YAML reader says about what is no YAML
        arguments = []
    numbers = name == "choice" or all(isinstance(each, int | float) for each in arguments)
    if len(arguments) != _KINDS.get(name, -1) or not numbers or (name == "choice" and not arguments[0]):
        raise UserError(
            f"Expected a distribution for sweep.sample.{key}, got {quote(text)}: one of uniform(low, high), "
            "loguniform(low, high), quniform(low, high, step), randint(low, high), lograndint(low, high), "
            "choice([...])."
        )
    if name != "choice" and not arguments[0] < arguments[1]:
        raise UserError(f"Expected low < high in sweep.sample.{key}, got {quote(text)}.")
    return name, arguments


def domain(key: str, text: str) -> Any:
    """Ray Tune's object for a distribution."""
    try:
        return distribution(*parse_distribution(key, text))
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"Expected a distribution that Ray Tune can draw from for sweep.sample.{key}, got {quote(text)}: "
            f"{' '.join(str(error).split())}"
        ) from error


def distribution(name: str, arguments: Sequence[Any]) -> Any:
    """Ray Tune's object for a distribution that was parsed."""
    from ray import tune

    return getattr(tune, name)(*arguments)


def draw(space: Mapping[str, str], count: int, seed: int, combination: int) -> list[dict[str, Any]]:
    """`count` points, drawn by Ray Tune's own distributions from a stream of the sweep's seed."""
    stream = generator(seed, "sweep samples", client=combination)
    domains = {key: domain(key, text) for key, text in space.items()}
    return [
        {key: _plain(each.sample(random_state=stream)) for key, each in domains.items()} for _ in range(count)
    ]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def with_values(config: ExperimentSettings, values: Mapping[str, Any]) -> ExperimentSettings:
    """The config with drawn values in place of its own; their range was checked with the distribution's."""
    known = leaves(type(config))
    for key, value in values.items():
        config = replaced(config, key, int(value) if known[key].type is int else value)
    return config


# Names ------------------------------------------------------------------------------------------------------


def _name(group: str, seed: int) -> str:
    """A name that a folder can have.

    >>> _name("ifca+cam | digits | K=4", 2)
    'ifca+cam-digits-k=4-seed2'
    """
    slug = re.sub(r"[^A-Za-z0-9.+=_]+", "-", group).strip("-.").lower() or "trial"
    if len(slug) > 90:
        slug = f"{slug[:80]}-{hashlib.blake2b(group.encode(), digest_size=4).hexdigest()}"
    return f"{slug}-seed{seed}"


def _with_unique_names(trials: list[Trial]) -> list[Trial]:
    """The trials without those that were drawn twice; names that only look the same are told apart."""
    unique: dict[str, Trial] = {}
    for trial in trials:
        name = trial.name
        if name in unique and unique[name].group != trial.group:
            name = f"{name}-{hashlib.blake2b(trial.group.encode(), digest_size=4).hexdigest()}"
        unique.setdefault(name, dataclasses.replace(trial, name=name))
    return list(unique.values())
