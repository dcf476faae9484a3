"""The Typer application: which words are a command, and what its help looks like.

Typer does what it is good at (options, per-command help, completion); the sentences for mistakes are ours. So no
command lets Typer refuse a word: unknown options and surplus words are passed on (`ignore_unknown_options`) and
answered in `words.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from archipelago.cli.request import Request
from archipelago.core.errors import UserError
from archipelago.core.registry import closest, nearest

DEFAULT = "run"  # the command of a line that begins with none
HELP = ("--help", "-h", "help")
SHELL_OPTIONS = ("--install-completion", "--show-completion")  # of the hidden command `completion`
WIDTH = 110


@dataclass(frozen=True)
class Described:
    """A command: the function that reads its words, and what the help says."""

    name: str
    function: Callable[..., Request]  # its docstring is the text of the command's own help
    usage: str  # what comes after the name
    about: str  # one line in the general help
    examples: Sequence[tuple[str, str]] = ()  # (what it does, the command without the program)
    values: Sequence[tuple[str, str]] = ()  # option=value words, each with one line about it
    rows: Sequence[tuple[str, str]] = ()  # (usage, about) in the general help, where one row is not enough
    hidden: bool = False

    def in_general_help(self) -> Sequence[tuple[str, str]]:
        """(words behind the program, what they do)."""
        usage = self.usage.replace("[--json]", "").strip()  # one sentence says it of all commands
        return self.rows or [(f"{self.name} {usage}", self.about)]


class Command(TyperCommand):
    """A command whose help ends in examples, written with the words that the user starts the program with."""

    described: Described

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What comes after the name in the line `Usage:`."""
        return [self.described.usage]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options, and words that are written as option=value."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "argument":
                sections["Arguments"].append((str(parameter.metavar), str(record[1])))
            elif record is not None:
                sections["Options"].append(record)
        sections["Options"] += self.described.values
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        if self.described.examples:
            formatter.write("\nExamples:\n")
        for about, line in self.described.examples:
            formatter.write(f"  {about}:\n    {ctx.find_root().info_name} {line}".rstrip() + "\n")


class Front(TyperGroup):
    """All commands. A line that begins with no command word runs an experiment or a sweep."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command word in front where it is left out."""
        return super().parse_args(ctx, self._with_command(args, completing=ctx.resilient_parsing))

    def _with_command(self, args: list[str], completing: bool) -> list[str]:
        first = args[0] if args else ""
        if not completing and any(word in HELP for word in args):
            asked = first if first in self.commands else next(iter(args[1:]), "") if first == "help" else ""
            if first == "help" and asked and asked not in self.commands:
                raise UserError(
                    f"Unknown command '{asked}' after help. {nearest(asked, self.commands)}",
                    code="unknown-name", kind="command", name=asked, nearest=closest(asked, self.commands),
                )  # fmt: skip
            return [asked, "--help"] if asked in self.commands else ["--help"]
        if first in self.commands:
            return args
        return ["completion", *args] if first in SHELL_OPTIONS else [DEFAULT, *args]

    def get_help(self, ctx: Any) -> str:
        """The general help."""
        from archipelago.cli.help import general_help

        shown = [command for command in self.commands.values() if not command.hidden]
        return general_help(str(ctx.info_name), [command.described for command in shown])  # type: ignore[attr-defined]


def make_app(commands: Sequence[Described]) -> TyperGroup:
    """The application of these commands, in the order of the help."""
    app = typer.Typer(cls=Front, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {
        "ignore_unknown_options": True, "help_option_names": ["--help", "-h"], "max_content_width": WIDTH,
    }  # fmt: skip
    for each in commands:
        app.command(each.name, cls=Command, context_settings=settings, hidden=each.hidden)(each.function)
    app.callback()(_all_commands)
    group = typer.main.get_command(app)
    assert isinstance(group, Front)
    group.params = []  # Typer's options that install its scripts; `completion` has ours, under the same names
    for each in commands:
        group.commands[each.name].described = each  # type: ignore[attr-defined]
    return group


def _all_commands() -> None:
    """Experiments in clustered federated learning."""


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
