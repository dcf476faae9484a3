"""What the shell's TAB offers for each kind of word: (value, one line about it).

A value that ends in `=`, `.` or `/` is to be continued; the scripts of `completion.py` put no blank behind it.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from archipelago.cli.app import DEFAULT
from archipelago.cli.vocabulary import vocabulary

Offer = list[tuple[str, str]]
LONGEST = (
    70  # of a description: Typer breaks longer ones into lines, each of which a shell takes for an answer
)

REPORT_OPTIONS = {
    "out=": "folder of the report", "table=": "published table to compare with, as in 3.1",
    "test=t": "paired t-test", "test=wilcoxon": "Wilcoxon's test", "against=": "row that others are tested against",
    "metrics=": "columns of metrics.csv, with commas", "figures=no": "no PNG and SVG files",
    "figures=yes": "PNG and SVG files of the comparison and of one run", "figures=all": "of every run",
}  # fmt: skip


def quiet(function: Callable[[Any, str], Offer]) -> Callable[[typer.Context, str], Offer]:
    """Completion never disturbs the line that is being typed: what cannot be looked up is not offered."""

    @functools.wraps(function)
    def offer(ctx: typer.Context, incomplete: str) -> Offer:
        try:
            offered = [each for each in function(ctx, incomplete) if each[0].startswith(incomplete)]
            return [(value, textwrap.shorten(about, LONGEST, placeholder=" ...")) for value, about in offered]
        except Exception:  # also of a plug-in that cannot be imported; running a command says why
            return []

    return offer


@quiet
def of_experiment(ctx: typer.Context, incomplete: str) -> Offer:
    """Settings and their values; command words at the beginning of a line."""
    words = _words(ctx)
    offered = settings(words, incomplete)
    if ctx.info_name == DEFAULT and not words and "=" not in incomplete:
        commands: Any = ctx.find_root().command
        shown = [(name, each) for name, each in commands.commands.items() if not each.hidden]
        offered = [*((name, each.described.about) for name, each in shown), *offered]
    return offered


@quiet
def of_configs(ctx: typer.Context, incomplete: str) -> Offer:
    """Names of files that come with the package; paths are the shell's own business."""
    from archipelago.experiments.config_files import config_names

    return [(name, "") for name in config_names()]


@quiet
def of_directories(ctx: typer.Context, incomplete: str) -> Offer:
    """Directories: runs and sweeps as whole words, others to be continued."""
    return directories(incomplete)


@quiet
def of_report(ctx: typer.Context, incomplete: str) -> Offer:
    """Directories and the options of a report."""
    return [*directories(incomplete), *REPORT_OPTIONS.items()]


@quiet
def of_data(ctx: typer.Context, incomplete: str) -> Offer:
    """What to do, the names of data sets that can be fetched, settings of the section `data`."""
    words = _words(ctx)
    actions = [word for word in words if "=" not in word]
    if not actions:
        return [("list", "which data sets are here"), ("fetch", "download some")]
    offered = [each for each in settings(words, incomplete or "data.") if each[0].startswith("data.")]
    if actions[0] == "fetch":
        from archipelago.data import DATASETS

        can = {name: entry.about for name, entry in DATASETS.items() if entry.value.fetch}
        offered = [*_without(can, actions), *offered]
    return offered


@quiet
def of_list(ctx: typer.Context, incomplete: str) -> Offer:
    """Kinds, and entries of all kinds; beside one of them, plug-ins."""
    plugins = [("plugins=", "modules of your own")]
    if any("=" not in word for word in _words(ctx)):
        return plugins
    known = vocabulary().kinds
    names = {name: about for entries in known.values() for name, about in entries.items()}
    return [*((kind, "") for kind in (*known, "configs", "settings")), *names.items(), *plugins]


def settings(words: Iterable[str], incomplete: str) -> Offer:
    """Settings that are not given yet, by section (`local.`, then `local.lr=`); behind `=` the values."""
    known = vocabulary()
    key, equals, value = incomplete.partition("=")
    if equals:
        return [(f"{key}={each}", about) for each, about in _values(key, value).items()]
    given = {word.partition("=")[0] for word in words}
    left = {name: about for name, about in known.settings.items() if name not in given}
    depth = incomplete.count(".")
    offered: dict[str, str] = {}
    for name, about in left.items():
        parts = name.split(".")
        if not name.startswith(incomplete) or len(parts) <= depth:
            continue
        whole = len(parts) == depth + 1
        offered.setdefault(
            f"{name}=" if whole else ".".join(parts[: depth + 1]) + ".", about if whole else ""
        )
    return list(offered.items())


def _values(key: str, value: str) -> Mapping[str, str]:
    """The values of a setting; behind `+` in a method, its add-ons."""
    known = vocabulary()
    base, plus, _ = value.rpartition("+")
    if key == "method" and plus:
        about = known.kinds.get("methods", {})
        return {f"{base}+{name}": about.get(name, "") for name in known.addons if name not in base.split("+")}
    return known.values.get(key, {})


def directories(incomplete: str) -> Offer:
    """Folders that begin like this."""
    from archipelago.runs.format import DOCUMENT
    from archipelago.runs.status import is_run

    above, _, _ = incomplete.rpartition("/")
    prefix = incomplete[: len(above) + 1] if "/" in incomplete else ""
    offered = []
    for folder in sorted((Path(prefix).expanduser() if prefix else Path()).iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            ours = is_run(folder) or (folder / DOCUMENT).is_file()
            offered.append((f"{prefix}{folder.name}{'' if ours else '/'}", "run or sweep" if ours else ""))
    return offered


def _words(ctx: typer.Context) -> list[str]:
    return list(ctx.params.get("words") or [])


def _without(offered: Mapping[str, str], given: Iterable[str]) -> Offer:
    return [(name, about) for name, about in offered.items() if name not in given]
