"""Settings as somebody gave them, in a YAML file, on the command line or in Python, checked one by one.

Whatever is wrong with one setting is one `UserError` sentence: an unknown key, a value of the wrong type, a value out
of range (ranges are data of the schema).
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML ships no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from archipelago.core.errors import UserError
from archipelago.core.plugins import is_ours, load_built_in, load_plugins
from archipelago.core.registry import IMPORT_PATH, REGISTRIES, closest, nearest
from archipelago.core.schema import Leaf, composed, leaves, quote
from archipelago.core.settings import ExperimentSettings, SweepSection

AUTO = ("clusters", "auto")  # is short for choose_clusters=true
NAMED = (
    "data",
    "partition",
    "model",
    "aggregation",
    "attack",
)  # `data=digits` is short for `data.name=digits`

# `update=[clip]` is short for `update.transforms=[clip]`
LISTED = {"update": "update.transforms", "drift": "data.drift"}

RENAMED = {"local.executor": "local.engine"}  # what files and runs of earlier versions call a setting

_LARGEST = 2**53  # of whole numbers: beyond, they are not exact everywhere
_ANY_SIZE = ("seed", "partition.seed", "sweep.sampler_seed")  # are hashed

# Two ways of saying one thing: both at once is a mistake, and an override replaces the file's choice.
EITHER_OR = (
    ("local.steps", "local.epochs"),
    ("fleet.actors", "fleet.clients_per_actor"),
    ("method", "ensemble"),
)


# The schema -------------------------------------------------------------------------------------------------


def full_schema() -> type[ExperimentSettings]:
    """`ExperimentSettings` with the options of every registered entry (`fedprox.mu`, `data.sources`)."""
    return composed(ExperimentSettings)


@lru_cache
def core_sections() -> frozenset[str]:
    """The settings and sections that every experiment has, whatever is registered."""
    return frozenset(field.name for field in dataclasses.fields(ExperimentSettings))


def _schema_of(key: str) -> type:
    """The smallest schema that knows `key`: entries are imported only when a key may be theirs."""
    smallest: type = SweepSection if key.startswith("sweep.") else ExperimentSettings
    return smallest if key in leaves(smallest) else composed(smallest)


# Code that settings name ------------------------------------------------------------------------------------

# Which kinds of entries the values of a setting, or of an axis of a sweep, choose from.
_CHOOSES = {
    **dict.fromkeys(("method", "methods", "ensemble"), ("method", "add-on")),
    **dict.fromkeys(("data", "data.name"), ("data set",)),
    **dict.fromkeys(("partition", "partitions", "partition.name"), ("partition",)),
    **dict.fromkeys(("model", "model.name"), ("model",)),
    **dict.fromkeys(("aggregation", "aggregation.name"), ("aggregation rule",)),
    **dict.fromkeys(("attack", "attack.name"), ("attack",)),
    **dict.fromkeys(("update", "update.transforms"), ("update transform",)),
    "server.optimizer": ("server optimizer",),
    "local.optimizer": ("optimizer",),
    "local.schedule": ("learning-rate schedule",),
    "local.augment": ("augmentation",),
    "evaluation.metrics": ("metric",),
    **dict.fromkeys(("drift", "data.drift"), ("drift",)),
    "adoption": ("adoption rule",),
    "sampler": ("sampler",),
    "scheduler": ("scheduler",),
    "clustering": ("clustering rule",),  # an option of several methods
    **dict.fromkeys(("local.engine", "local.executor"), ("engine",)),
    "callbacks": ("callback",),
    "loggers": ("logger",),
}


def import_named(content: Mapping[Any, Any]) -> None:
    """Import the code that settings name, plug-ins and import paths, before options of that code are read."""
    plugins = content.get("plugins")
    if isinstance(plugins, list):  # anything else is refused with the other wrong types
        load_plugins([str(name) for name in plugins])
    for key, text in _texts(content, ""):
        name = "clustering" if key.endswith(".clustering") else key.removeprefix("sweep.")
        kinds = _CHOOSES.get(name, ())
        paths = [part for part in re.split(r"[+*@]", text) if IMPORT_PATH.fullmatch(part)] if kinds else []
        if paths:
            load_built_in()
        for path in paths:
            kind = kinds[0] if text.startswith(path) else kinds[-1]
            if kind in REGISTRIES:
                REGISTRIES[kind].entry(path)


def code_of(content: Mapping[Any, Any]) -> dict[str, str]:
    """{module or import path: the setting that names it} of the code of somebody's own that settings would import."""
    found: dict[str, str] = {}
    nested = {key: content[key] for key in ("settings", "sweep") if isinstance(content.get(key), Mapping)}
    for part in (nested.get("settings", content), {"sweep": nested["sweep"]} if "sweep" in nested else {}):
        for key, text in _texts(part, ""):
            name = "clustering" if key.endswith(".clustering") else key.removeprefix("sweep.")
            if name == "plugins":
                paths = [text]
            elif name in _CHOOSES or name.endswith(".target") or name == "local.trainer.callbacks":
                paths = [each for each in re.split(r"[+*]", text) if IMPORT_PATH.fullmatch(each)]
            else:
                continue
            found |= {path: name for path in paths if not is_ours(path)}
    return found


def import_named_in(overrides: Iterable[str]) -> None:
    """`import_named` for settings as they are typed; plug-ins first, wherever they stand."""
    typed = [text.partition("=") for text in overrides]
    lists = {key.strip(): re.findall(r"[^\s\[\],'\"]+", value) for key, _, value in typed}
    load_plugins(name for key, _, value in typed if key == "plugins" and "[" in value for name in lists[key])
    import_named({key: value for key, value in lists.items() if key != "plugins"})


def _texts(content: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of everything in nested settings; the key of a list is that of its entries."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from _texts(value, f"{key}.{name}" if key and key not in _AXES else str(name))
    elif isinstance(content, list):
        for item in content:
            yield from _texts(item, key)
    elif isinstance(content, str):
        yield key, content


_AXES = ("sweep", *(f"sweep.{axis}" for axis in ("methods", "data", "partitions", "cases", "grid")))


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


def one_line(text: object) -> str:
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
    meant = best.key if closeness(best) >= 0.6 else None
    hint = f" Did you mean '{meant}'?" if meant else ""
    inside = [name for name in known if name.startswith(key.rpartition(".")[0] + ".")]
    rest = f"Choices: {', '.join(inside)}." if inside else "`list settings` shows them all."
    return UserError(
        f"Unknown setting '{key}'{f' in {file!r}' if file else ''}.{hint} {rest}",
        code="unknown-setting", setting=key, nearest=meant,
    )  # fmt: skip


def leaf_of(key: str, file: str) -> Leaf:
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
            f"Expected settings inside '{key}'{where}, got a value: choices are {', '.join(inside)}.",
            code="a-section", setting=key,
        )  # fmt: skip
    above = key.rpartition(".")[0]
    if above in known:
        raise UserError(
            f"Expected '{above}' to be {known[above].kind}{where}, got a section with '{key}'.",
            code="not-a-section", setting=above, key=key,
        )  # fmt: skip
    raise _unknown(key, file)


def parse_yaml(text: str, file: str) -> dict[Any, Any]:
    """The mapping that a YAML text holds; `file` is what sentences about it call it."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(
                f"Expected settings in '{file}', got an empty file: write e.g. `method: ifca` in it.",
                code="empty-file", file=file,
            )  # fmt: skip
        if not isinstance(root, yaml.MappingNode):
            raise UserError(
                f"Expected lines such as `method: ifca` in '{file}', got a {root.id}.",
                code="not-settings", file=file, id=root.id,
            )  # fmt: skip
        # OmegaConf's reader, because it refuses a key that is given twice and reads 1e-3 as a number.
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except RecursionError as error:
        raise UserError(
            f"Expected settings and their sections in '{file}', got values nested too deeply to be read.",
            code="nested-too-deeply", file=file,
        ) from error  # fmt: skip
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = one_line(getattr(error, "problem", None) or error)
        raise UserError(
            f"Expected valid YAML in '{file}', got a mistake{where}: {problem}.", code="not-yaml", file=file
        ) from error
    except (OmegaConfBaseException, ValueError) as error:  # the second: more digits than Python reads
        problem = one_line(getattr(error, "msg", error))
        raise UserError(
            f"Expected plain values in '{file}', got a mistake: {problem}.", code="not-yaml", file=file
        ) from error
    return typing.cast("dict[Any, Any]", content)


def from_mapping(content: Mapping[Any, Any], file: str, prefix: str = "") -> Iterator[Given]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        key = RENAMED.get(key, key)
        leaf = leaves(_schema_of(key)).get(key)
        if isinstance(value, dict) and (leaf is None or leaf.type is dict):
            yield from from_mapping(value, file, f"{key}.")
            continue
        key = f"{key}.name" if key in NAMED and isinstance(value, str) else key
        key = LISTED[key] if key in LISTED and isinstance(value, list) else key
        if (key, value) == AUTO:
            yield Given("choose_clusters", True, file)
            continue
        leaf = leaf_of(key, file)
        if isinstance(value, dict):
            where = f" in '{file}'" if file else ""
            raise UserError(
                f"Expected {key} to be {leaf.kind}, got a section{where} ({leaf.about}).",
                code="wrong-type", setting=key,
            )  # fmt: skip
        yield Given(key, _as_meant(leaf, value), file)


def _as_meant(leaf: Leaf, value: Any) -> Any:
    """`auto` is None where the setting says so; a choice that YAML or Python holds as a number is its text."""
    if leaf.auto and value == "auto":
        return None
    if (
        type(value) is int
        and leaf.type is str
        and not leaf.many
        and str(value) in leaf.metadata.get("choices", ())
    ):
        return str(value)
    return value


def from_override(text: str) -> Given:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise UserError(
            f"Expected setting=value, got '{text}': write it as in rounds=10.",
            code="not-a-setting", word=text,
        )  # fmt: skip
    if (key, value) == AUTO:
        return Given("choose_clusters", True)
    key = f"{key}.name" if key in NAMED else LISTED.get(key) or RENAMED.get(key, key)
    leaf = leaf_of(key, "")
    if not value:
        raise UserError(
            f"Expected a value after '{key}=', got nothing: it takes {leaf.kind} ({leaf.about}).",
            code="missing-value", setting=key,
        )  # fmt: skip
    if (leaf.optional and value in ("null", "~")) or (leaf.auto and value == "auto"):
        return Given(key, None)
    if leaf.type is str and not leaf.many:
        return Given(key, value)  # as it was typed: name=on is not a truth value
    try:
        return Given(
            key, typing.cast(Any, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))["value"]
        )
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise wrong_type(leaf, Given(key, value)) from error


def collect(given: Iterable[Given]) -> dict[str, Given]:
    """The settings of one source by key: nothing twice, and one of two ways of saying a thing."""
    collected: dict[str, Given] = {}
    for each in given:
        check_value(each)
        before = collected.setdefault(each.key, each)
        if before.value != each.value:
            raise UserError(
                f"Expected {each.key} once, got both {before.shown} and {each.shown}: leave one of them out.",
                code="given-twice", setting=each.key, given=(before.value, each.value),
            )  # fmt: skip
    for one, other in EITHER_OR:
        if all(key in collected and collected[key].says_something for key in (one, other)):
            raise UserError(
                f"Expected {one} or {other}, got both ({collected[one].shown} and {collected[other].shown}): "
                "leave one of them out.",
                code="either-or", settings=(one, other),
            )  # fmt: skip
    return collected


def wrong_type(leaf: Leaf, given: Given) -> UserError:
    advice = ": put it in quotes" if leaf.type is str and not leaf.many and given.value is not None else ""
    return UserError(
        f"Expected {leaf.key} to be {leaf.kind}, got {given.shown} ({leaf.about}){advice}.",
        code="wrong-type", setting=leaf.key, given=given.value,
    )  # fmt: skip


def check_range(leaf: Leaf, value: Any, given: Given) -> None:
    meaning = f"({leaf.about}; default {leaf.shown_default})"
    numbers = [item for item in (value if leaf.many else [value]) if isinstance(item, float)]
    about: dict[str, Any] = {"setting": leaf.key, "given": given.value}
    if not all(math.isfinite(number) for number in numbers):
        sentence = f"Expected {leaf.key} to be a finite number, got {given.shown} {meaning}."
        raise UserError(sentence, code="out-of-range", **about)
    if not leaf.allows(value):
        choices = leaf.metadata.get("choices")
        if choices:
            sentence = f"Unknown {leaf.key} {given.shown} ({leaf.about}). {nearest(value, choices)}"
            raise UserError(sentence, code="unknown-choice", nearest=closest(value, choices), **about)
        raise UserError(f"Expected {leaf.range}, got {given.shown} {meaning}.", code="out-of-range", **about)
    largest = leaf.metadata.get("largest", _LARGEST if leaf.key not in _ANY_SIZE else None)
    if largest is not None and any(type(n) is int and n > largest for n in (value if leaf.many else [value])):
        sentence = f"Expected {leaf.key} <= {largest}, got {given.shown} {meaning}."
        raise UserError(sentence, code="out-of-range", **about)


def check_value(given: Given) -> None:
    """Refuse a value of the wrong type or out of range; one that refers to another is checked later."""
    leaf = leaf_of(given.key, given.file)
    if given.deferred or leaf.type in (dict, object):
        return
    strict = leaf.type if leaf.type in (str, bool) and not leaf.many else object
    if given.value is None and leaf.optional:
        return
    if given.value is None or given.value == "???" or not isinstance(given.value, strict):
        raise wrong_type(leaf, given)  # OmegaConf would take 3 for true, and true for 'True'
    hint: Any = list[leaf.type] if leaf.many else leaf.type  # type: ignore[name-defined]  # made at run time
    single = dataclasses.make_dataclass("Single", [("value", hint)])
    try:
        value = OmegaConf.to_container(OmegaConf.structured(single(given.value)))["value"]  # type: ignore[index,call-overload]  # a mapping
    except OmegaConfBaseException as error:
        raise wrong_type(leaf, given) from error
    check_range(leaf, value, given)
