"""One experiment from config to run directory: the round loop, recovery and resume.

The loop runs rounds and tells callbacks about them (`callbacks/base.py`); files, checkpoints, progress, metrics and
loggers are callbacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.cluster import connected
from actors.reports import RoundReport
from actors.session import ActorsLost, Checkpoint, InProcessSession, Place, RaySession, Session
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.data import Federation, build_federation, load_dataset
from archipelago.experiments.callbacks.base import Callback, CallbackList, LiveRun, callbacks_from
from archipelago.experiments.callbacks.platform_callbacks import (
    Checkpoints,
    FigureData,
    IdleRounds,
    ObjectStoreMirror,
    ProgressDisplay,
    RayMetrics,
    Results,
    RunStore,
)
from archipelago.experiments.choose_clusters import choose_clusters
from archipelago.experiments.config import (
    check_network,
    check_settings_of_methods,
    config_from_yaml,
    config_to_yaml,
)
from archipelago.experiments.figures_data import write_examples
from archipelago.experiments.loggers import LoggerCallback, loggers_from
from archipelago.experiments.plan import make_plan, run_path
from archipelago.reports.summary import write_summary
from archipelago.runs.checkpoints import checkpoints, latest
from archipelago.runs.directory import RunDirectory
from archipelago.runs.environment import describe_environment
from archipelago.runs.trees import DamagedFile, read_arrays

if TYPE_CHECKING:
    from archipelago.runs.storage import Mirror


def run_experiment(
    config: ExperimentSettings,
    run_directory: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Any] = (),
    quiet: bool = False,
    command: str | None = None,
    mirror: Mirror | None = None,
) -> Path:
    """Run an experiment to its end; returns its run directory.

    `callbacks` and `loggers` (Lightning's) are instances, beside those that the config names. `command` is kept in
    `environment.json`. `mirror` sends the files to an object store.
    """
    chosen = None
    if config.choose_clusters:
        chosen = choose_clusters(config)
        config = dataclasses.replace(config, clusters=chosen.clusters, choose_clusters=False)
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    check_network(config, federation.input_shape, federation.classes)
    check_settings_of_methods(config, federation.groups)
    path = Path(run_directory) if run_directory is not None else run_path(config)
    run = RunDirectory.create(path, config_to_yaml(config), describe_environment(command), federation)
    with run:
        if chosen is not None:
            run.note(0, chosen.sentence)
        for note in federation.notes:
            run.note(0, note)
        write_examples(run, federation, config)
        try:
            drive = Drive(config, federation, run, callbacks, loggers, quiet=quiet, mirror=mirror)
            drive.run(0, None)
        except Exception as error:
            if _is_mistake(error) and not run.status.rounds_done:
                run.discard()  # nothing was started: the name stays free for the corrected command
            raise
    return path


def _is_mistake(error: Exception) -> bool:
    """Whether it is a sentence for the user, here or (Ray's `cause`) in an actor."""
    return isinstance(error, UserError) or isinstance(getattr(error, "cause", None), UserError)


def resume(
    path: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Any] = (),
    quiet: bool = False,
    mirror: Mirror | None = None,
) -> Path:
    """Continue a run from its last checkpoint; the result has the bits of a run that was never stopped.

    Callbacks and loggers that the config names are there again; instances are given again.
    """
    with RunDirectory.open(path, environment=describe_environment()) as run:
        config = config_from_yaml(run.config_yaml)
        if run.status.state == "finished" and not (run.path / "summary.md").exists():
            write_summary(run.path)  # it was ended between the two
            return Path(path)
        if run.status.state == "finished":
            done = f"all {config.rounds} rounds done"
            if run.status.rounds_done < config.rounds:
                done = f"{run.status.rounds_done} of {config.rounds} rounds done ({run.status.sentence})"
            raise UserError(
                f"Expected a run that is not finished, got {path} with {done}: open it with archipelago.open_run, or "
                "run it again under another name."
            )
        dataset = load_dataset(config.data, config.seed)
        federation = Federation.from_indices(dataset, read_arrays(run.path / "partition.safetensors"))
        drive = Drive(config, federation, run, callbacks, loggers, quiet=quiet, mirror=mirror)
        drive.run(*drive.last_checkpoint(), resumed=True)
    return Path(path)


class _DamagedCheckpoint(Exception):
    """Clients' states of a checkpoint cannot be read."""


class Drive:
    """The driver's side of a run: sessions, rounds, and the callbacks that listen.

    `place` is the part of a cluster that was reserved for this run already (a trial of the sweep called `sweep`), and
    `data` the references to samples and labels that are in the object store already, `gpus` what was reserved for each
    process with clients. `fork` is a round at which another run branches off, whose checkpoint is kept.
    """

    def __init__(
        self,
        config: ExperimentSettings,
        federation: Federation,
        run: RunDirectory,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Any] = (),
        *,
        quiet: bool = False,
        place: Place | None = None,
        data: tuple[Any, Any] | None = None,
        fork: int | None = None,
        mirror: Mirror | None = None,
        sweep: str | None = None,
        gpus: float | None = None,
    ) -> None:
        self.config, self.place, self.data = config, place, data
        self.plan = dataclasses.replace(make_plan(config, federation), gpus=gpus)
        self.live = LiveRun(config, run, sweep)
        self.live.in_working_copy = mirror is not None
        self._checkpoints = Checkpoints(fork)
        self._damaged: dict[int, str] = {}  # round whose checkpoint could not be restored, and why
        users = [*callbacks_from(config), *callbacks]
        self._callbacks = CallbackList(
            [
                RunStore(),
                ProgressDisplay(quiet),
                *users,
                *loggers_from(config),
                *(LoggerCallback.around(logger) for logger in loggers),
                RayMetrics(),
                IdleRounds(),
                self._checkpoints,
                *([ObjectStoreMirror(mirror)] if mirror is not None else []),
                FigureData(),
                Results(),
            ],
            users,
        )

    def run(self, done: int, checkpoint: Checkpoint | None, *, resumed: bool = False) -> None:
        """Rounds `done` + 1 to the last."""
        for _ in self.rounds(done, checkpoint, resumed=resumed):
            pass

    def rounds(
        self, done: int, checkpoint: Checkpoint | None, *, resumed: bool = False
    ) -> Iterator[RoundReport]:
        """Rounds `done` + 1 to the last, one at a time, through losses of actors and nodes.

        A run that is resumed, or that lost an actor, makes do with what the cluster has now. Whoever stops asking
        closes the iterator: what was started is ended, and the run can be resumed.
        """
        run = self.live
        run.round, run.resumed = done, resumed
        losses = 0
        with ExitStack() as stack:
            run.where = stack.enter_context(self._ray())
            stack.enter_context(self._callbacks.listening(run))
            while True:
                try:
                    state, checkpoint = checkpoint, None
                    yield from self._rounds(state, losses, shrink=resumed or losses > 0)
                    break
                except _DamagedCheckpoint as error:
                    self._damaged = {run.round: str(error)}
                    done, checkpoint = self.last_checkpoint()
                    self._damaged = {}  # its round will have another one
                    run.round = done
                    run.emit("on_rollback", done)
                except ActorsLost as error:
                    losses += 1
                    if losses > self.config.fleet.restarts:
                        raise
                    done, checkpoint = self.last_checkpoint()
                    run.round, run.stop_reason = done, None
                    run.emit("on_rollback", done)
                    run.note(f"Lost an actor ({error}); resuming from round {done}.")
            run.emit("on_end")

    def last_checkpoint(self) -> tuple[int, Checkpoint | None]:
        """(round, state) of the newest complete checkpoint; files are cut back to that round.

        Clients' states are read by the processes that host them, which may find damage that nobody saw before.
        """
        run = self.live.directory
        newest = max((round for round, _ in checkpoints(run.path)), default=0)
        complete = run.complete_rounds()
        found = latest(run.path, complete, deep=False, damaged=self._damaged)
        lost = f"Of rounds 1 to {newest} only {complete} are complete in the run's tables: "
        if found is None:
            run.truncate(0)
            if newest:
                run.note(0, f"{lost}the run starts over.")
            return 0, None
        done, parts, warnings = found
        run.truncate(done)
        if complete < newest:
            warnings = [*warnings, f"{lost}resuming from round {done}."]
        for warning in warnings:
            run.note(done, warning)
        return done, Checkpoint(parts["server"], parts)

    def _rounds(self, checkpoint: Checkpoint | None, losses: int, *, shrink: bool) -> Iterator[RoundReport]:
        run = self.live
        try:
            session = self._session(checkpoint, shrink)
        except DamagedFile as error:
            if checkpoint is None:
                raise
            raise _DamagedCheckpoint(str(error)) from error
        except UserError as error:
            if not losses:
                raise
            # Not the user's mistake: the run had its capacity, and lost it. It can be resumed.
            raise ActorsLost(f"no capacity to continue: {error}") from error
        del checkpoint  # the server's state, which the session has now
        run.session = session
        # A run that began on GPUs goes on there: after a loss it waits for some rather than crawl on a CPU.
        self.plan = dataclasses.replace(self.plan, gpus=session.gpus)
        try:
            run.emit("on_session", session.describe())
            if shortfall := session.shortfall():
                run.note(shortfall)
            while not run.is_last_round:
                report = session.run_round(run.round + 1)
                run.round = report.round
                run.emit("on_round", report)
                yield report
            run.emit("on_complete")
        finally:
            self._checkpoints.abandon()  # before files are cut back: its thread writes them
            run.session = None
            session.close()

    def _session(self, checkpoint: Checkpoint | None, shrink: bool) -> Session:
        if self.config.fleet.backend == "in_process":
            return InProcessSession(self.plan, checkpoint)
        return RaySession(self.plan, checkpoint, shrink=shrink, data=self.data, place=self.place)

    def _ray(self) -> AbstractContextManager[str]:
        if self.config.fleet.backend == "in_process":
            return nullcontext("this process")
        return connected(self.config.fleet, name=self.plan.title)
