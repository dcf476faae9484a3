"""What an experiment may be asked to do: one typed schema, merged from defaults, a YAML file and overrides.

The schema is `archipelago.core.settings.ExperimentSettings` plus one section for every method and add-on that has
options of its own. Whatever is wrong with what was asked for is one `UserError` sentence, found here, before
Ray is imported: an unknown key, a value of the wrong type, a value out of range (ranges are data of the
schema), or a combination that makes no sense (`check`).
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML ships no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from archipelago.core.errors import UserError
from archipelago.core.registry import nearest
from archipelago.core.settings import ExperimentSettings, SweepSection
from archipelago.runs.storage import check_address, is_address

AUTO = ("clusters", "auto")  # is short for choose_clusters=true
NAMED = ("data", "partition", "model", "aggregation")  # `data=digits` is short for `data.name=digits`

# Two ways of saying one thing: both at once is a mistake, and an override replaces the file's choice.
EITHER_OR = (
    ("local.steps", "local.epochs"),
    ("fleet.actors", "fleet.clients_per_actor"),
    ("method", "ensemble"),
)

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    object: "a value",
}
_LIST_NAMES = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}
_SMALLEST_SHARE = 1e-4  # Ray counts resources in ten-thousandths


# The schema -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One setting: its dotted key, its type, its default and what it may be."""

    key: str
    type: type
    many: bool
    optional: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def about(self) -> str:
        """The one line that explains the setting."""
        return str(self.metadata.get("about", ""))

    @property
    def kind(self) -> str:
        """The type in words."""
        if self.type is dict:
            return f"a section of its own, as in {self.key}.NAME=VALUE"
        if self.many:
            example = f", such as {quote(self.default)}" if self.default else ""
            return f"a list of {_LIST_NAMES[self.type]} in brackets{example}"
        return _TYPE_NAMES[self.type] + (" or null" if self.optional else "")

    @property
    def range(self) -> str:
        """What the setting may be, as a formula or a list of choices; empty if all of its type will do.

        >>> leaves(ExperimentSettings)["participation.fraction"].range
        '0 < participation.fraction <= 1'
        >>> leaves(ExperimentSettings)["local.lr"].range
        'local.lr > 0'
        """
        limits = self.metadata
        if "choices" in limits:
            return f"{self.key} to be one of {', '.join(limits['choices'])}"
        name = f"every number of {self.key}" if self.many else self.key
        low = limits.get("above", limits.get("at_least"))
        high = limits.get("below", limits.get("at_most"))
        if low is None and high is None:
            return ""
        if high is None:
            return f"{name} {'>' if 'above' in limits else '>='} {low:g}"
        right = f"{name} {'<' if 'below' in limits else '<='} {high:g}"
        return right if low is None else f"{low:g} {'<' if 'above' in limits else '<='} {right}"

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type lies in the range."""
        limits = self.metadata
        items = [item for item in (value if self.many else [value]) if item is not None]
        return all(
            ("choices" not in limits or item in limits["choices"])
            and ("at_least" not in limits or item >= limits["at_least"])
            and ("above" not in limits or item > limits["above"])
            and ("at_most" not in limits or item <= limits["at_most"])
            and ("below" not in limits or item < limits["below"])
            for item in items
        )


def full_schema() -> type[ExperimentSettings]:
    """`ExperimentSettings` plus one section for each method and add-on with options (`fedprox.mu=...`)."""
    from archipelago.strategies import ADDONS, METHODS  # imports torch: only when it is needed

    sections: dict[str, type] = {}
    for registry in (METHODS, ADDONS):
        for name, entry in registry.items():
            section = getattr(entry.value, "Options", None)
            if section is not None and dataclasses.fields(section):
                sections[name] = section
    return _schema_with(tuple(sections.items()))


@lru_cache
def _schema_with(sections: tuple[tuple[str, type], ...]) -> type[ExperimentSettings]:
    for name, _ in sections:
        if name in _core_sections():
            raise ValueError(f"method {name!r} has options, but {name!r} is a section of every experiment")
    fields = [(name, section, dataclasses.field(default_factory=section)) for name, section in sections]
    schema = dataclasses.make_dataclass("Settings", fields, bases=(ExperimentSettings,))
    schema.__module__ = (
        __name__  # pickles find it as archipelago.experiments.config.Settings, see __getattr__
    )
    schema.__doc__ = ExperimentSettings.__doc__
    return schema


def __getattr__(name: str) -> Any:
    if name == "Settings":  # so that a config can be unpickled in any process that can import this module
        return full_schema()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LEAVES: dict[type, Mapping[str, Leaf]] = {}


def leaves(schema: type) -> Mapping[str, Leaf]:
    """Every setting of a schema by its dotted key, in the order of the schema.

    >>> leaves(ExperimentSettings)["local.lr"].default
    0.05
    """
    if schema not in _LEAVES:
        _LEAVES[schema] = types.MappingProxyType({leaf.key: leaf for leaf in _walk(schema, "")})
    return _LEAVES[schema]


def _walk(schema: type, prefix: str) -> Iterator[Leaf]:
    hints = typing.get_type_hints(schema)
    defaults = schema()
    for field in dataclasses.fields(schema):
        key, kind = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{key}.")
            continue
        optional = type(None) in typing.get_args(kind)
        if optional:
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
        many = typing.get_origin(kind) is list
        if many:
            (kind,) = typing.get_args(kind)
        elif typing.get_origin(kind) is dict:
            kind = dict
        yield Leaf(key, kind, many, optional, getattr(defaults, field.name), field.metadata)


@lru_cache
def _core_sections() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(ExperimentSettings))


def _schema_of(key: str) -> type:
    """The smallest schema that can know `key`: the methods are imported only when a key may be theirs."""
    if key.startswith("sweep."):
        return SweepSection
    return ExperimentSettings if key.split(".")[0] in _core_sections() else full_schema()


def options(config: ExperimentSettings) -> dict[str, Any]:
    """The option sections of a config, by the name of their method or add-on."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in _core_sections()]
    return {name: getattr(config, name) for name in names}


# What was given -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """One setting as it was given, and where."""

    key: str
    value: Any
    file: str = ""  # empty for an override

    @property
    def shown(self) -> str:
        """The value as a sentence quotes it, with the file it stands in."""
        return quote(self.value) + (f" in '{self.file}'" if self.file else "")

    @property
    def says_something(self) -> bool:
        """Whether a value is given at all: null and an empty list are ways of giving none."""
        return self.value is not None and self.value != []

    @property
    def deferred(self) -> bool:
        """Whether the value refers to another setting or to the environment, and is known only later."""
        return isinstance(self.value, str) and "${" in self.value


def quote(value: Any) -> str:
    """A value as a user would write it.

    >>> quote([64, 32]), quote(None), quote("sgd")
    ('[64,32]', 'null', "'sgd'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(quote(item) for item in value)}]"
    return repr(value) if isinstance(value, str) else str(value)


def _one_line(text: object) -> str:
    return " ".join(str(text).split()).rstrip(".")


def _unknown(key: str, file: str) -> UserError:
    """The sentence for a key that does not exist, with the nearest that does."""
    known = leaves(_schema_of(key))
    last = key.split(".")[-1].lower()

    def closeness(leaf: Leaf) -> float:
        name = leaf.key.split(".")[-1]
        alike = difflib.SequenceMatcher(None, last, name).ratio()
        whole = difflib.SequenceMatcher(None, key.lower(), leaf.key).ratio()
        words = set(re.split(r"\W+", leaf.about.lower())) | {name}
        described = 0.8 * (set(last.split("_")) - {""} <= words)  # learning_rate: local.lr is "learning rate"
        same_section = 0.1 * (key.split(".")[0] == leaf.key.split(".")[0])
        return max(alike, whole, described) + same_section

    best = max(known.values(), key=closeness)
    hint = f" Did you mean '{best.key}'?" if closeness(best) >= 0.6 else ""
    inside = [name for name in known if name.startswith(key.rpartition(".")[0] + ".")]
    rest = f"Choices: {', '.join(inside)}." if inside else "`list settings` shows them all."
    return UserError(f"Unknown setting '{key}'{f' in {file!r}' if file else ''}.{hint} {rest}")


def _leaf(key: str, file: str) -> Leaf:
    """The setting of this key, or a sentence about why there is none."""
    known = leaves(_schema_of(key))
    if key in known:
        return known[key]
    for name, leaf in known.items():
        if leaf.type is dict and key.startswith(f"{name}."):  # any name will do inside
            return dataclasses.replace(leaf, key=key, type=object, optional=True)
    where = f" in '{file}'" if file else ""
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        raise UserError(
            f"Expected settings inside '{key}'{where}, got a value: choices are {', '.join(inside)}."
        )
    above = key.rpartition(".")[0]
    if above in known:
        raise UserError(f"Expected '{above}' to be {known[above].kind}{where}, got a section with '{key}'.")
    raise _unknown(key, file)


def _read(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file, or a sentence about why there is none."""
    if path.is_dir():
        raise UserError(f"Expected a YAML file after --config, got the folder '{path}': name a file in it.")
    if not path.exists():
        close = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.y*ml")], n=1)
        hint = f"did you mean '{path.parent / close[0]}'?" if close else "check the path."
        raise UserError(f"Expected a YAML file after --config, got '{path}', which does not exist: {hint}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"Expected a YAML file after --config, got '{path}', which is not text.") from error
    except OSError as error:
        raise UserError(f"Expected a YAML file after --config, got '{path}': {error.strerror}.") from error
    return _parse_yaml(text, str(path))


def _parse_yaml(text: str, file: str) -> dict[Any, Any]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(
                f"Expected settings in '{file}', got an empty file: write e.g. `method: ifca` in it."
            )
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"Expected lines such as `method: ifca` in '{file}', got a {root.id}.")
        # OmegaConf's reader, because it refuses a key that is given twice and reads 1e-3 as a number.
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = _one_line(getattr(error, "problem", None) or error)
        raise UserError(f"Expected valid YAML in '{file}', got a mistake{where}: {problem}.") from error
    except OmegaConfBaseException as error:
        raise UserError(
            f"Expected plain values in '{file}', got a mistake: {_one_line(error.msg)}."
        ) from error
    return typing.cast("dict[Any, Any]", content)


def _from_mapping(content: Mapping[Any, Any], file: str, prefix: str = "") -> Iterator[Given]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        leaf = leaves(_schema_of(key)).get(key)
        if isinstance(value, dict) and (leaf is None or leaf.type is dict):
            yield from _from_mapping(value, file, f"{key}.")
            continue
        key = f"{key}.name" if key in NAMED and isinstance(value, str) else key
        if (key, value) == AUTO:
            yield Given("choose_clusters", True, file)
            continue
        leaf = _leaf(key, file)
        if isinstance(value, dict):
            raise UserError(f"Expected {key} to be {leaf.kind}, got a section in '{file}' ({leaf.about}).")
        yield Given(key, value, file)


def _from_override(text: str) -> Given:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise UserError(f"Expected setting=value, got '{text}': write it as in rounds=10.")
    if (key, value) == AUTO:
        return Given("choose_clusters", True)
    key = f"{key}.name" if key in NAMED else key
    leaf = _leaf(key, "")
    if not value:
        raise UserError(f"Expected a value after '{key}=', got nothing: it takes {leaf.kind} ({leaf.about}).")
    if leaf.optional and value in ("null", "~"):
        return Given(key, None)
    if leaf.type is str and not leaf.many:
        return Given(key, value)  # as it was typed: name=on is not a truth value
    try:
        return Given(
            key, typing.cast(Any, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))["value"]
        )
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise _wrong_type(leaf, Given(key, value)) from error


def _collect(given: Iterable[Given]) -> dict[str, Given]:
    """The settings of one source by key: nothing twice, and one of two ways of saying a thing."""
    collected: dict[str, Given] = {}
    for each in given:
        _check_value(each)
        before = collected.setdefault(each.key, each)
        if before.value != each.value:
            raise UserError(
                f"Expected {each.key} once, got both {before.shown} and {each.shown}: leave one of them out."
            )
    for one, other in EITHER_OR:
        if all(key in collected and collected[key].says_something for key in (one, other)):
            raise UserError(
                f"Expected {one} or {other}, got both ({collected[one].shown} and {collected[other].shown}): "
                "leave one of them out."
            )
    return collected


def _merge(file: dict[str, Given], overrides: dict[str, Given]) -> dict[str, Given]:
    """Overrides win, also over the file's other way of saying the same thing."""
    merged = {**file, **overrides}
    for pair in EITHER_OR:
        for mine, theirs in (pair, pair[::-1]):
            if mine in overrides and overrides[mine].says_something and theirs not in overrides:
                merged.pop(theirs, None)
    return merged


def _without_foreign_options(
    file: dict[str, Given], overrides: dict[str, Given], default: str
) -> dict[str, Given]:
    """Refuse options of a method that is not run; a file's options go when an override changed its method."""
    own = _chosen(file) or Given("method", default)
    method = _chosen(overrides) or own
    if method.deferred:
        return file
    parts = method_parts(method.value)
    kept = dict(file)
    for key, given in {**file, **overrides}.items():
        section = key.split(".")[0]
        if section in _core_sections() or section in parts:
            continue
        if key in overrides or own is method or section not in method_parts(own.value):
            from archipelago.strategies import ADDONS  # imports torch: only when it is needed

            base = method.value if method.key == "method" else "ifca"
            instead = f"{base}+{section}" if section in ADDONS else section
            raise UserError(
                f"Expected options of the {method.key} {quote(method.value)} only, got {key}={given.shown}: "
                f"leave it out, or write method={instead}."
            )
        del kept[key]
    return kept


def _chosen(given: dict[str, Given]) -> Given | None:
    """What names the methods to run: the ensemble if it has members, else the method."""
    ensemble = given.get("ensemble")
    return ensemble if ensemble is not None and ensemble.says_something else given.get("method")


def method_parts(methods: Any) -> set[str]:
    """Names of the bases and add-ons of a method, or of the members of an ensemble."""
    from archipelago.strategies import expand, parse_method

    if isinstance(methods, list):
        try:
            parsed = [parse_method(member) for member in expand([str(each) for each in methods])]
        except UserError as error:
            raise UserError(f"A member of ensemble={quote(methods)} is wrong: {error}") from error
    else:
        parsed = [parse_method(str(methods))]
    return {name for base, addons in parsed for name in (base, *addons)}


# From what was given to a config --------------------------------------------------------------------------


def load_config(
    file: Path | None = None, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> ExperimentSettings:
    """Defaults, then the YAML file, then the overrides, checked; every mistake is one sentence.

    >>> load_config(overrides=["method=fedprox", "fedprox.mu=0.5", "data=digits"]).data.name
    'digits'
    """
    from_file = _collect(_from_mapping(_read(file), str(file))) if file is not None else {}
    from_overrides = _collect(_from_override(text) for text in overrides)
    default = leaves(ExperimentSettings)["method"].default
    given = _merge(_without_foreign_options(from_file, from_overrides, default), from_overrides)
    config = _resolve(given)
    check(config, env)
    return config


def read_layers(
    file: Path | None, overrides: Sequence[str]
) -> tuple[dict[str, Given], dict[str, Given], dict[str, Any] | None]:
    """(settings of the file, settings of the overrides, what either says under `sweep`; None if nothing)."""
    content = _read(file) if file is not None else {}
    sweep = content.pop("sweep", None)
    if "sweep" in content or (sweep is not None and not isinstance(sweep, dict)):
        raise UserError(
            f"Expected settings inside 'sweep' in '{file}', got {quote(sweep)}: as in seeds: [0, 1]."
        )
    mine = [text for text in overrides if not text.strip().startswith("sweep.")]
    for text in overrides:
        if text in mine:
            continue
        key, equals, value = text.strip().removeprefix("sweep.").partition("=")
        if not equals or not value:
            raise UserError(f"Expected sweep.NAME=VALUE, got '{text}': write it as in sweep.seeds=[0,1,2].")
        name, _, inner = key.partition(".")
        try:
            read = typing.cast(Any, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))[
                "value"
            ]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(
                f"Expected a value after 'sweep.{key}=', got '{value}': {_one_line(error)}."
            ) from error
        sweep = dict(sweep or {})
        sweep[name] = {**(sweep.get(name) or {}), inner: read} if inner else read
    return fragment(content, str(file)), _collect(_from_override(text) for text in mine), sweep


def fragment(content: Mapping[Any, Any], source: str) -> dict[str, Given]:
    """Settings as YAML holds them, nested or dotted, checked one by one; `source` is named in sentences."""
    return _collect(_from_mapping(content, source))


def layered(layers: Sequence[dict[str, Given]], may_idle: frozenset[str] = frozenset()) -> ExperimentSettings:
    """One config from several layers, the later ones winning.

    Options of methods that this config does not run are a mistake, except those in `may_idle`: names of
    methods and add-ons that other trials of the same sweep run.
    """
    merged = _all_merged(layers)
    method = methods_of([merged])
    # `local` is a method, too, but local.lr belongs to all of them.
    foreign = may_idle - method_parts(method.value) - _core_sections()
    idle = {key for key in merged if key.split(".")[0] in foreign}
    merged = {key: given for key, given in merged.items() if key not in idle}
    kept = _without_foreign_options(merged, {}, method.value if method.key == "method" else "")
    plain = all(
        not given.deferred and _leaf(key, "").type not in (dict, object) for key, given in kept.items()
    )
    return _filled(kept) if plain else _resolve(kept)


def _all_merged(layers: Sequence[dict[str, Given]]) -> dict[str, Given]:
    nothing: dict[str, Given] = {}
    return reduce(_merge, layers, nothing)


def methods_of(layers: Sequence[dict[str, Given]]) -> Given:
    """The setting, method or ensemble, that says what several layers run together."""
    return _chosen(_all_merged(layers)) or Given("method", leaves(ExperimentSettings)["method"].default)


def _filled(given: Mapping[str, Given]) -> ExperimentSettings:
    """What `_resolve` gives for checked values without references, a hundred times faster: sweeps have many."""
    config: Any = full_schema()()
    for key, each in given.items():
        leaf = _leaf(key, each.file)
        value = each.value
        if value is not None:
            value = [leaf.type(item) for item in value] if leaf.many else leaf.type(value)
        config = replaced(config, key, value)
    return typing.cast(ExperimentSettings, config)


def replaced(section: Any, key: str, value: Any) -> Any:
    """The settings with another value at a dotted key.

    >>> replaced(ExperimentSettings(), "local.lr", 0.5).local.lr
    0.5
    """
    name, _, rest = key.partition(".")
    return dataclasses.replace(
        section, **{name: replaced(getattr(section, name), rest, value) if rest else value}
    )


def config_to_yaml(config: ExperimentSettings) -> str:
    """The whole config as YAML; `config_from_yaml` and `--config` give back an equal one.

    Left out, where they say nothing: the sections of methods that are not run, the steps of a config that
    counts in epochs, and the method beside an ensemble. All of them would read as contradictions if the file
    were given to `--config`.
    """
    tree = dataclasses.asdict(config)
    defaults = leaves(ExperimentSettings)
    parts = method_parts(config.ensemble or config.method)
    for name, section in options(config).items():
        if name not in parts and section == type(section)():
            del tree[name]
    if config.local.epochs is not None and config.local.steps == defaults["local.steps"].default:
        del tree["local"]["steps"]
    if config.ensemble and config.method == defaults["method"].default:
        del tree["method"]
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def config_from_yaml(text: str) -> ExperimentSettings:
    """A config from `config_to_yaml`: types and ranges are checked, not what this machine can do."""
    given = {each.key: each for each in _from_mapping(_parse_yaml(text, "config.yaml"), "config.yaml")}
    for each in given.values():
        _check_value(each)
    return _resolve(given)


def _wrong_type(leaf: Leaf, given: Given) -> UserError:
    advice = ": put it in quotes" if leaf.type is str and not leaf.many and given.value is not None else ""
    return UserError(f"Expected {leaf.key} to be {leaf.kind}, got {given.shown} ({leaf.about}){advice}.")


def _check_range(leaf: Leaf, value: Any, given: Given) -> None:
    meaning = f"({leaf.about}; default {quote(leaf.default)})"
    numbers = [item for item in (value if leaf.many else [value]) if isinstance(item, float)]
    if not all(math.isfinite(number) for number in numbers):
        raise UserError(f"Expected {leaf.key} to be a finite number, got {given.shown} {meaning}.")
    if not leaf.allows(value):
        choices = leaf.metadata.get("choices")
        if choices:
            raise UserError(f"Unknown {leaf.key} {given.shown} ({leaf.about}). {nearest(value, choices)}")
        raise UserError(f"Expected {leaf.range}, got {given.shown} {meaning}.")


def _check_value(given: Given) -> None:
    """Refuse a value of the wrong type or out of range; one that refers to another is checked later."""
    leaf = _leaf(given.key, given.file)
    if given.deferred or leaf.type in (dict, object):
        return
    strict = leaf.type if leaf.type in (str, bool) and not leaf.many else object
    if given.value is None and leaf.optional:
        return
    if given.value is None or given.value == "???" or not isinstance(given.value, strict):
        raise _wrong_type(leaf, given)  # OmegaConf would take 3 for true, and true for 'True'
    hint: Any = list[leaf.type] if leaf.many else leaf.type  # type: ignore[name-defined]  # made at run time
    single = dataclasses.make_dataclass("Single", [("value", hint)])
    try:
        value = OmegaConf.to_container(OmegaConf.structured(single(given.value)))["value"]  # type: ignore[index,call-overload]  # a mapping
    except OmegaConfBaseException as error:
        raise _wrong_type(leaf, given) from error
    _check_range(leaf, value, given)


def _resolve(given: Mapping[str, Given]) -> ExperimentSettings:
    """The typed config: defaults, the given values in place, references (`${...}`) filled in and checked."""
    filled = OmegaConf.structured(full_schema())
    for each in given.values():
        try:
            OmegaConf.update(filled, each.key, each.value)
        except OmegaConfBaseException as error:
            raise _wrong_type(_leaf(each.key, each.file), each) from error
    for each in given.values():
        if not each.deferred:
            continue
        try:
            value = OmegaConf.select(filled, each.key, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise UserError(
                f"Expected {each.key}={each.shown} to refer to a setting or, as ${{oc.env:NAME}}, to an "
                f"environment variable: {_one_line(str(error).splitlines()[0])}."
            ) from error
        if isinstance(value, str) and "${" in value:
            raise UserError(f"Expected {each.key} without '${{', got {each.shown}: use another value.")
        _check_range(_leaf(each.key, each.file), value, each)
    return typing.cast(ExperimentSettings, OmegaConf.to_object(filled))


# Combinations ---------------------------------------------------------------------------------------------


def check(config: ExperimentSettings, env: Mapping[str, str] | None = None) -> None:
    """Refuse, with a sentence, what no single value shows: names, combinations, what this machine lacks."""
    env = os.environ if env is None else env
    _check_run_name(config.name)
    _check_executor(config)
    _check_fleet(config, env)
    _check_storage(config.storage)
    _check_method(config)
    _check_names(config)
    _check_target(config)


def _check_run_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}", name):
        raise UserError(
            f"Expected name to be up to 200 letters, digits and . _ + = @ - (no folders, no spaces), got "
            f"{quote(name)}: say where with storage=FOLDER, and only the last part with name=NAME."
        )


def _check_executor(config: ExperimentSettings) -> None:
    if config.local.trainer and config.local.executor != "trainer":
        raise UserError(
            f"Expected local.executor=trainer beside local.trainer.{next(iter(config.local.trainer))}, got "
            f"local.executor={config.local.executor}: add it, or leave local.trainer out."
        )


def _check_fleet(config: ExperimentSettings, env: Mapping[str, str]) -> None:
    fleet = config.fleet
    if fleet.actors is not None and fleet.clients_per_actor is not None:
        raise UserError(
            f"Expected fleet.actors or fleet.clients_per_actor, got both ({fleet.actors} and "
            f"{fleet.clients_per_actor}): leave one of them out."
        )
    if fleet.actors is not None and fleet.actors > config.clients:
        raise UserError(
            f"Expected fleet.actors <= clients, got fleet.actors={fleet.actors} and "
            f"clients={config.clients}: an actor without clients would do nothing."
        )
    if fleet.gpus > 1:
        raise UserError(
            f"Expected fleet.gpus <= 1, got {fleet.gpus:g}: a client actor computes on one device or a share of "
            "one (as 0.25); start more actors to use more devices."
        )
    for key, share in (("fleet.gpus", fleet.gpus), ("fleet.cpus", fleet.cpus)):
        if 0 < share < _SMALLEST_SHARE:
            raise UserError(
                f"Expected {key} >= {_SMALLEST_SHARE:g}, got {share:g}: Ray counts no smaller shares."
            )
    address = fleet.address or env.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://") and fleet.backend == "ray":
        source = "fleet.address" if fleet.address else "RAY_ADDRESS"
        raise UserError(
            f"Expected {source} as host:port, got '{address}': Ray Client is not supported, as it sends every "
            "model through one connection; write `ray job submit --address http://HOST:8265 -- ...`, or run on a "
            "node of the cluster."
        )
    if fleet.address is not None and not re.fullmatch(r"auto|local|[^\s:/]+:\d{1,5}", fleet.address):
        raise UserError(
            f"Expected fleet.address as host:port, auto or local, got '{fleet.address}': "
            "`ray status` on the cluster's head shows its address."
        )
    here = fleet.backend == "in_process" or address == "local"
    if fleet.gpus > 0 and here and gpu_count() == 0:
        raise UserError(
            f"Expected fleet.gpus=0 on a machine without a GPU, got {fleet.gpus:g}: leave it out, or name a "
            "cluster that has GPUs with fleet.address=HOST:PORT or RAY_ADDRESS."
        )


def gpu_count() -> int:
    """How many GPUs this machine has."""
    import torch

    return torch.cuda.device_count()


def _check_storage(storage: str) -> None:
    if is_address(storage):
        check_address(storage)
        return
    folder = Path(storage).expanduser().resolve()
    if "runtime_resources" in folder.parts:  # where Ray unpacks the working directory of a job
        raise UserError(
            f"Expected storage to be a folder that stays, got '{storage}' inside the job's working "
            "directory, which Ray deletes: give a full path, as in storage=~/archipelago-runs."
        )
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"Expected storage to be a folder, got '{storage}', where '{existing}' is a file.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"Expected storage to be a folder one can write to, got '{storage}': '{existing}' is not."
        )


def _check_method(config: ExperimentSettings) -> None:
    from archipelago.strategies import METHODS, check_members, expand, parse_method

    members = expand(config.ensemble) or [config.method]
    check_members(config.ensemble, config.combine, config.clusters)
    bases = [METHODS.find(parse_method(member, config.clusters)[0]) for member in members]
    if config.choose_clusters and (config.ensemble or not bases[0].clustered):
        raise UserError(
            f"Expected a clustered method with clusters=auto, got {quote(config.ensemble or config.method)}: "
            "use a method such as ifca, fesem or wecfl, or set clusters yourself."
        )
    if any(base.clustered for base in bases) and config.clusters > config.clients:
        raise UserError(
            f"Expected clusters <= clients, got clusters={config.clusters} and clients={config.clients}: "
            f"give more clients or fewer clusters."
        )
    check_settings_of_methods(config, [])


def check_settings_of_methods(config: ExperimentSettings, groups: Any) -> None:
    """Refuse what a method cannot be run with; `groups` are the planted ones, empty before the data is there."""
    from archipelago.strategies import METHODS, Context, expand, parse_method

    context = Context(
        clients=config.clients, clusters=config.clusters, groups=groups, aggregation=config.aggregation
    )
    for member in expand(config.ensemble) or [config.method]:
        name = parse_method(member, config.clusters)[0]
        method = METHODS.find(name)
        method.check(options(config).get(name) or method.Options(), context)


def _check_names(config: ExperimentSettings) -> None:
    from archipelago.data import DATASETS, PARTITIONS

    DATASETS.find(config.data.name)
    PARTITIONS.find(config.partition.name)
    if config.model.name != "auto":
        from lightning_modules.networks import NETWORKS

        NETWORKS.find(config.model.name)


def _check_target(config: ExperimentSettings) -> None:
    """A module of the user's own must be importable here, before anything is started elsewhere."""
    target = config.model.target
    if target is None:
        return
    if config.model.name != "auto":
        raise UserError(
            f"Expected model.name or model.target, got both ('{config.model.name}' and '{target}'): "
            "leave one of them out."
        )
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
        raise UserError(
            f"Expected model.target as package.module.Class, got '{target}': write where it is defined."
        )
    import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)
    from lightning_modules.base import load_target

    try:
        load_target(target)
    except UserError:
        raise
    except Exception as error:  # whatever the user's own module raises while it is imported
        cause = f"{type(error).__name__}: {_one_line(error)}"
        raise UserError(f"Expected model.target to be importable, got '{target}': {cause}.") from error


def check_network(config: ExperimentSettings, input_shape: tuple[int, ...], classes: int | None) -> None:
    """Refuse a network that cannot take the data's samples, before anything is started or written."""
    contrast = options(config).get("con")
    if contrast is not None and contrast.form == "rep" and classes in (None, 1):
        raise UserError(
            "Expected data with several classes for con.form=rep, got a model with one output: the cosine of two "
            "numbers is 1 or -1 and teaches nothing; use con.form=para."
        )
    if config.model.target is not None:
        from lightning_modules.base import build_module

        # Whether it can be made, and has what model.head names, only the module itself can say; what it does with
        # the samples is its own affair.
        build_module(config.model, config.local, input_shape, classes, config.seed)
        return
    import torch

    from lightning_modules.networks import NETWORKS, default_network

    name = default_network(input_shape, classes) if config.model.name == "auto" else config.model.name
    with torch.device("meta"):  # shapes alone: no memory, no random draw
        network = NETWORKS.find(name)(input_shape, 1 if classes is None else classes, config.model)
    if config.model.head:
        from lightning_modules.base import checked_head

        checked_head(network, config.model.head)
