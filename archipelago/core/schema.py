"""The schema of all settings: the settings of every experiment, and the options that registered entries declare.

`composed(ExperimentSettings)` adds the options of each entry: to the section that its registry names (`data.sources`
is an option of one data set), or in a section of the entry's own (`fedprox.mu`). `leaves` lists a schema setting by
setting, with its type, default, range and one line about it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from archipelago.core.errors import UserError
from archipelago.core.plugins import is_ours, load_built_in, load_plugins
from archipelago.core.registry import IMPORT_PATH, REGISTRIES

S = TypeVar("S")

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    object: "a value",
}
_LIST_NAMES = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}


def quote(value: Any) -> str:
    """A value as a user would write it.

    >>> quote([64, 32]), quote(None), quote("sgd")
    ('[64,32]', 'null', "'sgd'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return _short(f"[{','.join(quote(item) for item in value[:1000])}]")
    return _short(repr(value) if isinstance(value, str) else str(value))


def _short(text: str) -> str:
    """A sentence shows so much of a value."""
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


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
        return _TYPE_NAMES[self.type] + (f" or {'auto' if self.auto else 'null'}" if self.optional else "")

    @property
    def auto(self) -> bool:
        """Whether `auto` stands for None."""
        return bool(self.metadata.get("auto"))

    @property
    def shown_default(self) -> str:
        """The default as a user would write it."""
        return "auto" if self.auto and self.default is None else quote(self.default)

    @property
    def range(self) -> str:
        """What the setting may be, as a formula or a list of choices; empty if all of its type will do.

        >>> from archipelago.core.settings import ExperimentSettings
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


_LEAVES: dict[type, Mapping[str, Leaf]] = {}


def leaves(schema: type) -> Mapping[str, Leaf]:
    """Every setting of a schema by its dotted key, in the order of the schema.

    >>> from archipelago.core.settings import ExperimentSettings
    >>> leaves(ExperimentSettings)["local.lr"].default
    0.05
    """
    if schema not in _LEAVES:
        _LEAVES[schema] = types.MappingProxyType({leaf.key: leaf for leaf in _walk(schema, "")})
    return _LEAVES[schema]


def _walk(schema: type, prefix: str) -> Iterator[Leaf]:
    hints = _hints(schema)
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


def _hints(schema: type) -> dict[str, Any]:
    """The types of a dataclass's fields; those of a composed one are types already."""
    return typing.get_type_hints(schema)


# Composition ------------------------------------------------------------------------------------------------


class Composed:
    """Settings whose class is made at run time: another process makes the class again before it reads the values.

    That process imports the modules first that brought options of their own, and the plug-ins of an experiment.
    """

    _base: typing.ClassVar[type]
    _modules: typing.ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[Any, ...]:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]  # its subclasses are dataclasses
        plugins = tuple(dict.fromkeys([*self._modules, *values.get("plugins", [])]))
        return _restore, (self._base, plugins, self._by_path(), tuple(values.items()))

    def _by_path(self) -> tuple[tuple[str, str], ...]:
        """(kind, import path) of the entries with options that importing their module does not register."""
        return tuple(
            (registry.kind, entry.name)
            for registry in REGISTRIES.values()
            for entry in registry.values()
            if IMPORT_PATH.fullmatch(entry.name) and entry.options.__module__ in self._modules
        )


def _restore(
    base: type,
    plugins: tuple[str, ...],
    by_path: tuple[tuple[str, str], ...],
    values: tuple[tuple[str, Any], ...],
) -> Any:
    load_built_in()
    load_plugins(plugins)
    for kind, path in by_path:
        REGISTRIES[kind].entry(path)
    made: Any = composed(base)
    return made(**dict(values))


def composed(schema: type[S]) -> type[S]:
    """`schema` (of an experiment, a sweep, or one section of them) with the options of every registered entry."""
    load_built_in()
    load_plugins()
    shared: dict[str, list[type]] = {}
    own: dict[str, type] = {}
    for registry in REGISTRIES.values():
        for entry in registry.values():
            if not _has_fields(entry.options):
                continue
            if registry.section is not None:
                listed = shared.setdefault(registry.section, [])
                if entry.options not in listed:
                    listed.append(entry.options)
            else:
                own[entry.section] = entry.options
    known: Any = schema  # a type is hashable, which its type does not say
    return typing.cast(
        "type[S]",
        _composed(known, tuple((name, tuple(each)) for name, each in shared.items()), tuple(own.items())),
    )


@cache
def _has_fields(options: Any) -> bool:
    return bool(dataclasses.fields(options))


@cache
def _composed(
    schema: Any, shared: tuple[tuple[str, tuple[type, ...]], ...], own: tuple[tuple[str, type], ...]
) -> type[Any]:
    from archipelago.core import settings

    if schema is not settings.ExperimentSettings and schema is not settings.SweepSection:
        (section,) = [name for name, kind in _sections().items() if kind is schema]
        return typing.cast(type, _with_options(schema, dict(shared).get(section, ())))
    hints = _hints(schema)
    fields: list[tuple[str, type, Any]] = []
    for name, kinds in shared:
        if name in hints:
            wider: Any = _with_options(hints[name], kinds)
            fields.append((name, wider, _made_by(wider)))
    if schema is settings.ExperimentSettings:
        for name, kind in own:
            if name in hints:
                raise ValueError(f"{name!r} has options, but {name!r} is a section of every experiment")
            fields.append((name, kind, _made_by(kind)))
    return _made(schema, fields, [kind for _, kind in own])


@cache
def _with_options(section: type[Any], kinds: tuple[type, ...]) -> type[Any]:
    """A section with the options of several entries, which may share one if they mean the same by it."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    owners: dict[str, type] = {}
    mine = {each.name for each in dataclasses.fields(section)}
    for kind in kinds:
        hints = _hints(kind)
        for each in dataclasses.fields(kind):
            described = (hints[each.name], _default(each), dict(each.metadata))
            other = owners.get(each.name)
            if each.name in mine:
                raise UserError(
                    f"Expected a name of its own for the option '{each.name}' of {_title(kind)}, which is a setting of "
                    f"{section.__name__}: read it there, or give the option another name.",
                    code="option-clash", option=each.name,
                )  # fmt: skip
            if other is not None:
                known = next(f for f in dataclasses.fields(other) if f.name == each.name)
                if (_hints(other)[each.name], _default(known), dict(known.metadata)) != described:
                    raise UserError(
                        f"Expected the option '{each.name}' of {_title(kind)} to have the type, default "
                        f"and description it has in {_title(other)}: inherit from that, or choose another name.",
                        code="option-clash", option=each.name,
                    )  # fmt: skip
                continue
            owners[each.name] = kind
            fields[each.name] = (each.name, hints[each.name], _copy(each))
    return _made(section, list(fields.values()), kinds)


def _title(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _made(base: type[Any], fields: list[tuple[str, Any, Any]], kinds: typing.Iterable[type]) -> type[Any]:
    outside = [kind.__module__ for kind in kinds if not is_ours(kind.__module__)]
    inner = [each for _, kind, _ in fields for each in getattr(kind, "_modules", ())]
    made = dataclasses.make_dataclass(base.__name__, fields, bases=(Composed, base))
    made._base, made._modules = base, tuple(dict.fromkeys([*outside, *inner]))  # type: ignore[attr-defined]  # of Composed
    made.__doc__ = base.__doc__
    made.__module__ = __name__
    return made


def _made_by(kind: type) -> Any:
    return dataclasses.field(default_factory=kind)


def _sections() -> dict[str, type]:
    from archipelago.core.settings import ExperimentSettings, SweepSection

    hints = {**_hints(ExperimentSettings), **_hints(SweepSection)}
    return {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _copy(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)
    return dataclasses.field(default=field.default, metadata=field.metadata)
