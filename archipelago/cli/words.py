"""The words of a command line that are no command: settings, config names, and sentences about the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from archipelago.cli import suggestions
from archipelago.cli.app import DEFAULT
from archipelago.core.errors import UserError
from archipelago.core.program import program
from archipelago.core.registry import closest, nearest

# Parameters that several commands have. An absent list is None: that is Typer's way.
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="setting=value",
        help="Settings by their dotted names, as in local.lr=0.1; `list settings` shows all.",
        autocompletion=suggestions.of_experiment,
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A YAML file of settings, or the name of one that comes with the package (`list configs`).",
        autocompletion=suggestions.of_configs,
    ),
]
Small = Annotated[
    bool,
    typer.Option("--small", help="The small variant of the file: the same methods in minutes, not days."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, and nothing else, to standard output.")
]


def one_config(given: Sequence[str] | None) -> Path | None:
    """The file of `--config`, which may be given once."""
    if not given:
        return None
    if len(given) > 1:
        raise UserError(
            f"Expected --config once, got both '{given[0]}' and '{given[1]}': leave one out.",
            code="given-twice", setting="--config", given=tuple(given),
        )  # fmt: skip
    if not given[0]:
        raise no_config()
    from archipelago.experiments.config_files import find_config

    return find_config(given[0])


def refuse_small_alone(small: bool, file: Path | None) -> None:
    """The small variant is one of a file."""
    if small and file is None:
        raise UserError(
            "Expected --config FILE beside --small, got none: as in --config thesis-7.6 --small.",
            code="needs", setting="--small", needed="--config",
        )  # fmt: skip


def no_config() -> UserError:
    """The sentence for `--config` at the end of a line."""
    return UserError(
        "Expected a file after --config, got nothing: as in --config tune_configs/demo.yaml.",
        code="missing-word", wanted="file",
    )  # fmt: skip


def settings_of(ctx: typer.Context, words: Sequence[str] | None) -> list[str]:
    """The words, all of which must be settings; one that is not is answered with a sentence."""
    others = any(value for name, value in ctx.params.items() if name != "words")
    for position, word in enumerate(words or []):
        if word.startswith("-"):
            raise unknown_option(word, options_of(ctx))
        if "=" not in word:
            raise _unknown_word(ctx, word, first=position == 0 and not others)
    return list(words or [])


def options_of(ctx: typer.Context) -> list[str]:
    """The options of a command, without dashes."""
    declared: list[Any] = ctx.command.get_params(ctx)
    return [name[2:] for each in declared for name in each.opts if name.startswith("--")]


def unknown_option(word: str, options: Sequence[str]) -> UserError:
    """The sentence for a word with dashes that is no option."""
    name = word.lstrip("-").partition("=")[0]
    close = nearest(name, options)
    if "Did you mean" in close:
        return UserError(
            f"Unknown option '{word}'. Did you mean '--{close.split(chr(39))[1]}'? `--help` shows all.",
            code="unknown-option", option=word,
        )  # fmt: skip
    return UserError(
        f"Unknown option '{word}': settings are written without dashes, as in {name or 'rounds'}=VALUE.",
        code="unknown-option", option=word,
    )  # fmt: skip


def refuse_surplus(ctx: typer.Context, words: Sequence[str] | None, limit: int, usage: str) -> list[str]:
    """The words of a command that takes no settings and at most `limit` words."""
    given = list(words or [])
    for word in given:
        if word.startswith("-"):
            close = nearest(word.lstrip("-"), options_of(ctx)).partition("'")[2].partition("'")[0]
            hint = f"Did you mean '--{close}'? " if close else ""
            raise UserError(
                f"Unknown option '{word}'. {hint}`{program()} {ctx.info_name} --help` shows all.",
                code="unknown-option", option=word,
            )  # fmt: skip
    if len(given) > limit:
        raise UserError(
            f"Expected `{program()} {usage}`, got '{given[limit]}' too: leave it out.",
            code="surplus", word=given[limit],
        )  # fmt: skip
    return given


def _unknown_word(ctx: typer.Context, word: str, first: bool) -> UserError:
    from archipelago.core.settings import ExperimentSettings
    from archipelago.experiments.config import leaves

    if word.endswith((".yaml", ".yml")):
        return UserError(
            f"Expected setting=value, got the file '{word}': write --config {word}.",
            code="not-a-setting", word=word, nearest="--config",
        )  # fmt: skip
    if (Path(word) / "config.yaml").is_file():
        return UserError(
            f"Expected setting=value, got the run directory '{word}': write resume {word}.",
            code="not-a-setting", word=word, nearest="resume",
        )  # fmt: skip
    known = leaves(ExperimentSettings)
    sections = {key.partition(".")[0] for key in known}
    if not first or ctx.info_name != DEFAULT or word in known or word in sections:
        return UserError(
            f"Expected setting=value, got '{word}': write it as in rounds=10.",
            code="not-a-setting", word=word,
        )  # fmt: skip
    if meant := _meant_by(word):
        return UserError(
            f"Expected setting=value, got '{word}': write {meant}.",
            code="not-a-setting", word=word, nearest=meant,
        )  # fmt: skip
    commands: Any = ctx.find_root().command
    names = [name for name, each in commands.commands.items() if not each.hidden]
    return UserError(
        f"Unknown command '{word}'. {nearest(word, [*names, '--help'])}",
        code="unknown-name", kind="command", name=word, nearest=closest(word, [*names, "--help"]),
    )  # fmt: skip


def _meant_by(word: str) -> str:
    """What chooses an entry or a file of this name; empty if there is none."""
    from archipelago.cli.vocabulary import vocabulary
    from archipelago.experiments.config_files import config_names

    known = vocabulary()
    if word in known.addons:
        return f"method=BASE+{word}"
    for key in ("method", "data", "partition", "model"):
        if word.partition("+")[0] in known.values.get(key, {}):
            return f"{key}={word}"
    return f"--config {word}" if word in config_names() else ""
