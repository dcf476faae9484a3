"""`resume RUN`: continue a run or a sweep that was stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from archipelago.cli import suggestions
from archipelago.cli.app import Described
from archipelago.cli.request import Request
from archipelago.cli.results import show_results, show_sweep
from archipelago.cli.run import following, send
from archipelago.cli.stopping import resumable
from archipelago.cli.words import refuse_surplus
from archipelago.core.errors import UserError
from archipelago.core.program import program


@dataclass(kw_only=True)
class Resume(Request):
    """Continue a run or a sweep from its last checkpoints and show its table."""

    address: str
    trust: bool = False  # import the code that a run from elsewhere names

    def execute(self) -> None:
        """Continue it to its end."""
        from archipelago.experiments.runner import check_code
        from archipelago.experiments.runner import resume as resume_run
        from archipelago.runs.storage import writable
        from archipelago.runs.sweeps import is_sweep
        from archipelago.sweeps.runner import check_code as check_sweep
        from archipelago.sweeps.runner import resume_sweep

        if is_sweep(self.address):
            with resumable(self.address):
                check_sweep(self.address, self.trust)
                resume_sweep(self.address)
            show_sweep(self.address)
            return
        with resumable(self.address), writable(self.address) as (path, mirror):
            check_code(path, self.trust)
            resume_run(path, **following(mirror))
            send(mirror)
            show_results(path, self.address)


def resume(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="The directory of a run or a sweep, or its address in an object store.",
            autocompletion=suggestions.of_directories,
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Import the code that a run from elsewhere names; asked once for each run."
        ),
    ] = False,
) -> Resume:
    """Continue a run or a sweep that was stopped, from its last checkpoint, and show its table.

    The result is the one that the run would have had without the stop.
    """
    given = refuse_surplus(ctx, words, 1, "resume RUN")
    if not given:
        raise UserError(
            f"Expected a run directory after resume, got nothing: as in `{program()} resume runs/NAME`.",
            code="missing-word", wanted="run directory",
        )  # fmt: skip
    return Resume(address=given[0], trust=trust)


COMMAND = Described(
    "resume",
    resume,
    "RUN [--trust]",
    "continue a run or sweep that was stopped",
    [("Continue the run that is in runs/my-run", "resume runs/my-run"),
     ("One in an object store", "resume s3://bucket/results/my-run")],
)  # fmt: skip
