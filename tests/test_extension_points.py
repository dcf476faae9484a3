"""No module outside an entry's own file names it: what the platform must know is declared where it is registered."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import archipelago.reports.build  # noqa: F401  (figures register themselves)
from archipelago.core.plugins import load_built_in
from archipelago.core.registry import REGISTRIES, Entry
from archipelago.strategies import METHODS

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "archipelago", "lightning_modules", "platform")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
load_built_in()

# (kind, name) of entries whose name means something else, too, and what: of these only class and module are looked
# for, and of other kinds than methods and add-ons, which share files, nothing.
AMBIGUOUS = {
    ("method", "local"): "the section of settings about local training, and an address of Ray",
    ("method", "random"): "a sampler, and a kind of mixture",
    ("adoption rule", "labels"): "a column of data, and a need of metrics",
    ("aggregation rule", "mean"): "a number of many values, and of pixels",
    ("aggregation rule", "median"): "a number of many values",
    ("aggregation rule", "trimmed_mean"): "an option of the method that is about it",
    ("drift", "move"): "clients are moved to other actors",
    ("drift", "rotation"): "a shift of images, as a word",
    ("learning-rate schedule", "cosine"): "a distance",
    ("learning-rate schedule", "step"): "of an optimizer",
    ("metric", "loss"): "what training minimises",
    ("model", "linear"): "a scale of numbers",
    ("optimizer", "adagrad"): "a server optimizer",
    ("optimizer", "adam"): "a server optimizer, and arithmetic that engines know",
    ("optimizer", "sgd"): "a server optimizer, and arithmetic that engines know",
    ("partition", "mixture"): "of models, which FedEM and FedSoft are about",
    ("sampler", "grid"): "an axis of sweeps",
    ("sampler", "random"): "a method, and a kind of mixture",
    ("scheduler", "median"): "a number of many values",
    ("scheduler", "none"): "nothing was chosen",
    ("server optimizer", "adam"): "an optimizer, and arithmetic that engines know",
    ("server optimizer", "sgd"): "an optimizer, and arithmetic that engines know",
    ("update transform", "clip"): "local.clip, of gradients",
}
AMBIGUOUS |= dict.fromkeys(
    [("figure", name) for name in ("bars", "clients", "cluster_sizes", "distributions", "flow", "labels", "levels",
                                   "parts", "similarity", "weights")],
    "a column or a file of a run, which the figure of that name shows",
)  # fmt: skip

# (file, kind or "" for any, part of the text) -> why. A setting's own declaration (its default, its help) may name one.
ALLOWED = {
    (
        "actors/stacked_base.py",
        "engine",
        "StackedEngine",
    ): "the block of clients that this engine trains as one",
    ("archipelago/cli/demonstration.py", "metric", ""): "what the demonstration says of its own table",
    ("archipelago/cli/demonstration.py", "add-on", "list cam"): "what the demonstration says to try next",
    ("archipelago/data/npz.py", "data set", "data=image_folder"): "an example of a remedy",
    ("archipelago/experiments/readers.py", "logger", "tensorboard"): "the setting tensorboard=true",
    (
        "archipelago/reports/groups.py",
        "data set",
        "synthetic",
    ): "the one that reads a setting of all configs whose default moved",
    (
        "archipelago/strategies/",
        "partition",
        "",
    ): "situations of `expectations`, some of which are called as one",
    ("archipelago/strategies/fedgwc.py", "metric", "mse"): "a name of its own state",
    (
        "archipelago/strategies/judged_levels.py",
        "method",
        "femam",
    ): "the settings of the method it is a part of",
    (
        "lightning_modules/engines/",
        "engine",
        "loop",
    ): "what other engines do for what they cannot, and say so",
    ("lightning_modules/engines/", "engine", "LoopEngine"): "what other engines do for what they cannot",
    ("archipelago/cli/help.py", "", "method="): "examples in the help",
    ("archipelago/cli/help.py", "", "data="): "examples in the help",
    ("archipelago/cli/help.py", "", "partition="): "examples in the help",
    ("archipelago/cli/run.py", "", "data=digits"): "examples in the help",
    ("archipelago/cli/choose_clusters.py", "", "choose-clusters method="): "an example in the help",
    ("archipelago/cli/partition.py", "partition", "partition="): "examples in the help",
    ("archipelago/cli/listing.py", "method", "ifca"): "an example in the help",
    ("archipelago/experiments/given.py", "method", "method: ifca"): "an example of a line in a file",
    ("archipelago/experiments/new_clients.py", "add-on", "finetune=True"): "the keyword of `adopt`",
    ("archipelago/api.py", "method", "fedavg"): "asks nothing of what `partition` divides",
    ("archipelago/experiments/checks.py", "add-on", "finetune"): "the keyword of `adopt`",
    ("archipelago/experiments/checks.py", "engine", "trainer"): "an option of it that local.clip excludes",
    ("archipelago/reports/groups.py", "logger", "tensorboard"): "the setting tensorboard=true",
    ("archipelago/runs/identity.py", "logger", "tensorboard"): "the setting tensorboard=true",
    ("archipelago/runs/format.py", "scheduler", "pbt"): "what sweeps of an older format did not declare",
    ("archipelago/reports/health.py", "add-on", "finetune"): "evaluates other models at its end",
    (
        "archipelago/reports/health.py",
        "metric",
        "accuracy",
    ): "a column of parts, which is held against guessing",
    ("archipelago/reports/figures_method.py", "metric", "accuracy"): "a column of parts, as a panel",
    (
        "archipelago/strategies/",
        "metric",
        "accuracy",
    ): "a check of `expectations.CHECKS`, which is called as it",
    ("archipelago/strategies/fedbn.py", "model", "model=cnn_fashion"): "an example of a remedy",
    (
        "archipelago/strategies/cam.py",
        "clustering rule",
        "kmeans",
    ): "how the paper finds the first clusters",
    (
        "archipelago/strategies/fedgroup.py",
        "clustering rule",
        "",
    ): "the paper's rules, as defaults of its option",
    (
        "archipelago/strategies/tuning.py",
        "add-on",
        "finetune ",
    ): "the slot that draws of published runs are keyed by",
    ("actors/compute.py", "engine", "loop"): "a default",
    ("lightning_modules/flat.py", "engine", "local.engine=trainer"): "an example of a remedy",
}
# Data about papers: which row of a paper's table a run belongs to is told by the settings and metrics of that paper.
PAPERS = {
    "archipelago/reports/published.py": (
        "method", "add-on", "data set", "partition", "model", "metric", "aggregation rule",
    )
}  # fmt: skip


def defined(entry: Entry[Any]) -> Any:
    return getattr(entry.value, "origin", entry.value)  # a record around a function names it


def own_file(entry: Entry[Any]) -> Path | None:
    module = sys.modules.get(getattr(defined(entry), "__module__", None) or type(entry.value).__module__)
    path = getattr(module, "__file__", None)
    return None if path is None else Path(path).resolve()


@cache  # first asked when tests are collected
def built_in() -> list[tuple[str, Entry[Any]]]:
    """(kind, entry) of all that the platform registers; tests may have registered others."""
    found = []
    for kind, registry in REGISTRIES.items():
        for entry in registry.values():
            path = own_file(entry)
            ours = path is not None and any(path.is_relative_to(ROOT / package) for package in PACKAGES)
            if ours or kind == "optimizer":  # most of which are torch's own
                found.append((kind, entry))
    return found


def texts(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is no docstring and in no setting's declaration; comments are no part."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, scopes) and node.body and isinstance(node.body[0], ast.Expr)
    }
    declared = {
        id(each)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setting"
        for each in ast.walk(node)
    }
    aside = documents | declared
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in aside:
            yield node.lineno, node.value


def identifiers(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of whatever is imported or referred to by name, modules in full."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, str(node.module)
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


@cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def read(source: str) -> tuple[list[tuple[int, str]], dict[str, list[int]]]:
    """Texts with their lines, and the lines of every name."""
    nodes, names = list(ast.walk(ast.parse(source))), defaultdict(list)
    for line, name in identifiers(nodes):
        names[name].append(line)
    return list(texts(nodes)), names


def mentions(source: str, kind: str, entry: Entry[Any]) -> Iterator[tuple[int, str]]:
    """(line, text) of every place that knows the entry by its name, its class or its module.

    Methods and add-ons are looked for in sentences, too; names of others, many of which are words, by themselves or
    as a value (`engine=loop`).
    """
    if not any(each in source for each in (entry.name, getattr(defined(entry), "__name__", entry.name))):
        return
    strings, names = read(source)
    name, own = re.escape(entry.name), kind in ("method", "add-on")
    if (kind, entry.name) not in AMBIGUOUS:
        word = re.compile(rf"(?<![\w.-]){name}(?![\w-])" if own else rf"^{name}$|=\[?{name}\b")
        yield from ((line, text) for line, text in strings if entry.name in text and word.search(text))
    known = defined(entry)
    if own or (isinstance(known, type) and (kind, entry.name) not in AMBIGUOUS):
        code = {known.__name__, known.__module__} if own else {known.__name__}
        yield from ((line, each) for each in code for line in names.get(each, ()))


def allowed(file: str, kind: str, text: str) -> bool:
    if kind in PAPERS.get(file, ()):
        return True
    return any(file.startswith(at) and each in ("", kind) and part in text for at, each, part in ALLOWED)


def outside(kind: str, entry: Entry[Any]) -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of every place outside its own file that knows an entry; a package imports its own."""
    own = own_file(entry)
    for path in FILES:
        if path != own and path.name != "__init__.py":
            for line, text in mentions(source_of(path), kind, entry):
                yield path.relative_to(ROOT).as_posix(), line, text


@cache
def places() -> list[tuple[str, str, str, int, str]]:
    """(kind, name, file, line, text) of every place outside its own file that knows an entry."""
    return [(kind, entry.name, *place) for kind, entry in built_in() for place in outside(kind, entry)]


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in built_in()}))
def test_no_module_outside_its_own_names_an_entry(kind: str) -> None:
    found = [
        f"{file}:{line}: {name!r} in {text[:80]!r}"
        for each, name, file, line, text in places()
        if each == kind and not allowed(file, kind, text)
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
        assert list(mentions(source, "method", ditto)), source
    for source in (
        '"""ditto does this."""',
        "pass  # as ditto does",
        "key = 'ditto-2021'",
        "a = 'dittography'",
        "mu: str = setting('ditto', 'as in ditto')",
    ):
        assert not list(mentions(source, "method", ditto)), source
    ari = REGISTRIES["metric"].entry("ari")
    assert list(mentions("found['ari']", "metric", ari)) and list(
        mentions("x = 'sweep.metric=ari'", "metric", ari)
    )
    assert not list(mentions("x = 'the ari of safari'", "metric", ari))


def test_allowed_and_ambiguous_mentions_are_all_needed() -> None:
    found = places()
    for file, kind, part in ALLOWED:
        assert any(name.startswith(file) and each in (kind, kind or each) and part in text
                   for each, _, name, _, text in found), f"nothing in {file} is excused by {part!r}"  # fmt: skip
    for file, kinds in PAPERS.items():
        assert set(kinds) <= {kind for kind, _, name, _, _ in found if name == file}
    assert set(AMBIGUOUS) <= {(kind, entry.name) for kind, entry in built_in()}


def test_built_in_method_data_set_engine_or_logger_is_one_file(tmp_path: Path) -> None:
    """A file that is put into the package's folder is found, in a copy of the package: nothing lists it."""
    import shutil
    import subprocess

    for package in ("actors", "archipelago", "lightning_modules"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    files = {
        "archipelago/strategies/added.py": "from archipelago.strategies.base import METHODS\n"
        "from archipelago.strategies.fedavg import FedAvg\n\n\n"
        "@METHODS.register('added', 'a method')\nclass Added(FedAvg):\n    pass\n",
        "archipelago/data/added.py": "from archipelago.data.datasets import dataset\n\n\n"
        "@dataset('added', 'a data set')\ndef added(settings, options, seed):\n    pass\n",
        "lightning_modules/engines/added.py": "from lightning_modules.engines.base import ENGINES, Engine\n\n\n"
        "@ENGINES.register('added', 'an engine')\nclass Added(Engine):\n    pass\n",
        "archipelago/experiments/loggers/added.py": "from archipelago.experiments.loggers.base import LOGGERS\n\n\n"
        "@LOGGERS.register('added', 'a logger')\ndef added(run):\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code = (
        "from archipelago.core.plugins import load_built_in\nfrom archipelago.core.registry import REGISTRIES\n"
        "load_built_in()\nprint(*sorted(kind for kind, known in REGISTRIES.items() if 'added' in known), sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.stdout.strip() == "data set,engine,logger,method", done.stderr
