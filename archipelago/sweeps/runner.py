"""A sweep from its description to its directory: trials on Ray Tune, or one after the other in this process."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.cluster import connected
from actors.placement import actor_count, capacity, fits
from archipelago.core.errors import UserError
from archipelago.core.metrics import client_columns
from archipelago.core.registry import nearest
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.config import config_from_yaml, config_to_yaml
from archipelago.runs.storage import (
    filesystem,
    is_address,
    join,
    name_of,
    read_text,
    reading,
    remove_file,
    write_text,
)
from archipelago.sweeps.config import Sweep, Trial, with_label
from archipelago.sweeps.directory import FAILED, FINISHED, OVER, RUNNING, STOPPED, SweepDirectory, absolute
from archipelago.sweeps.shared_prefix import in_order, twins
from archipelago.sweeps.view import SweepView

SMALL = 50_000  # training samples in a round, over all clients: below it, actors cost more than they save
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


def run_sweep(sweep: Sweep, address: str, *, command: str | None = None, quiet: bool = False) -> str:
    """Run every trial; returns the sweep's address. A trial that fails does not stop the others."""
    _check_data(sweep)
    address = absolute(address)
    directory = SweepDirectory.create(address, sweep)
    with contextlib.closing(directory):
        try:
            _go_on(directory, command, quiet)
        except UserError:  # refused before a trial began: the same command, mended, may have the name
            directory.discard()
            raise
    return address


def resume_sweep(address: str, *, quiet: bool = False) -> str:
    """Go on with a sweep: what is finished stays, what was running goes on from its last checkpoint."""
    address = absolute(address)
    directory = SweepDirectory.open(address)
    with contextlib.closing(directory):
        left = [row for row in directory.rows.values() if row.status not in (FINISHED, STOPPED)]
        known = len(directory.rows) >= directory.sweep.planned or directory.sweep.settings.sampler != "optuna"
        if not left and known:
            raise UserError(
                f"Expected a sweep that is not over, got {address} with all {len(directory.rows)} trials done: "
                "open its runs with archipelago.open_run, or run it again under another name."
            )
        for row in left:  # a trial that failed is given another chance
            row.status, row.reason = "waiting", ""
        directory.write()
        _go_on(directory, None, quiet)
    return address


def _check_data(sweep: Sweep) -> None:
    """What only the data can say (is it there, does the network take it) is said before anything is started."""
    from actors.node_data import forget, shared_federation
    from archipelago.experiments.config import check_network

    seen: set[str] = set()
    for label, config in sweep.combinations.items():
        key = repr((config.data, config.partition, config.clients, config.model))
        if key in seen:
            continue
        seen.add(key)

        def try_it(config: ExperimentSettings = config) -> None:
            federation, _ = shared_federation(config)
            check_network(config, federation.input_shape, federation.classes)
            _check_metric(sweep, federation.classes)

        with_label(try_it, label, len(sweep.combinations))
    forget()  # the trials' own processes load what they need


def _check_metric(sweep: Sweep, classes: int | None) -> None:
    """A figure that no trial tells would switch the tuning off without a word."""
    known = [f"validation_{name}" for name in client_columns(classes, sweep.base.plugins)]
    if (sweep.space or sweep.tunes) and sweep.settings.metric not in known:
        task = "a regression" if classes is None else f"a task of {classes} classes"
        raise UserError(
            f"Expected sweep.metric to be a figure of {task}, got '{sweep.settings.metric}'. "
            f"{nearest(sweep.settings.metric, known)}"
        )


def _go_on(directory: SweepDirectory, command: str | None, quiet: bool) -> None:
    sweep = directory.sweep
    with SweepView(directory, quiet=quiet) as view:
        if sweep.base.fleet.backend == "in_process":
            _one_after_the_other(directory, view, command)
            return
        with connected(sweep.base.fleet, name=name_of(directory.address)) as where:
            view.note(f"{directory.address}: {sweep.planned} trials on {where}")
            _check_shared(directory.address)
            TuneSweep(directory, view, command).run()


# In this process ---------------------------------------------------------------------------------------------


def _one_after_the_other(directory: SweepDirectory, view: SweepView, command: str | None) -> None:
    from actors.node_data import forget
    from archipelago.sweeps.trial import TrialRun, payload

    forget()  # files may have changed since an earlier sweep of this process
    trials = directory.sweep.trials()
    pairs = twins(trials)
    for trial in in_order(trials, pairs):
        if directory.rows[trial.name].status in OVER:
            continue
        given = payload(
            trial, directory.run_address(trial.name), command=command, **_kinship(directory, pairs, trial)
        )
        run = TrialRun(**{key: value for key, value in given.items() if key != "trial"})
        directory.set(trial.name, RUNNING)
        view.started(trial.name)
        try:
            while True:
                result = run.step()
                if result["done"]:
                    directory.set(trial.name, result["state"], result["reason"])
                view.update(trial.name, result)
                if result["done"]:
                    break
        finally:
            run.close()


def _kinship(directory: SweepDirectory, pairs: Mapping[str, str], trial: Trial) -> dict[str, Any]:
    """Which trial's rounds a trial takes over, and whether its own are taken over."""
    twin = pairs.get(trial.name)
    return {
        "twin": None if twin is None else directory.run_address(twin),
        "fork": trial.name in pairs.values(),
    }


# On Ray Tune -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What one trial reserves: `bundles` as Tune takes them, and the client actors among them (0: none)."""

    bundles: list[dict[str, float]]
    actors: int


def room_for(
    config: ExperimentSettings, choice: str, trials: int, nodes: Sequence[Mapping[str, float]]
) -> Room:
    """Where a trial's clients live, and what it reserves.

    `auto`: in the trial's own process if nobody asked for actors and either there are trials enough to fill the
    cluster or a round is small; else in actors, as many as its share of the cluster holds.
    """
    fleet = config.fleet
    each = {"CPU": fleet.cpus, **({"GPU": fleet.gpus} if fleet.gpus else {})}
    slots = max(capacity(nodes, fleet), 1)
    asked = fleet.actors is not None or fleet.clients_per_actor is not None
    steps = config.local.steps if config.local.epochs is None else 50 * config.local.epochs
    small = steps * config.local.batch * config.clients * config.participation.fraction <= SMALL
    if choice == "in_process" or (choice == "auto" and not asked and (trials >= slots or small)):
        if not any(fits(node, fleet.cpus, fleet.gpus) for node in nodes):
            actor_count(
                dataclasses.replace(fleet, actors=1, clients_per_actor=None), 1, nodes
            )  # says why not
        return Room([each], 0)
    count = actor_count(fleet, config.clients, nodes)
    if not asked:
        count = max(1, min(config.clients, slots // max(1, min(trials, slots))))
    return Room([{}, *[each] * count], count)


class TuneSweep:
    """The trials of a sweep on the Ray cluster that this process is connected to."""

    def __init__(self, directory: SweepDirectory, view: SweepView, command: str | None) -> None:
        self.directory, self.view, self.command = directory, view, command
        self.sweep = directory.sweep
        self.label = uuid.uuid4().hex[:8]
        self.nodes = live_nodes()
        self._begun: set[str] = set()  # trials that had a process
        self._pairs = {} if self.sweep.tunes else twins(self.sweep.trials())

    def run(self) -> None:
        """Batch after batch: trials that compete with each other are one, plain grids are one altogether."""
        from actors.node_data import SharedData

        shared = SharedData(self.label)
        try:
            for batch in self._batches():
                self._fit(batch)
        finally:
            shared.close()

    def _batches(self) -> Iterator[tuple[str, list[Trial]]]:
        """(combination, trials that are not over); with a scheduler those that are over are told again."""
        sweep = self.sweep
        if not sweep.tunes:
            yield "", self._open(in_order(sweep.trials(), self._pairs))
            return
        known = sweep.trials() if sweep.settings.sampler != "optuna" else _started(self.directory)
        by_seed = sweep.settings.scheduler == "pbt"  # a population shares one partition, hence one seed
        for label in sweep.combinations:
            mine = [trial for trial in known if trial.combination == label]
            for seed in sweep.seeds if by_seed else [None]:
                yield label, [trial for trial in mine if seed is None or trial.seed == seed]

    def _open(self, trials: list[Trial]) -> list[Trial]:
        return [trial for trial in trials if self.directory.rows[trial.name].status not in OVER]

    def _fit(self, batch: tuple[str, list[Trial]]) -> None:
        from ray import tune

        from archipelago.sweeps.search import Queue, Watcher, scheduler_of
        from archipelago.sweeps.trial import TuneTrial

        label, trials = batch
        sweep, settings = self.sweep, self.sweep.settings
        open_trials = self._open(trials)
        if not open_trials and settings.sampler != "optuna":
            return
        study = None
        if settings.sampler == "optuna":
            study = self._study(label, trials)
            if study is None:
                return
        told_again = settings.scheduler in ("asha", "median")
        config = sweep.combinations[label or next(iter(sweep.combinations))]
        count = max(len(open_trials), settings.samples * len(sweep.seeds) if study else 0)
        rooms = {
            name: room_for(each, settings.fleet, count, self.nodes)
            for name, each in sweep.combinations.items()
        }
        candidates = trials if told_again else open_trials
        # PBT takes no search algorithm: a population is a grid of its members.
        population = settings.scheduler == "pbt"
        members = [self._payload(trial, rooms) for trial in candidates] if population else []
        queue = Queue(
            candidates,
            lambda trial: {"payload": self._payload(trial, rooms)},
            study,
            may_begin=self._may_begin,
        )
        slots = max(capacity(self.nodes, config.fleet), 1)
        environment = {**_TUNE, _PENDING: str(1 if study else slots + 1)}
        with _environment(environment), self._tune_folder() as (folder, system):
            tuner = tune.Tuner(
                tune.with_resources(
                    TuneTrial, lambda given: tune.PlacementGroupFactory(given["payload"]["bundles"])
                ),
                param_space={"payload": tune.grid_search(members)} if population else None,
                tune_config=tune.TuneConfig(
                    search_alg=None if population else queue,
                    scheduler=scheduler_of(sweep, config.rounds),
                    num_samples=1 if population else -1,
                    max_concurrent_trials=settings.concurrent or 0,
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
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    failure_config=tune.FailureConfig(max_failures=config.fleet.restarts),
                ),
            )
            with _signals():
                tuner.fit()
        if any(self.directory.rows[name].status not in OVER for name in self._begun):
            raise KeyboardInterrupt  # Tune ended what it had started, and returned

    def _may_begin(self, trial: Trial) -> bool:
        """Whoever takes over another one's rounds comes when those are there."""
        twin = self._pairs.get(trial.name)
        return twin is None or self.directory.rows[twin].status in OVER

    def _payload(self, trial: Trial, rooms: Mapping[str, Room]) -> dict[str, Any]:
        from archipelago.sweeps.trial import payload, values_now

        settings = self.sweep.settings
        room = rooms[trial.combination]
        if settings.scheduler == "pbt":  # every figure that is told may be followed by an exchange
            every = dataclasses.replace(trial.config.checkpoint, every=trial.config.evaluation.every)
            trial = dataclasses.replace(
                trial,
                config=dataclasses.replace(trial.config, checkpoint=every),
                # What Tune exchanges and hands back at the next pause is what it is told here.
                values=values_now(self.directory.run_address(trial.name), trial.values),
            )
        return payload(
            trial,
            self.directory.run_address(trial.name),
            bundles=room.bundles,
            actors=room.actors,
            label=self.label,
            metric=settings.metric,
            watched=settings.scheduler != "none",
            replay=settings.scheduler in ("asha", "median"),
            ended=self.directory.rows[trial.name].status in OVER,
            command=self.command,
            **_kinship(self.directory, self._pairs, trial),
        )

    def _study(self, label: str, trials: list[Trial]) -> Any:
        """Optuna's view of a combination, with what earlier processes found; None if nothing is left to do."""
        from archipelago.sweeps.search import Study

        groups: dict[str, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.group, []).append(trial)
        over = [group for group, members in groups.items() if not self._open(members)]
        if len(over) >= self.sweep.settings.samples:
            return None
        past = {group: (members[0].values, self._figures(members)) for group, members in groups.items()}
        study = Study(self.sweep, label, past, self._added)
        study.resume(self._open(trials), past)
        return study

    def _figures(self, trials: Sequence[Trial]) -> list[float]:
        from archipelago.sweeps.trial import told_rows

        found = []
        for trial in trials:
            if self.directory.rows[trial.name].status in (FINISHED, STOPPED):
                with reading(self.directory.run_address(trial.name)) as path:
                    rows = told_rows(path, self.sweep.settings.metric)
                found += [
                    row[self.sweep.settings.metric] for row in rows[-1:] if self.sweep.settings.metric in row
                ]
        return found

    def _added(self, trials: list[Trial]) -> None:
        self.directory.add(trials)

    @contextlib.contextmanager
    def _tune_folder(self) -> Iterator[tuple[str, Any]]:
        """Where Tune may write. Only PBT hands states from trial to trial, hence from node to node, through it."""
        if self.sweep.settings.scheduler != "pbt":
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

    # What Tune tells ------------------------------------------------------------------------------------------

    def started(self, trial: str) -> None:
        """A trial has a process."""
        self._begun.add(trial)
        if self.directory.rows[trial].status not in OVER:
            self.directory.set(trial, RUNNING)
        self.view.started(trial)

    def told(self, trial: str, result: Mapping[str, Any]) -> None:
        """A trial has come further."""
        if result.get("done") and self.directory.rows[trial].status not in OVER:
            self.directory.set(trial, result["state"], result["reason"])
        self.view.update(trial, result)

    def over(self, trial: str, result: Mapping[str, Any]) -> None:
        """Tune is done with a trial, which may be sooner than the trial is."""
        if self.directory.rows[trial].status not in OVER:
            reason = f"stopped by {self.sweep.settings.scheduler} after round {result.get('round', 0)}"
            self.directory.set(trial, STOPPED, reason)
        self.view.over(trial)

    def again(self, trial: str, why: str) -> None:
        """A trial lost its process or its node."""
        self.view.note(f"{trial} goes on from its last checkpoint: {why}")

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
    """Trials of every point that an earlier process drew and began with, from the run directories."""
    import yaml  # type: ignore[import-untyped]  # PyYAML ships no types

    sweep = directory.sweep
    points: dict[str, dict[str, Any]] = {}
    for row in directory.rows.values():
        text = read_text(join(directory.run_address(row.trial), "config.yaml"))
        if text is not None:
            flat = _dotted(yaml.safe_load(config_to_yaml(config_from_yaml(text))))
            points.setdefault(row.group, {key: flat[key] for key in sweep.space})
    # A point that no trial began with is drawn anew.
    for name in [name for name, row in directory.rows.items() if row.group not in points]:
        del directory.rows[name]
    return [
        sweep.trial(group.rpartition(" | ")[0], values, seed)
        for group, values in points.items()
        for seed in sweep.seeds
    ]


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


# The cluster -------------------------------------------------------------------------------------------------

_PROBE = "archipelago"


def live_nodes() -> list[dict[str, float]]:
    """The resources of every node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_shared(address: str) -> None:
    """Several nodes must see one storage; what one writes, every other must be able to read."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    probe = join(
        address if is_address(address) else str(Path(address).resolve()), f".probe-{uuid.uuid4().hex[:8]}"
    )
    write_text(probe, _PROBE)
    ask = ray.remote(num_cpus=0, max_retries=0)(_sees)
    try:
        answers = {
            node["NodeName"]: ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(probe)
            for node in nodes
        }
        blind = [name for name, answer in answers.items() if not ray.get(answer)]
    finally:
        remove_file(probe)
    if blind:
        raise UserError(
            f"Expected storage that all {len(nodes)} nodes of the cluster share, got '{address}', which "
            f"{', '.join(blind)} cannot read and write: give a network folder or an address, as in storage=s3://bucket."
        )


def _sees(probe: str) -> bool:
    """Whether this node reads what another one wrote there (an address may name a disk of one node: file://...)."""
    try:
        there = read_text(probe) == _PROBE
    except (OSError, UserError):
        return False
    return there and (is_address(probe) or os.access(Path(probe).parent, os.W_OK))
