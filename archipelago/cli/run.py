"""`[run] [--config FILE] [setting=value ...]`: one experiment, or a sweep; without words, the demonstration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archipelago.cli.app import DEFAULT, Described
from archipelago.cli.demonstration import introduction
from archipelago.cli.output import print_table
from archipelago.cli.request import Request
from archipelago.cli.results import show_results, show_sweep
from archipelago.cli.stopping import resumable
from archipelago.cli.words import Config, Settings, Small, one_config, refuse_small_alone, settings_of
from archipelago.core.packaged import TUNE_CONFIGS, first_comment

if TYPE_CHECKING:
    from archipelago.runs.storage import Mirror
    from archipelago.sweeps.config import Sweep

DEMONSTRATION = TUNE_CONFIGS / "comparison.yaml"


@dataclass(kw_only=True)
class Run(Request):
    """Run one experiment or a sweep to its end and show its table."""

    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    small: bool = False  # the small variant of the file
    dry: bool = False  # say what would be run, and run nothing

    def execute(self) -> None:
        """Run it, or say what would be run."""
        from archipelago.experiments.config import load_config
        from archipelago.sweeps.config import load_sweep

        sweep = load_sweep(self.file, self.overrides, small=self.small)
        if sweep is not None:
            self._run_sweep(sweep)
            return
        config = load_config(self.file, self.overrides, small=self.small)
        if self.dry:
            from archipelago.cli.doctor import show_plan

            show_plan(config)
            return
        from archipelago.experiments.plan import run_address
        from archipelago.experiments.runner import run_experiment
        from archipelago.runs.storage import writable

        address = run_address(config)
        with resumable(address), writable(address) as (path, mirror):
            run_experiment(config, path, command=self.typed, **following(mirror))
            send(mirror)
            show_results(path, address)

    def _run_sweep(self, sweep: Sweep) -> None:
        """Run all trials of a sweep and show their table; or, dry, only say what would be run."""
        from archipelago.sweeps.directory import sweep_address

        if sweep.settings.table:
            from archipelago.reports.published import find_table

            find_table(sweep.settings.table)  # or its report would be refused after hours
        if self.dry:
            from archipelago.sweeps.dry_run import describe

            for title, rows in describe(sweep):
                print_table(title, rows)
            return
        from archipelago.sweeps.runner import run_sweep

        address = sweep_address(sweep)
        if self.file == DEMONSTRATION and not self.overrides:
            print(introduction(first_comment(DEMONSTRATION.stem)), flush=True)
        with resumable(address):
            run_sweep(sweep, address, command=self.typed)
        show_sweep(address, demonstration=self.file == DEMONSTRATION)


def following(mirror: Mirror | None) -> dict[str, Any]:
    """After every round, an object store gets what a new checkpoint stands on."""
    return {} if mirror is None else {"mirror": mirror}


def send(mirror: Mirror | None) -> None:
    """Whoever lost the right to write at an address must not get as far as its report."""
    if mirror is not None:
        mirror.push()


def run(
    ctx: typer.Context,
    words: Settings = None,
    config: Config = None,
    small: Small = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run, on which devices, and run nothing.")
    ] = False,
) -> Run:
    """Run one experiment to its end and show its table; or a sweep, if a file or a setting has a section `sweep`.

    The word `run` may be left out. Without anything else it runs the demonstration. What is given on the command
    line wins over the file. Results are written to storage/name (default: a new folder in runs/), and whatever
    stops the run, `resume` continues it.
    """
    file = one_config(config)
    overrides = settings_of(ctx, words)
    refuse_small_alone(small, file)
    demonstration = not (file or overrides or dry_run)
    return Run(file=DEMONSTRATION if demonstration else file, overrides=overrides, small=small, dry=dry_run)


COMMAND = Described(
    DEFAULT,
    run,
    "[--config FILE [--small]] [--dry-run] [setting=value ...]",
    "run one experiment or a sweep",
    [
        ("IFCA with 4 cluster models, on digits rotated in 4 groups of clients",
         "method=ifca clusters=4 data=digits data.rotations=4"),
        ("An experiment of a file, with another seed", "--config demo seed=1"),
        ("Three methods, five seeds each", "sweep.methods=[fedavg,ifca,fesem] sweep.seeds=5 data=digits"),
        ("What the small variant of a published table's sweep would run", "--dry-run --config thesis-7.1 --small"),
    ],
    rows=[
        ("[--config FILE] [setting=value ...]", "run one experiment"),
        ("[--dry-run] --config SWEEP [--small]", "run a sweep; dry: say what it would run"),
    ],
)  # fmt: skip
