"""The names that a command line may contain: kinds, entries, settings with their values, configs.

Completion needs them within a fraction of a second, and importing all packages takes two: so they are kept in a file
that is made anew whenever the code or the installed plug-ins have changed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archipelago.core.files import write_whole
from archipelago.core.registry import REGISTRIES, Registry

# Kinds that are called otherwise on the command line.
NAMES = {"data set": "data", "add-on": "methods"}  # kind -> what `list` calls it
MORE = ("archipelago.core.metrics",)  # what the schema of an experiment does not need
PACKAGES = ("archipelago", "actors", "lightning_modules")


def load_entries() -> None:
    """Import whatever registers entries: the platform's own modules and installed plug-ins."""
    from archipelago.core.plugins import load_built_in, load_plugins

    load_built_in()
    for module in MORE:
        importlib.import_module(module)
    load_plugins()


def registries() -> list[Registry[Any]]:
    """All registries that have entries, in the order of `list`."""
    load_entries()
    first = ("method", "add-on", "data set", "partition", "model")
    ordered = sorted(
        REGISTRIES.values(), key=lambda each: first.index(each.kind) if each.kind in first else len(first)
    )
    return [each for each in ordered if len(each)]


def kinds() -> dict[str, list[Registry[Any]]]:
    """{what `list` calls it: the registries}; `methods` has the add-ons too."""
    found: dict[str, list[Registry[Any]]] = {}
    for registry in registries():
        found.setdefault(kind_name(registry.kind), []).append(registry)
    return found


def kind_name(kind: str) -> str:
    """
    >>> kind_name("method"), kind_name("data set"), kind_name("clustering rule")
    ('methods', 'data', 'clustering-rules')
    """
    return NAMES.get(kind, f"{kind.replace(' ', '-')}s")


def setting_of(registry: Registry[Any]) -> str:
    """How an entry is chosen, as in `data=NAME`; empty where no setting chooses one of this kind."""
    from archipelago.core.schema import leaves
    from archipelago.core.settings import ExperimentSettings, SweepSection
    from archipelago.experiments.readers import CHOSEN_BY

    kind, section = registry.kind, registry.section
    if kind == "add-on":
        return "method=BASE+NAME"
    known = {*leaves(ExperimentSettings), *leaves(SweepSection)}
    candidates = [
        CHOSEN_BY.get(kind, ""),
        f"{section}.{kind}",
        f"{section}.name",
        kind,
        f"{kind.split()[0]}.name",
    ]
    found = next((key for key in candidates if key in known), "")
    if found.endswith(".transforms"):
        return f"{found.removesuffix('.transforms')}=[NAME]"
    if (leaf := leaves(ExperimentSettings).get(found)) is not None and leaf.many:
        return f"{found}=[NAME]"
    if found:
        return f"{found.removesuffix('.name')}=NAME"
    return f"{kind}s=[NAME]" if f"{kind}s" in known else ""


@dataclass(frozen=True)
class Vocabulary:
    """Everything that completion knows."""

    kinds: dict[str, dict[str, str]]  # {what `list` calls it: {entry: one line about it}}
    settings: dict[str, str]  # {dotted name: one line about it}
    values: dict[str, dict[str, str]]  # {dotted name: {a value it may have: one line about that}}
    addons: list[str]


def build_vocabulary() -> Vocabulary:
    """Import everything and look."""
    from archipelago.core.schema import composed, leaves
    from archipelago.core.settings import ExperimentSettings, SweepSection
    from archipelago.sweeps.axes import AXES, OTHERS

    entries = {each.kind: {name: entry.about for name, entry in each.items()} for each in registries()}
    settings = {f"sweep.{name}": about for name, (_, about) in AXES.items()}
    settings |= {f"sweep.{name}": about for name, about in OTHERS.items()}
    values: dict[str, dict[str, str]] = {}
    for leaf in [*leaves(composed(ExperimentSettings)).values(), *leaves(composed(SweepSection)).values()]:
        settings[leaf.key] = leaf.about
        if choices := leaf.metadata.get("choices"):
            values[leaf.key] = dict.fromkeys(choices, "")
        elif leaf.type is bool:
            values[leaf.key] = {"true": "", "false": ""}
    for registry in registries():
        key, _, value = setting_of(registry).partition("=")
        if value == "NAME":
            values[key] = entries[registry.kind]
            settings.setdefault(key, settings.get(f"{key}.name", ""))
            if f"{key}.name" in settings:
                values[f"{key}.name"] = entries[registry.kind]
    named = {
        name: {k: v for each in of for k, v in entries[each.kind].items()} for name, of in kinds().items()
    }
    return Vocabulary(named, settings, values, sorted(entries.get("add-on", {})))


def vocabulary() -> Vocabulary:
    """What was looked up before, if the code is the same; else looked up now and kept."""
    file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "archipelago/completion.json"
    state = _state_of_code()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept.pop("state") == state:
            return Vocabulary(**kept)
    found = build_vocabulary()
    with contextlib.suppress(OSError):  # a home that cannot be written is no reason to complete nothing
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"state": state, **asdict(found)}), durable=False)
    return found


def _state_of_code() -> list[Any]:
    """What changes with the code: the newest file of every package, and the installed plug-ins."""
    from archipelago.core.plugins import installed_plugins

    root = Path(__file__).resolve().parents[2]
    files = [file.stat() for package in PACKAGES for file in (root / package).rglob("*.py")]
    newest = max(each.st_mtime_ns for each in files)
    return [str(root), len(files), newest, sorted(map(list, installed_plugins().items()))]
