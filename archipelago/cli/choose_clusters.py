"""`choose-clusters [setting=value ...]`: try several numbers of clusters."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import typer

from archipelago.cli.app import Described
from archipelago.cli.request import Request
from archipelago.cli.words import Config, Settings, Small, one_config, refuse_small_alone, settings_of
from archipelago.core.program import program


@dataclass(kw_only=True)
class ChooseClusters(Request):
    """Try several numbers of clusters by FeSEM's recipe and say which one fits best."""

    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    small: bool = False  # the small variant of the file

    def execute(self) -> None:
        """Try them, print each and the choice."""
        from archipelago.experiments.config import load_config

        config = load_config(self.file, [*self.overrides, "clusters=auto"], small=self.small)
        from archipelago.experiments.choose_clusters import Trial, choose_clusters

        def show(trial: Trial) -> None:
            print(
                f"clusters={trial.clusters:<3} validation loss {trial.loss:.4f} ± {trial.error:.4f}  "
                f"score {trial.score:.4f}",
                flush=True,
            )

        choice = choose_clusters(config, on_trial=show)
        print(choice.sentence)
        print(f"Use it: {program()} {shlex.join(self.overrides)} clusters={choice.clusters}")


def choose(
    ctx: typer.Context, words: Settings = None, config: Config = None, small: Small = False
) -> ChooseClusters:
    """Try several numbers of clusters on the validation data and say which one fits best.

    Each number is tried with the same method and settings; nothing is stored.
    """
    file, overrides = one_config(config), settings_of(ctx, words)
    refuse_small_alone(small, file)
    return ChooseClusters(file=file, overrides=overrides, small=small)


COMMAND = Described(
    "choose-clusters",
    choose,
    "[--config FILE [--small]] [setting=value ...]",
    "try several numbers of clusters",
    [("How many clusters FeSEM should have on rotated digits",
      "choose-clusters method=fesem data=digits data.rotations=4 rounds=10")],
    rows=[("choose-clusters [setting=value ...]", "try several numbers of clusters")],
)  # fmt: skip
