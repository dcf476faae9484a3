"""Trials with a shared prefix: rounds that another trial trains the same need not be trained twice.

`fesem+cam+finetune` differs from `fesem+cam` in nothing before the first evaluation that fine-tunes (thesis 7.4.4:
the base never sees the fine-tuned models). A sweep that has both, with the same settings and seed, runs the plain
one first; the fine-tuned one takes over its rounds up to the branch point, and continues from there as a resumed run
does. Whether it could, or had to train by itself, its metrics, tables and models are the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.runs.checkpoints import CheckpointWriter, checkpoints, load
from archipelago.runs.directory import RunDirectory
from archipelago.runs.environment import environment_differences
from archipelago.runs.status import is_run, read_status
from archipelago.runs.storage import is_address, name_of, reading
from archipelago.strategies import Context
from archipelago.strategies.method import first_late_round, with_late_addons, without_late_addons
from archipelago.sweeps.config import Sweep, Trial


def shared_prefixes(trials: Iterable[Trial]) -> dict[str, str]:
    """For the name of each fine-tuned trial, the name of the one whose rounds it shares; where there is one."""
    by_training: dict[str, str] = {}
    tuned: list[tuple[str, str]] = []
    for trial in trials:
        config = trial.config
        if config.choose_clusters or config.ensemble:  # each for itself
            continue
        method = without_late_addons(config.method)
        training = repr(dataclasses.replace(config, method=method, name=None))
        if method == config.method:
            by_training[training] = trial.name
        elif branch_point(config):  # else there is nothing to share
            tuned.append((trial.name, training))
    return {name: by_training[training] for name, training in tuned if training in by_training}


def in_order(trials: list[Trial], prefixes: Mapping[str, str]) -> list[Trial]:
    """The trials, each fine-tuned one right behind the one whose rounds it takes over."""
    position = {trial.name: number for number, trial in enumerate(trials)}
    return sorted(
        trials, key=lambda trial: (position[prefixes.get(trial.name, trial.name)], trial.name in prefixes)
    )


def prefix_of(trial: Trial, prefixes: Mapping[str, str], address: Callable[[str], str]) -> dict[str, Any]:
    """Which run's rounds a trial takes over, and whether its own are taken over."""
    earlier = prefixes.get(trial.name)
    return {
        "prefix": None if earlier is None else address(earlier),
        "branches": trial.name in prefixes.values(),
    }


def branch_point(config: ExperimentSettings) -> int:
    """The last round after which a run and its fine-tuned form have the same files."""
    context = Context(
        clients=config.clients,
        rounds=config.rounds,
        evaluate_every=config.evaluation.every,
        evaluate_last=config.evaluation.last,
    )
    return first_late_round(config.method, context) - 1


def shared_rounds(sweep: Sweep) -> dict[str, float]:
    """For each trial that takes rounds over, which part of its rounds they are."""
    if sweep.tunes:
        return {}
    trials = sweep.trials()
    prefixes = shared_prefixes(trials)
    return {t.name: branch_point(t.config) / t.config.rounds for t in trials if t.name in prefixes}


def take_rounds(run: RunDirectory, config: ExperimentSettings, earlier: str) -> bool:
    """Begin a run with the rounds of `earlier`, if that is finished, up to its last checkpoint before they branch.

    The checkpoint is written last: a kill before that leaves a run that begins with its first round.
    """
    if not is_address(earlier) and not is_run(Path(earlier)):
        return False
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(reading(earlier))
            finished = read_status(path).state == "finished"
        except (UserError, OSError):  # nothing there, or out of reach
            return False
        return finished and _take(run, path, config, name_of(earlier))


def _take(run: RunDirectory, earlier: Path, config: ExperimentSettings, name: str) -> bool:
    for done, folder in reversed(checkpoints(earlier)):
        if done > branch_point(config):
            continue
        try:
            parts = load(folder)
            theirs, ours = (
                json.loads((each / "environment.json").read_text()) for each in (earlier, run.path)
            )
            run.adopt(earlier, done)
        except (UserError, ValueError, FileNotFoundError):  # damaged: an older checkpoint may be whole
            continue
        run.note(done, f"Rounds 1 to {done} are those of {name}, which trains the same until then.")
        for difference in environment_differences(theirs, ours):
            run.note(done, difference)
        given: dict[str, Any] = {name: functools.partial(parts.__getitem__, name) for name in parts}
        given["server"] = with_late_addons(parts["server"], config.method)
        writer = CheckpointWriter(run, every=1, keep=1)
        try:
            writer.submit(done, given)
            writer.close()
        finally:
            writer.abandon()
        return True
    return False
