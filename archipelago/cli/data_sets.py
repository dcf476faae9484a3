"""`data list` and `data fetch NAME`: which data sets are here, and how to get others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from archipelago.cli import suggestions
from archipelago.cli.app import Described
from archipelago.cli.output import print_table
from archipelago.cli.request import Request
from archipelago.core.errors import UserError
from archipelago.core.program import program


@dataclass(kw_only=True)
class ListDataSets(Request):
    """List the data sets with where they are."""

    overrides: list[str] = field(default_factory=list)

    def execute(self) -> None:
        """Print one line for each."""
        from archipelago.data.catalogue import listing
        from archipelago.experiments.config import load_config

        settings = load_config(None, self.overrides).data
        print_table(f"Data sets (data.root={settings.root})", [*listing(settings)])


@dataclass(kw_only=True)
class FetchDataSets(Request):
    """Download data sets."""

    names: list[str]
    overrides: list[str] = field(default_factory=list)

    def execute(self) -> None:
        """Download each that is not here."""
        from archipelago.data.catalogue import fetch_dataset
        from archipelago.experiments.config import load_config

        settings = load_config(None, self.overrides).data
        for name in self.names:
            print(fetch_dataset(name, settings))


def data(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="list | fetch NAME ...",
            help="What to do, and settings of the section `data`, as in data.root=FOLDER.",
            autocompletion=suggestions.of_data,
        ),
    ] = None,
) -> Request:
    """Show which data sets are here and where (list), or download some (fetch NAME ...).

    Files are kept in data.root (default: ~/.cache/archipelago), verified, and never downloaded twice.
    """
    overrides = [word for word in words or [] if "=" in word]
    action, *names = [word for word in words or [] if "=" not in word] or [""]
    _refuse(action, names, overrides)
    if action == "list":
        return ListDataSets(overrides=overrides)
    return FetchDataSets(names=names, overrides=overrides)


def _refuse(action: str, names: Sequence[str], overrides: Sequence[str]) -> None:
    if action not in ("list", "fetch"):
        raise UserError(
            f"Expected `{program()} data list` or `{program()} data fetch NAME`, got 'data {action}'.",
            code="unknown-name", kind="command", name=action,
        )  # fmt: skip
    if action == "list" and names:
        raise UserError(
            f"Expected `{program()} data list`, got '{names[0]}' too: leave it out.",
            code="surplus", word=names[0],
        )  # fmt: skip
    if action == "fetch" and not names:
        raise UserError(
            f"Expected `{program()} data fetch NAME`, got no name: `data list` shows them.",
            code="missing-word", wanted="name",
        )  # fmt: skip
    foreign = next((word for word in overrides if not word.startswith("data.")), None)
    if foreign is not None:
        raise UserError(
            f"Expected settings of `data` only, as in data.root=FOLDER, got '{foreign}'.",
            code="unread", setting=foreign,
        )  # fmt: skip


COMMAND = Described(
    "data",
    data,
    "list | fetch NAME ... [data.setting=value ...]",
    "which data sets are here; download some",
    [("Which data sets are here", "data list"),
     ("Download CIFAR-10 into a folder of your own", "data fetch cifar10 data.root=~/data")],
    rows=[
        ("data list [data.root=FOLDER]", "which data sets are here"),
        ("data fetch NAME [data.root=FOLDER]", "download one"),
    ],
)  # fmt: skip
