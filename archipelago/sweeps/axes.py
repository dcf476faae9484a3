"""The axes of a sweep: the entries of each, and the combinations that come of them.

    methods: [fedavg, ifca+cam, {label: FedAvg+, ensemble: ["fedavg*{clusters}"]}]
    data: [digits]            partitions: [iid, {partition: dirichlet, partition.alpha: 0.1}]
    clusters: [5, 10]         grid: {local.lr: [0.01, 0.1]}     cases: [{rounds: 5}, {rounds: 50}]

An entry is a value, or settings as a file holds them, with an optional `label`. Every combination of one entry from
each axis is a *combination*.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from archipelago.core.dotted import dotted
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.config import Given, fragment, layered, leaves, method_parts, methods_of, quote

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
    "partition_seeds": "seeds of the partition, or how many, each with every seed (default: a seed's own partition)",
}
MOST = 20_000  # trials; more are a mistake in the file rather than a wish
_PLACEHOLDER = "{clusters}"


@dataclass(frozen=True)
class Choice:
    """One entry of an axis: the settings it stands for and the words it is shown by."""

    label: str
    given: dict[str, Given]


Axes = Mapping[str, list[Choice]]


def read_seeds(value: Any, source: str, name: str = "seeds") -> list[int] | None:
    """The seeds that `sweep.seeds` (or another entry) lists or counts; None if it says nothing."""
    if value is None:
        return None
    if isinstance(value, int) and value > MOST:
        raise UserError(
            f"Expected at most {MOST} trials, got sweep.{name}={value} in '{source}': ask for fewer.",
            code="too-many", setting=f"sweep.{name}", given=value, most=MOST,
        )  # fmt: skip
    seeds = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value
    whole = isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or len(set(seeds)) < len(seeds):
        raise UserError(
            f"Expected sweep.{name} to be a list of different whole numbers, or how many, got {quote(value)} in "
            f"'{source}': as in [0, 1, 2], or 3.",
            code="wrong-type", setting=f"sweep.{name}", given=value,
        )  # fmt: skip
    return seeds


def read_axes(raw: Mapping[str, Any], source: str) -> dict[str, list[Choice]]:
    """The entries of every axis that a `sweep:` section has."""
    axes: dict[str, list[Choice]] = {}
    for name, (key, _) in AXES.items():
        if name in raw:
            axes[name] = [_choice(entry, key, source) for entry in _entries(raw[name], name, source)]
    for key, values in flat(raw.get("grid") or {}, "grid", source).items():
        if key in axes:
            raise UserError(
                f"Expected {key} in one axis, got it in sweep.{key} and sweep.grid: leave one out.",
                code="given-twice", setting=key,
            )  # fmt: skip
        entries = _entries(values, f"grid.{key}", source)
        axes[key] = [Choice(f"{key}={shown(value)}", fragment({key: value}, source)) for value in entries]
    if "cases" in raw:
        axes["cases"] = [_choice(entry, None, source) for entry in _entries(raw["cases"], "cases", source)]
    for name, choices in axes.items():
        labels = [choice.label for choice in choices]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise UserError(
                f"Expected every entry of sweep.{name} once, got '{twice}' twice: leave one out.",
                code="given-twice", setting=f"sweep.{name}", given=twice,
            )  # fmt: skip
    return axes


def _entries(value: Any, name: str, source: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f"Expected sweep.{name} to be a list with an entry at least, got {quote(value)} in '{source}': "
            "write it in brackets.",
            code="wrong-type", setting=f"sweep.{name}", given=value,
        )  # fmt: skip
    return value


def _choice(entry: Any, key: str | None, source: str) -> Choice:
    if not isinstance(entry, dict):
        if key is None:
            raise UserError(
                f"Expected an entry of sweep.cases to be settings, got {quote(entry)} in '{source}': as in "
                "{rounds: 5}.",
                code="wrong-type", setting="sweep.cases", given=entry,
            )  # fmt: skip
        chosen = {"ensemble": entry} if isinstance(entry, list) else {key: entry}
        return Choice(_label(chosen, key), fragment(chosen, source))
    content = dict(entry)
    label = content.pop("label", None)
    return Choice(str(label) if label is not None else _label(content, key), fragment(content, source))


def _label(content: Mapping[str, Any], key: str | None) -> str:
    words = []
    for name, value in flat(content, "", "").items():
        bare = name == key or name in ("method", "ensemble", "data", "partition") or name.endswith(".name")
        if name == "clusters" and key == "clusters":
            words.append(f"K={value}")
        else:
            words.append(shown(value) if bare else f"{name}={shown(value)}")
    return " ".join(words)


def shown(value: Any) -> str:
    """A value in the words of a label."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{','.join(shown(item) for item in value)}]"
    return str(value)


def flat(content: Any, name: str, source: str) -> dict[str, Any]:
    """Nested settings by dotted key, or a sentence about what is there instead."""
    if not isinstance(content, dict):
        raise UserError(
            f"Expected settings inside sweep.{name}, got {quote(content)} in '{source}'.",
            code="wrong-type", setting=f"sweep.{name}", given=content,
        )  # fmt: skip
    return dotted(content)


def sections(axes: Axes) -> set[str]:
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


def all_filled(layers: Sequence[Mapping[str, Given]]) -> list[dict[str, Given]]:
    """The layers with the number of clusters that they say, all together."""
    count = _value("clusters", layers, leaves(ExperimentSettings)["clusters"].default)
    return [{key: _filled(given, count) for key, given in layer.items()} for layer in layers]


def combinations(
    axes: Axes, of_file: dict[str, Given], of_overrides: dict[str, Given]
) -> Iterator[tuple[str, ExperimentSettings]]:
    """(label, config) of every combination of one entry from each axis."""
    may_idle = frozenset(sections(axes))
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
            layers = all_filled([of_file, *(choice.given for choice in parts), of_overrides])
            label = label or shown(methods_of(layers).value)
            config = with_label(functools.partial(layered, layers, may_idle), label, 2)
            if label in seen:
                raise UserError(
                    f"Expected different combinations, got '{label}' twice: give its entries labels.",
                    code="given-twice", setting="sweep", given=label,
                )  # fmt: skip
            seen.add(label)
            if len(seen) > MOST:
                raise UserError(
                    f"Expected at most {MOST} combinations, got more: leave out entries of an axis.",
                    code="too-many", setting="sweep", most=MOST,
                )  # fmt: skip
            yield label, config


def _value(key: str, layers: Sequence[Mapping[str, Given]], default: Any) -> Any:
    for layer in reversed(layers):
        if key in layer:
            return layer[key].value
    return default


def _numbers_of_clusters(axes: Axes, layers: Sequence[dict[str, Given]]) -> Sequence[Choice | None]:
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


def refuse_fixed(
    axes: Axes, space: Mapping[str, str], seeds: Mapping[str, str], fixed: Mapping[str, Given]
) -> None:
    """One thing is said in one place: an axis, the sampled space, or the command line; `seeds`: entry by setting."""
    owners: dict[str, str] = dict(seeds)
    for name, choices in axes.items():
        for key in {key for choice in choices for key in choice.given}:
            owner = name if name in AXES or name == "cases" else f"grid.{name}"
            if owners.setdefault(key, owner) != owner:
                raise UserError(
                    f"Expected {key} in one axis, got it in sweep.{owners[key]} and sweep.{owner}.",
                    code="given-twice", setting=key,
                )  # fmt: skip
    for key in space:
        if key in owners:
            raise UserError(
                f"Expected {key} in sweep.sample or in sweep.{owners[key]}, got both: leave one out.",
                code="given-twice", setting=key,
            )  # fmt: skip
    for key, given in fixed.items():
        if key in owners and not given.file:
            raise UserError(
                f"Expected sweep.{owners[key]}=[...] on the command line, got {key}={given.shown}: the sweep "
                f"varies it.",
                code="varied", setting=key,
            )  # fmt: skip


def with_label(action: Callable[[], Any], label: str, of: int) -> Any:
    """Do it; a mistake says in which combination it is."""
    try:
        return action()
    except UserError as error:
        if of < 2:
            raise
        raise error.rephrased(f"In the sweep's combination '{label}': {error}") from error
