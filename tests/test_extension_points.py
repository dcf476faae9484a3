"""No module outside an entry's own file names it: what the platform must know is declared where it is registered."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from archipelago.core.registry import Entry
from archipelago.strategies import ADDONS, METHODS

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "archipelago", "lightning_modules", "platform")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Names that mean something else, too: only their class and their module are looked for.
AMBIGUOUS = {
    "local": "the section of settings about local training, and an address of Ray",
    "random": "a sampler, and a kind of mixture",
}

# (file, part of the text): examples in help and sentences, defaults, and data about papers.
ALLOWED = {
    ("archipelago/cli/help.py", "{program} method="): "examples in the help",
    ("archipelago/cli/run.py", "data=digits"): "examples in the help",
    ("archipelago/cli/choose_clusters.py", "choose-clusters method="): "an example in the help",
    ("archipelago/cli/listing.py", "ifca"): "an example in the help",
    ("archipelago/core/settings.py", "ifca"): "the default method, and an example in the help of `ensemble`",
    ("archipelago/experiments/given.py", "method: ifca"): "an example of a line in a file",
    ("archipelago/experiments/new_clients.py", "finetune=True"): "the keyword of `adopt`",
    (
        "archipelago/reports/health.py",
        "finetune",
    ): "evaluates other models at its end",
    ("archipelago/reports/published.py", ""): "which row of a paper's table a run belongs to",
    (
        "archipelago/strategies/tuning.py",
        "finetune ",
    ): "the slot that random draws of published runs are keyed by",
}


def own_file(entry: Entry[type]) -> Path:
    path = sys.modules[entry.value.__module__].__file__
    assert path is not None
    return Path(path).resolve()


def built_in() -> list[Entry[type]]:
    """The platform's own methods and add-ons; tests may have registered others."""
    entries = [entry for registry in (METHODS, ADDONS) for entry in registry.values()]
    return [entry for entry in entries if own_file(entry).is_relative_to(ROOT / "archipelago")]


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is no docstring; comments are no part of a tree."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, scopes) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.lineno, node.value


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of whatever is imported or referred to by name, modules in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, str(node.module)
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


@cache
def read(source: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    tree = ast.parse(source)
    return list(texts(tree)), list(identifiers(tree))


def mentions(source: str, entry: Entry[type]) -> Iterator[tuple[int, str]]:
    """(line, text) of every place that knows the entry by its name, its class or its module."""
    strings, names = read(source)
    if entry.name not in AMBIGUOUS:
        word = re.compile(rf"(?<![\w.-]){re.escape(entry.name)}(?![\w-])")  # fesem-2022 is a citation
        yield from ((line, text) for line, text in strings if word.search(text))
    code = {entry.value.__name__, entry.value.__module__}
    yield from ((line, name) for line, name in names if name in code)


@pytest.mark.parametrize("entry", built_in(), ids=lambda entry: entry.name)
def test_no_module_outside_its_own_names_an_entry(entry: Entry[type]) -> None:
    found = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if (
            path == own_file(entry) or name == "archipelago/strategies/__init__.py"
        ):  # which imports all of them
            continue
        found += [
            f"{name}:{line}: {text[:80]!r}"
            for line, text in mentions(path.read_text(encoding="utf-8"), entry)
            if not any(name == file and part in text for file, part in ALLOWED)
        ]
    assert not found, "\n".join(found)


def test_mentions_finds_names_classes_and_modules_and_no_documentation() -> None:
    ditto = METHODS.entry("ditto")
    for source in (
        "if method == 'ditto': pass",
        "x = f'{base}+ditto'",
        "y = 'ditto.lam'",
        "from archipelago.strategies.ditto import DittoOptions",
        "from archipelago.strategies import ditto",
        "z = Ditto",
    ):
        assert list(mentions(source, ditto)), source
    for source in (
        '"""ditto does this."""',
        "pass  # as ditto does",
        "key = 'ditto-2021'",
        "a = 'dittography'",
    ):
        assert not list(mentions(source, ditto)), source


def test_allowed_mentions_are_all_needed() -> None:
    for file, part in ALLOWED:
        source = (ROOT / file).read_text(encoding="utf-8")
        found = [text for entry in built_in() for _, text in mentions(source, entry)]
        assert any(part in text for text in found), f"nothing in {file} is excused by {part!r}"
