"""`partition [setting=value ...]`: divide the data only, and draw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import typer

from archipelago.cli.app import Described
from archipelago.cli.output import print_table
from archipelago.cli.request import Request
from archipelago.cli.words import Config, Settings, Small, one_config, refuse_small_alone, settings_of


@dataclass(kw_only=True)
class Partition(Request):
    """Divide the data among the clients, say what came out, and draw it."""

    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    small: bool = False  # the small variant of the file

    def execute(self) -> None:
        """Divide, print, draw."""
        from archipelago.data import partition_seed
        from archipelago.experiments.config import load_config

        config = load_config(self.file, self.overrides, small=self.small)
        from archipelago.experiments.figures_data import (
            held_out_clients,
            partition_address,
            write_partition,
        )
        from archipelago.runs.storage import join, writable

        address = partition_address(config)
        with writable(address) as (path, _):
            write_partition(config, path)
            from archipelago.reports.drawing_federation import draw_federation
            from archipelago.reports.federation import describe

            rows = [*describe(path), *held_out_clients(config)]
            seed = partition_seed(config.partition, config.seed)
            print_table(f"Partition {config.partition.name}, seed {seed}", rows)
            drawn = [join(address, file.relative_to(path).as_posix()) for file in draw_federation(path)]
        print(f"Figures: {', '.join(drawn)}")
        print(f"Tables and indices: {address}")


def partition(
    ctx: typer.Context, words: Settings = None, config: Config = None, small: Small = False
) -> Partition:
    """Divide the data among the clients as an experiment with these settings would, and train nothing.

    Prints what came out and draws it: who has which classes, and how alike the clients are.
    """
    file, overrides = one_config(config), settings_of(ctx, words)
    refuse_small_alone(small, file)
    return Partition(file=file, overrides=overrides, small=small)


COMMAND = Described(
    "partition",
    partition,
    "[--config FILE [--small]] [setting=value ...]",
    "divide the data only, and draw it",
    [("100 clients in 10 groups, each with a Dirichlet distribution of its own",
      "partition clients=100 partition=cluster_dirichlet partition.groups=10"),
     ("Two classes a client", "partition clients=6 partition=n_class name=two-classes")],
    rows=[("partition [setting=value ...]", "divide the data only, and draw it")],
)  # fmt: skip
