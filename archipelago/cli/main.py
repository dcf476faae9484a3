"""The entry point of the command line: which commands there are, and the exit codes. The only reader of `sys.argv`."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Sequence

import typer
from typer.core import TyperGroup

from archipelago.cli import (
    choose_clusters,
    completion,
    data_sets,
    doctor,
    listing,
    partition,
    report,
    resume,
    run,
)
from archipelago.cli.app import make_app
from archipelago.cli.request import Answered, Request
from archipelago.cli.stopping import Stopped
from archipelago.cli.words import no_config
from archipelago.core.causes import no_space, sentence_of
from archipelago.core.errors import UserError
from archipelago.core.program import DISTRIBUTION, program, program_of, set_program, version
from archipelago.core.redaction import redacted
from archipelago.core.signals import interrupted_once

COMMANDS = (
    run.COMMAND, listing.COMMAND, partition.COMMAND, resume.COMMAND, report.COMMAND, choose_clusters.COMMAND,
    data_sets.COMMAND, doctor.COMMAND, completion.COMMAND,
)  # fmt: skip


@functools.cache
def app() -> TyperGroup:
    """The commands, as Typer sees them."""
    return make_app(COMMANDS)


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line; a word that means nothing is answered with a sentence."""
    if list(arguments) == ["--version"]:
        print(f"{DISTRIBUTION} {version()}")
        return Answered()
    try:
        found = app().main(
            list(arguments),
            prog_name=program(),
            complete_var=completion.VARIABLE,
            standalone_mode=False,
        )
    except typer.TyperException as error:
        if getattr(error, "option_name", "") == "--config":
            raise no_config() from error
        raise UserError(f"{error.format_message()} `--help` shows what there is.", code="usage") from error
    if isinstance(found, Request):
        found.typed = redacted(f"{program()} {shlex.join(arguments)}".strip())
        return found
    return Answered()


def main(arguments: Sequence[str], started_as: str = "archipelago") -> int:
    """Do what the command line asks for; returns the exit code (see the end of the general help).

    `started_as` is what the user typed before the arguments.
    """
    set_program(started_as)
    with interrupted_once():
        try:
            parse(arguments).execute()
            sys.stdout.flush()
        except UserError as error:
            return _answer(2, str(error))
        except Stopped as stop:
            return _answer(stop.code, str(stop))
        except KeyboardInterrupt:
            return _answer(130, "Stopped. Nothing was written.")
        except BrokenPipeError:  # `list | head` is no failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (OSError, MemoryError) as error:
            if no_space(error) is None and not isinstance(error, MemoryError):
                raise
            return _answer(1, f"Failed: {sentence_of(error)}.")
        return 0


def _answer(code: int, sentence: str) -> int:
    print(redacted(" ".join(sentence.split())), file=sys.stderr)
    return code


def command_line() -> None:
    """`archipelago`, `python -m archipelago` and `python -m platform.launch`."""
    sys.exit(main(sys.argv[1:], program_of(sys.argv[0])))
