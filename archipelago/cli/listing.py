"""`list [KIND | NAME] [plugins=[...]]`: what there is to choose from, and what one entry declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archipelago.cli import suggestions
from archipelago.cli.app import Described
from archipelago.cli.output import print_json, print_readings, print_table
from archipelago.cli.request import Request
from archipelago.cli.vocabulary import kinds, registries, setting_of
from archipelago.cli.words import AsJson, refuse_surplus
from archipelago.core.errors import UserError
from archipelago.core.packaged import first_comment
from archipelago.core.plugins import load_built_in, load_plugins
from archipelago.core.program import program
from archipelago.core.readings import Reading, documentation, readings_of, split_readings
from archipelago.core.registry import Entry, Registry, nearest

if TYPE_CHECKING:
    from archipelago.core.schema import Leaf

OTHERS = ("configs", "settings")  # kinds that are no registry
USAGE = "list [KIND | NAME] [plugins=[MODULE, ...]]"
Table = tuple[str, list[tuple[str, ...]]]


@dataclass(kw_only=True)
class List(Request):
    """Print what there is to choose from."""

    what: str | None = None  # a kind, or the name of an entry; all kinds without it
    plugins: list[str] = field(default_factory=list)  # modules whose entries are listed too
    as_json: bool = False

    def execute(self) -> None:
        """Tables, or one document."""
        load_built_in()  # so that a plug-in may build on them
        load_plugins(self.plugins)
        if self.what in OTHERS:
            self._show({self.what: _settings() if self.what == "settings" else _configs()})
            return
        known = kinds()
        if self.what is None or self.what in known:
            chosen = known if self.what is None else {self.what: known[self.what]}
            self._show({name: [_of_registry(each) for each in of] for name, of in chosen.items()})
            if self.what is None and not self.as_json:
                print(f"Every setting, with its default and its range: {program()} list settings")
                print(f"What one of these declares (here: ifca): {program()} list ifca")
            return
        self._show_entries(self.what)

    def _show(self, kinds: Mapping[str, Sequence[tuple[Table, list[dict[str, Any]]]]]) -> None:
        if self.as_json:
            print_json({name: [row for _, rows in parts for row in rows] for name, parts in kinds.items()})
            return
        for parts in kinds.values():
            for (title, rows), _ in parts:
                print_table(title, rows)

    def _show_entries(self, name: str) -> None:
        found = [(each, each[name]) for each in registries() if name in each]
        if not found:
            names = [*kinds(), *OTHERS, *(entry for each in registries() for entry in each)]
            hint = nearest(name, names).partition("Choices:")[0]
            raise UserError(
                f"Unknown kind or entry '{name}' to list. {hint}Kinds: {', '.join([*kinds(), *OTHERS])}.",
                code="unknown-name", kind="kind or entry", name=name,
            )  # fmt: skip
        if self.as_json:
            print_json([_document(each, entry, whole=True) for each, entry in found])
            return
        for registry, entry in found:
            _print_entry(registry, entry)


def _of_registry(registry: Registry[Any]) -> tuple[Table, list[dict[str, Any]]]:
    rows: list[tuple[str, ...]] = [(entry.name, entry.about) for entry in registry.values()]
    title = f"{registry.kind.capitalize()}s"
    if written := setting_of(registry):
        title += f" ({written})"
    return (title, rows), [_document(registry, entry) for entry in registry.values()]


def _configs() -> list[tuple[Table, list[dict[str, Any]]]]:
    """The files that come with the package, with the sentence each begins with."""
    from archipelago.experiments.config_files import config_names

    rows: list[tuple[str, ...]] = [(name, first_comment(name)) for name in config_names()]
    title = "Configs that come with the package (--config NAME)"
    return [((title, rows), [{"name": name, "about": about} for name, about in rows])]


def _settings() -> list[tuple[Table, list[dict[str, Any]]]]:
    from archipelago.core.schema import composed, leaves
    from archipelago.core.settings import ExperimentSettings, SweepSection
    from archipelago.sweeps.axes import AXES
    from archipelago.sweeps.axes import OTHERS as OTHER_AXES

    axes = {name: about for name, (_, about) in AXES.items()} | OTHER_AXES
    varied: list[tuple[str, ...]] = [(f"sweep.{name}", about) for name, about in axes.items()]
    own, swept = ([*leaves(composed(each)).values()] for each in (ExperimentSettings, SweepSection))
    return [
        (("Settings (setting=value), with their defaults", _setting_rows(own)), [*map(_option, own)]),
        (
            ("Sweeps: what varies (sweep.NAME=[...], or the section sweep: of a file)", varied),
            [{"name": name, "about": about} for name, about in varied],
        ),
        (("Sweeps: how trials are chosen and run", _setting_rows(swept)), [*map(_option, swept)]),
    ]


def _setting_rows(leaves: Sequence[Leaf]) -> list[tuple[str, ...]]:
    return [
        (leaf.key, leaf.shown_default, leaf.about + (f" [{_allowed(leaf)}]" if leaf.range else ""))
        for leaf in leaves
    ]


def _allowed(leaf: Leaf) -> str:
    return " | ".join(leaf.metadata["choices"]) if "choices" in leaf.metadata else leaf.range


def _option(leaf: Leaf) -> dict[str, Any]:
    described = {"name": leaf.key, "about": leaf.about, "type": leaf.kind,
                 "default": "auto" if leaf.auto and leaf.default is None else leaf.default}  # fmt: skip
    if "choices" in leaf.metadata:
        return {**described, "choices": list(leaf.metadata["choices"])}
    return {**described, "range": leaf.range} if leaf.range else described


# One entry ------------------------------------------------------------------------------------------------


def _options(registry: Registry[Any], entry: Entry[Any]) -> Iterator[Leaf]:
    """Its options by the dotted names that the command line takes."""
    from archipelago.core.schema import leaves

    section = registry.section or entry.section
    for leaf in leaves(entry.options).values():
        yield dataclasses.replace(leaf, key=f"{section}.{leaf.key}")


def _document(registry: Registry[Any], entry: Entry[Any], whole: bool = False) -> dict[str, Any]:
    document = {
        "kind": registry.kind, "name": entry.name, "about": entry.about, "label": entry.label,
        "options": [_option(leaf) for leaf in _options(registry, entry)],
        "capabilities": _capabilities(entry),
    }  # fmt: skip
    if not whole:
        return document
    about, rows = _described(entry)
    return {
        **document,
        "defined_in": _module(entry),
        "documentation": about,
        "readings": [row.stored() for row in rows],
    }


def _print_entry(registry: Registry[Any], entry: Entry[Any]) -> None:
    declared = [(name.replace("_", " "), _shown(value)) for name, value in _capabilities(entry).items()]
    rows: list[tuple[str, ...]] = [
        ("about", entry.about), ("label", entry.label), *declared, ("defined in", _module(entry)),
    ]  # fmt: skip
    written = setting_of(registry)
    how = f", {written.replace('NAME', entry.name)}" if written else ""
    print_table(f"{entry.name} ({registry.kind}{how})", rows)
    if options := list(_options(registry, entry)):
        print_table("Options, with their defaults", _setting_rows(options))
    about, readings = _described(entry)
    print(about)
    if readings:
        print()
        print_readings(readings)


def _capabilities(entry: Entry[Any]) -> dict[str, Any]:
    """What the platform must know about it; a record of several is shown by its fields."""
    found: dict[str, Any] = {}
    for name, value in entry.capabilities.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.asdict(value)
            found |= {key: each for key, each in fields.items() if key not in ("name", "about", "label")}
        else:
            found[name] = value
    return found


def _shown(value: Any) -> str:
    """A capability as text: yes, no, words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(sorted(map(str, value))) or "none"
    return getattr(value, "__name__", None) or str(value)


def _defined(entry: Entry[Any]) -> Any:
    return getattr(entry.value, "origin", entry.value)  # a record around a function may name it


def _module(entry: Entry[Any]) -> str:
    return str(getattr(_defined(entry), "__module__", "") or type(entry.value).__module__)


def _described(entry: Entry[Any]) -> tuple[str, tuple[Reading, ...]]:
    """Its documentation, and how its paper was read; both in one where the table has a form of its own."""
    text, readings = documentation(entry), readings_of(entry)
    return (split_readings(text)[0] if readings else text), readings


def list_command(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND | NAME",
            help=(
                "KIND is methods, data, partitions, models, another kind that the general list has, configs or "
                "settings; NAME is an entry of any kind. plugins=[MODULE] adds what a module of yours registers."
            ),
            autocompletion=suggestions.of_list,
        ),
    ] = None,
    as_json: AsJson = False,
) -> List:
    """Show what there is to choose from, one line each; or what one entry declares.

    An entry declares its label in tables, its options with defaults and ranges, and its capabilities; of a method
    you also see the paper, and how its ambiguities were read.
    """
    settings = [word for word in words or [] if "=" in word and not word.startswith("-")]
    given = refuse_surplus(ctx, [word for word in words or [] if word not in settings], 1, USAGE)
    return List(what=given[0] if given else None, plugins=_plugins(settings), as_json=as_json)


def _plugins(settings: Sequence[str]) -> list[str]:
    """The modules of `plugins=[...]`, the one setting that a list depends on."""
    from archipelago.experiments.given import collect, from_override

    for word in settings:
        if word.partition("=")[0].strip() != "plugins":
            raise UserError(
                f"Expected `{program()} {USAGE}`, got '{word}': no setting but plugins changes what there is.",
                code="surplus",
                word=word,
            )
    found = collect(map(from_override, settings))
    return [str(name) for name in found["plugins"].value] if found else []


COMMAND = Described(
    "list",
    list_command,
    "[KIND | NAME] [plugins=[MODULE]] [--json]",
    "what there is to choose from; KIND is methods, data, partitions, models, configs, settings; NAME is one of these",
    [
        ("Every kind", "list"),
        ("Every setting, with its default and range", "list settings"),
        ("What IFCA declares: its options, and how its paper was read", "list ifca"),
        ("All methods for another program", "list methods --json"),
        ("What a plug-in of yours brings, too", "list methods plugins=[my_method]"),
    ],
)
