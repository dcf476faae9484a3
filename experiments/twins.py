"""Trials that train what another trial trains, and need not do so twice.

`fesem+cam+finetune` differs from `fesem+cam` in nothing before the first evaluation that fine-tunes (thesis 7.4.4:
the base never sees the fine-tuned models). A sweep that has both, with the same settings and seed, runs the plain
one first; the fine-tuned one takes over its rounds up to the fork, and goes on from there as a resumed run does.
Whether it could, or had to train by itself, its files are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.checkpoints import CheckpointWriter, checkpoints, load
from experiments.run_directory import RunDirectory, is_run, read_status
from experiments.storage import is_address, name_of, reading
from experiments.sweep_config import Trial
from foundation.errors import UserError
from foundation.settings import ExperimentSettings
from strategies.finetune import first_tuned_round

_ENDING = "+finetune"


def twins(trials: Iterable[Trial]) -> dict[str, str]:
    """For the name of each fine-tuned trial, the name of the one that trains the same; where there is one."""
    by_training: dict[str, str] = {}
    tuned: list[tuple[str, str]] = []
    for trial in trials:
        if trial.config.choose_clusters:  # every method chooses for itself
            continue
        method = trial.config.method
        training = repr(dataclasses.replace(trial.config, method=method.removesuffix(_ENDING), name=None))
        if method.endswith(_ENDING):
            tuned.append((trial.name, training))
        else:
            by_training[training] = trial.name
    return {name: by_training[training] for name, training in tuned if training in by_training}


def in_order(trials: list[Trial], pairs: Mapping[str, str]) -> list[Trial]:
    """The trials, each fine-tuned one right behind the one whose rounds it takes over."""
    place = {trial.name: number for number, trial in enumerate(trials)}
    return sorted(trials, key=lambda trial: (place[pairs.get(trial.name, trial.name)], trial.name in pairs))


def fork_round(config: ExperimentSettings) -> int:
    """The last round after which a run and its fine-tuned twin have the same files."""
    return first_tuned_round(config.rounds, config.evaluation.every, config.evaluation.last) - 1


def take_rounds(run: RunDirectory, config: ExperimentSettings, twin: str) -> None:
    """Begin a run with its twin's rounds up to the fork, as far as there is a checkpoint of a finished twin.

    The checkpoint is written last: a kill before that leaves a run that begins with its first round.
    """
    if not is_address(twin) and not is_run(Path(twin)):
        return
    try:
        with reading(twin) as path:
            done = _take(run, path, fork_round(config)) if read_status(path).state == "finished" else 0
    except UserError:  # nothing there, or damaged: nothing to take
        return
    if done:
        run.note(done, f"Rounds 1 to {done} are those of {name_of(twin)}, which trains the same until then.")


def _take(run: RunDirectory, twin: Path, fork: int) -> int:
    for done, folder in reversed(checkpoints(twin)):
        if done > fork:
            continue
        try:
            parts = load(folder)
        except UserError:  # damaged: an older one may be whole
            continue
        parts["server"]["addons"].append({})  # fine-tuning comes last, and keeps nothing
        run.adopt(twin, done)
        writer = CheckpointWriter(run, every=1, keep=1)
        try:
            writer.submit(done, parts)
            writer.close()
        finally:
            writer.abandon()
        return done
    return 0
