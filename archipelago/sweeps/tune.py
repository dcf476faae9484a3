"""The trials of a sweep on Ray Tune: batch after batch, with the sweep's own sampler and scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.cluster import live_nodes
from archipelago.core.dotted import dotted
from archipelago.core.errors import UserError
from archipelago.core.plugins import PLUGIN
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.config import config_from_yaml, config_to_yaml
from archipelago.runs.storage import filesystem, is_address, join, read_text, reading
from archipelago.runs.sweeps import FAILED, FINISHED, OVER, RUNNING, STOPPED
from archipelago.sweeps.config import Trial
from archipelago.sweeps.directory import SweepDirectory
from archipelago.sweeps.resources import Reservation, at_a_time, reservation_for
from archipelago.sweeps.shared_prefix import in_order, prefix_of, shared_prefixes
from archipelago.sweeps.trial_watch import watched
from archipelago.sweeps.view import SweepView

_PENDING = "TUNE_MAX_PENDING_TRIALS_PG"
_TUNE = {
    # Tune writes no files of its own for trials, and its warnings are about what is meant to be so.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_THRESHOLD_S": "60",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
}


class TuneSweep:
    """The trials of a sweep on the Ray cluster that this process is connected to."""

    def __init__(self, directory: SweepDirectory, view: SweepView, command: str | None) -> None:
        self.directory, self.view, self.command = directory, view, command
        self.sweep = directory.sweep
        self.label = uuid.uuid4().hex[:8]
        self.nodes = live_nodes()
        self._begun: set[str] = set()  # trials that had a process
        self._refused = ""  # why no process can run any trial
        self._prefixes = {} if self.sweep.tunes else shared_prefixes(self.sweep.trials())

    def run(self) -> None:
        """Batch after batch: trials that compete with each other are one, plain grids are one altogether."""
        from actors.node_data import SharedData

        shared = SharedData(self.label)
        try:
            for label, trials in self._batches():
                self._run_batch(label, trials)
        finally:
            shared.close()

    def _batches(self) -> Iterator[tuple[str, list[Trial]]]:
        """(combination, its trials); the combination is empty for trials that do not depend on each other."""
        sweep = self.sweep
        if not sweep.tunes:
            yield "", self._open(in_order(sweep.trials(), self._prefixes))
            return
        known = _started(self.directory) if sweep.sampler.adaptive else sweep.trials()
        by_seed = sweep.scheduler.exchanges  # a population shares one partition, hence one seed
        for label in sweep.combinations:
            mine = [trial for trial in known if trial.combination == label]
            if not by_seed:
                yield label, mine
            for pair in dict.fromkeys(map(_pair, mine)) if by_seed else ():
                yield label, [trial for trial in mine if _pair(trial) == pair]

    def _open(self, trials: list[Trial]) -> list[Trial]:
        return [trial for trial in trials if self.directory.rows[trial.name].status not in OVER]

    def _run_batch(self, label: str, trials: list[Trial]) -> None:
        sweep, adaptive = self.sweep, self.sweep.sampler.adaptive
        open_trials = self._open(trials)
        study = self._study(label, trials) if adaptive else None
        if study is None and (adaptive or not open_trials):
            return
        config = sweep.combinations[label or next(iter(sweep.combinations))]
        count = max(len(open_trials), sweep.sampler.count * sweep.repeats if study else 0)
        reserved = {
            name: reservation_for(each, sweep.settings.fleet, count, self.nodes)
            for name, each in sweep.combinations.items()
        }
        slots = max(at_a_time(each, config.fleet, self.nodes) for each in reserved.values())
        environment = {**_TUNE, _PENDING: str(1 if study else slots + 1)}
        candidates = trials if sweep.scheduler.replays else open_trials
        with _environment(environment), self._tune_folder() as (folder, system):
            tuner = self._tuner(config, candidates, study, reserved, folder, system)
            with _signals(), watched(self.label, config.fleet.patience, self.view.note):
                tuner.fit()
        if self._refused:
            raise UserError(self._refused, code=PLUGIN)
        if any(self.directory.rows[name].status not in OVER for name in self._begun):
            raise KeyboardInterrupt  # Tune ended what it had started, and returned

    def _tuner(
        self,
        config: ExperimentSettings,
        trials: list[Trial],
        study: Any,
        reserved: Mapping[str, Reservation],
        folder: str,
        system: Any,
    ) -> Any:
        from ray import tune

        from archipelago.sweeps.search import Queue, StopAll, Watcher
        from archipelago.sweeps.tune_trial import TuneTrial

        payloads = (
            [self._payload(trial, reserved) for trial in trials] if self.sweep.scheduler.exchanges else None
        )
        queue = Queue(
            trials, lambda trial: {"payload": self._payload(trial, reserved)}, study, may_begin=self._may_begin
        )  # fmt: skip
        return tune.Tuner(
            tune.with_resources(
                TuneTrial, lambda given: tune.PlacementGroupFactory(given["payload"]["bundles"])
            ),
            # A population takes no search algorithm: it is a grid of its members.
            param_space=None if payloads is None else {"payload": tune.grid_search(payloads)},
            tune_config=tune.TuneConfig(
                search_alg=queue if payloads is None else None,
                scheduler=self.sweep.scheduler.make(config.rounds),
                num_samples=-1 if payloads is None else 1,
                max_concurrent_trials=self.sweep.settings.concurrent or 0,
                reuse_actors=True,
                trial_name_creator=_own_name,
                trial_dirname_creator=_own_name,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=folder,
                storage_filesystem=system,
                verbose=0,
                callbacks=[Watcher(self)],
                stop=StopAll(lambda: bool(self._refused)),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=config.fleet.restarts),
            ),
        )

    def _may_begin(self, trial: Trial) -> bool:
        """A trial that takes over another one's rounds begins when those are there."""
        earlier = self._prefixes.get(trial.name)
        return earlier is None or self.directory.rows[earlier].status in OVER

    def _payload(self, trial: Trial, reserved: Mapping[str, Reservation]) -> dict[str, Any]:
        from archipelago.sweeps.trial import payload, values_now

        scheduler = self.sweep.scheduler
        reservation = reserved[trial.combination]
        address = self.directory.run_address(trial.name)
        if scheduler.needs_states:  # every report may be followed by a pause or an exchange
            every = dataclasses.replace(trial.config.checkpoint, every=trial.config.evaluation.every)
            trial = dataclasses.replace(
                trial,
                config=dataclasses.replace(trial.config, checkpoint=every),
                # What Tune exchanges and hands back at the next pause are the values that it has from here.
                values=values_now(address, trial.values),
            )
        return payload(
            trial,
            address,
            bundles=reservation.bundles,
            actors=reservation.actors,
            gpus=reservation.gpus,
            label=self.label,
            metric=self.sweep.settings.metric,
            watched=scheduler.decides,
            replay=scheduler.replays,
            ended=self.directory.rows[trial.name].status in OVER,
            command=self.command,
            **prefix_of(trial, self._prefixes, self.directory.run_address),
        )

    def _study(self, label: str, trials: list[Trial]) -> Any:
        """The search in a combination, with what earlier processes found; None if nothing is left to do."""
        from archipelago.sweeps.search import Study

        groups: dict[str, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.group, []).append(trial)
        over = [group for group, members in groups.items() if not self._open(members)]
        if len(over) >= self.sweep.sampler.count:
            return None
        past = {group: (members[0].values, self._results(members)) for group, members in groups.items()}
        study = Study(self.sweep, label, past, self.directory.add)
        study.resume(self._open(trials), past)
        return study

    def _results(self, trials: Sequence[Trial]) -> list[float]:
        """The last metric of each trial that is over."""
        from archipelago.sweeps.trial import reported_rows

        found, metric = [], self.sweep.settings.metric
        for trial in trials:
            if self.directory.rows[trial.name].status in (FINISHED, STOPPED):
                with reading(self.directory.run_address(trial.name)) as path:
                    rows = reported_rows(path, metric)
                found += [row[metric] for row in rows[-1:] if metric in row]
        return found

    @contextlib.contextmanager
    def _tune_folder(self) -> Iterator[tuple[str, Any]]:
        """Where Tune may write. States that go from trial to trial, hence from node to node, go through it."""
        if not self.sweep.scheduler.needs_states:
            with tempfile.TemporaryDirectory(prefix="archipelago-tune-") as folder:
                yield folder, None
            return
        address = join(self.directory.address, ".tune")
        if is_address(address):
            system, path = filesystem(address)
            try:
                yield path, system
            finally:
                with contextlib.suppress(OSError):
                    self.directory.hold()  # or it is another driver's folder
                    system.delete_dir(path)
            return
        try:
            yield str(Path(address).resolve()), None
        finally:
            shutil.rmtree(address, ignore_errors=True)

    # What Tune reports ----------------------------------------------------------------------------------------

    def started(self, trial: str) -> None:
        """A trial has a process."""
        self._begun.add(trial)
        if self.directory.rows[trial].status not in OVER:
            self.directory.set(trial, RUNNING)
        self.view.started(trial)

    def reported(self, trial: str, result: Mapping[str, Any]) -> None:
        """A trial has come further."""
        self._refused = self._refused or str(result.get("refused", ""))
        if result.get("done") and self.directory.rows[trial].status not in OVER:
            self.directory.set(trial, result["state"], result["reason"])
        self.view.update(trial, result)

    def over(self, trial: str, result: Mapping[str, Any]) -> None:
        """Tune is done with a trial, which may be sooner than the trial is."""
        if self.directory.rows[trial].status not in OVER and not self._refused:  # or `resume` continues it
            reason = f"stopped by {self.sweep.settings.scheduler} after round {result.get('round', 0)}"
            self.directory.set(trial, STOPPED, reason)
        self.view.over(trial)

    def again(self, trial: str, why: str) -> None:
        """A trial lost its process or its node."""
        self.view.note(f"{trial} resumes from its last checkpoint: {why}")

    def lost(self, trial: str, why: str) -> None:
        """A trial lost its process too often."""
        self.directory.set(trial, FAILED, why)
        self.view.over(trial)


def _own_name(trial: Any) -> str:
    return str(trial.config["payload"]["trial"])


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Tune answers Ctrl-C by ending its trials in order, but never takes its handlers back."""
    logger = logging.getLogger("ray.tune")
    numbers = (signal.SIGINT, signal.SIGUSR1) if threading.current_thread() is threading.main_thread() else ()
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for number, handler in handlers:
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while: Tune knows most of its settings no other way."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _started(directory: SweepDirectory) -> list[Trial]:
    """Trials of every point that an earlier process chose and began with, from the run directories."""
    import yaml  # type: ignore[import-untyped]  # PyYAML ships no types

    sweep = directory.sweep
    points: dict[str, dict[str, Any]] = {}
    for row in directory.rows.values():
        text = read_text(join(directory.run_address(row.trial), "config.yaml"))
        if text is not None:
            flat = dotted(yaml.safe_load(config_to_yaml(config_from_yaml(text))))
            points.setdefault(row.group, {key: flat[key] for key in sweep.space})
    # A point that no trial began with is chosen anew.
    for name in [name for name, row in directory.rows.items() if row.group not in points]:
        del directory.rows[name]
    return [
        trial
        for group, values in points.items()
        for trial in sweep.trials_of(group.rpartition(" | ")[0], values)
    ]


def _pair(trial: Trial) -> tuple[int | None, int]:
    """Partition and start of a trial."""
    return trial.config.partition.seed, trial.seed
