"""One experiment from config to run directory: the round loop, recovery and resume.

The loop runs rounds and notifies callbacks of them (`callbacks/base.py`); files, checkpoints, progress, metrics and
loggers are callbacks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.in_process import InProcessSession
from actors.plan import Checkpoint, Place, Session
from actors.ray_errors import ActorsLost
from actors.reports import RoundReport
from archipelago.core.causes import exits_are_failures
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.core.signals import ended_in_order
from archipelago.data import Federation, build_federation, load_dataset, partition_seed
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
from archipelago.experiments.config import (
    check_network,
    check_settings_of_methods,
    config_from_yaml,
    config_to_yaml,
)
from archipelago.experiments.figures_data import write_examples
from archipelago.experiments.given import code_of, parse_yaml
from archipelago.experiments.loggers import LoggerCallback, loggers_from
from archipelago.experiments.plan import make_plan, run_path
from archipelago.reports.summary import write_summary
from archipelago.runs.checkpoints import checkpoints, latest
from archipelago.runs.directory import RunDirectory
from archipelago.runs.environment import describe_environment
from archipelago.runs.files import read_yaml
from archipelago.runs.identity import changed_code, identity_of
from archipelago.runs.status import check_is_run
from archipelago.runs.trees import DamagedFile, read_arrays
from archipelago.runs.trust import check_trust, remember
from lightning_modules.engines import engine_entry

if TYPE_CHECKING:
    from archipelago.runs.storage import Mirror


_log = logging.getLogger("archipelago")


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
        from archipelago.experiments.choose_clusters import choose_clusters

        chosen = choose_clusters(config)
        config = dataclasses.replace(config, clusters=chosen.clusters, choose_clusters=False)
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    check_network(config, federation.input_shape, federation.classes)
    check_settings_of_methods(config, federation.groups)
    path = Path(run_directory) if run_directory is not None else run_path(config)
    text = config_to_yaml(config)
    code = code_of(parse_yaml(text, "config.yaml"))
    run = RunDirectory.create(path, text, describe_environment(command), federation, code)
    remember(run.status.identity, code)
    with run:
        if chosen is not None:
            run.note(0, chosen.sentence)
        for note in federation.notes:
            run.note(0, note)
        write_examples(run, federation, config)
        try:
            drive = Drive(config, federation, run, callbacks, loggers, quiet=quiet, mirror=mirror)
            del federation  # on a cluster, its samples move to the object store
            for _ in drive.rounds(0, None):
                pass  # callbacks have seen it
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
                "run it again under another name.",
                code="finished", path=path,
            )  # fmt: skip
        dataset = load_dataset(config.data, partition_seed(config.partition, config.seed))
        federation = Federation.from_indices(dataset, read_arrays(run.path / "partition.safetensors"))
        run.check_files()
        drive = Drive(config, federation, run, callbacks, loggers, quiet=quiet, mirror=mirror)
        start = drive.last_checkpoint()
        run.mend_files(federation)
        del dataset, federation  # on a cluster, its samples move to the object store
        for _ in drive.rounds(*start, resumed=True):
            pass  # callbacks have seen it
    return Path(path)


@contextmanager
def _in_order(where: str) -> Iterator[str]:
    """SIGTERM ends a run in this process as it ends one on Ray: through `finally`."""
    with ended_in_order():
        yield where


def _is_small(run: Path) -> bool:
    """Whether the checkpoints of a run are read in a moment."""
    files = (file for _, folder in checkpoints(run) for file in folder.iterdir())
    return sum(file.stat().st_size for file in files) < 1 << 28


def check_code(path: str | Path, trust: bool = False) -> None:
    """A `UserError` that names the code which a run from elsewhere would import here, unless it is trusted.

    A line in the log names code that is not what the run was made with.
    """
    run = Path(path)
    check_is_run(run)
    content = read_yaml(
        (run / "config.yaml").read_text(encoding="utf-8", errors="replace"), run / "config.yaml"
    )
    code = code_of(content if isinstance(content, dict) else {})
    check_trust(str(path), identity_of(run), code, trust)
    if changed := changed_code(run):
        _log.warning(
            "%s was made with other code of %s: results may differ from here on.", path, ", ".join(changed)
        )


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
        self._losses = 0  # of actors and nodes, in this process
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

    def rounds(
        self, done: int, checkpoint: Checkpoint | None, *, resumed: bool = False
    ) -> Iterator[RoundReport]:
        """Rounds `done` + 1 to the last, one at a time, through losses of actors and nodes.

        A run that is resumed, or that lost an actor, makes do with what the cluster has now. Whoever stops asking
        closes the iterator: what was started is ended, and the run can be resumed.
        """
        run = self.live
        run.round, run.resumed = done, resumed
        self._losses = 0
        with ExitStack() as stack:
            engine_entry(self.config.local.engine, "cpu").value.begin()
            run.where = stack.enter_context(self._ray())
            if self.config.fleet.backend == "ray" and self.data is None:
                self.plan, self.data = self.plan.in_object_store()
            stack.enter_context(self._callbacks.listening(run))
            stack.enter_context(exits_are_failures("a module of yours"))
            while True:
                try:
                    state, checkpoint = checkpoint, None
                    yield from self._rounds(state, shrink=resumed or self._losses > 0)
                    break
                except _DamagedCheckpoint as error:
                    self._damaged = {run.round: str(error)}
                    done, checkpoint = self.last_checkpoint()
                    self._damaged = {}  # its round will have another one
                    run.round = done
                    run.emit("on_rollback", done)
                except ActorsLost as error:
                    self._losses += 1
                    if self._losses > self.config.fleet.restarts:
                        raise
                    done, checkpoint = self.last_checkpoint()
                    run.round, run.stop_reason = done, None
                    run.emit("on_rollback", done)
                    run.note(f"Lost an actor ({error}); resuming from round {done}.")
            run.emit("on_end")

    def last_checkpoint(self) -> tuple[int, Checkpoint | None]:
        """(round, state) of the newest complete checkpoint; files are cut back to that round.

        Clients' states are read by the processes that host them, which may find damage that nobody saw before; small
        ones are looked at here too, before anything is cut back.
        """
        run = self.live.directory
        newest = max((round for round, _ in checkpoints(run.path)), default=0)
        complete = run.complete_rounds()
        usable = [each for each, _ in checkpoints(run.path) if each <= complete]
        changed = {each: why for each in usable if (why := run.changed(each)) is not None}
        if usable and len(changed) == len(usable):
            complete = 0
        found = latest(run.path, complete, deep=_is_small(run.path), damaged={**changed, **self._damaged})
        lost = f"Of rounds 1 to {newest} only {complete} are complete in the run's tables, as they were written: "
        if found is None:
            run.truncate(0)
            if newest:
                run.note(0, f"{lost}the run starts over.")
            return 0, None
        done, parts, warnings = found
        if lost_events := run.lost_events(done):
            warnings = [*warnings, lost_events]
        run.truncate(done)
        if complete < newest:
            warnings = [*warnings, f"{lost}resuming from round {done}."]
        for warning in warnings:
            run.note(done, warning)
        return done, Checkpoint(parts["server"], parts, done)

    def _rounds(self, checkpoint: Checkpoint | None, *, shrink: bool) -> Iterator[RoundReport]:
        """The rounds of one session, each when it has reached every callback, through losses that can be mended."""
        run = self.live
        try:
            session = self._session(checkpoint, shrink)
        except DamagedFile as error:
            if checkpoint is None:
                raise
            raise _DamagedCheckpoint(str(error)) from error
        except UserError as error:
            if not self._losses:
                raise
            # Not the user's mistake: the run had its capacity, and lost it. It can be resumed.
            raise ActorsLost(f"no capacity to continue: {error}") from error
        del checkpoint  # the server's state, which the session has now
        run.session = session
        # A run that began on GPUs stays there: after a loss it waits for some rather than crawl on a CPU. One that
        # loses actors wants as many as it began with.
        first = self.plan.actors or session.actors
        self.plan = dataclasses.replace(self.plan, gpus=session.gpus, actors=first)
        try:
            run.emit("on_session", session.describe())
            if shortfall := session.shortfall():
                run.note(shortfall)
            report: RoundReport | None = None  # of a round that not every callback has seen
            while report is not None or not run.is_last_round:
                try:
                    report = report or session.run_round(run.round + 1)
                    run.round = report.round
                    run.emit("on_round", report)
                except ActorsLost as error:
                    if self._losses >= self.config.fleet.restarts:
                        raise
                    report = self._mended(session, report, error)
                else:
                    yield report
                    report = None
            run.emit("on_complete")
        finally:
            self._checkpoints.abandon()  # before files are cut back: its thread writes them
            run.session = None
            session.close()

    def _mended(self, session: Session, report: RoundReport | None, error: ActorsLost) -> RoundReport | None:
        """Rebuild what was lost; returns the report that callbacks have not seen, or not all of them.

        For them it is a rollback by a round at most, or to the last checkpoint.
        """
        run = self.live
        self._checkpoints.abandon()  # a shard of it may be lost
        mended = session.mend(run.round)
        if mended is not None:
            now = mended.round
            report = mended.report or report
            done = run.round if report is None else report.round - 1
            run.directory.flush(done)  # rows that wait for a checkpoint are good
            run.directory.truncate(done)
        else:
            report = None
            done, checkpoint = self.last_checkpoint()
            run.round = now = done
            try:
                session.go_back(checkpoint, done)
            except DamagedFile as damage:
                raise _DamagedCheckpoint(str(damage)) from damage
        self._losses += 1  # what cannot be mended is counted by `rounds`, which begins another session
        run.round, run.stop_reason = done, None
        run.emit("on_rollback", done)
        run.note(f"Lost an actor ({error}); resuming from round {now}.")
        run.emit("on_session", session.describe())
        return report

    def _session(self, checkpoint: Checkpoint | None, shrink: bool) -> Session:
        if self.config.fleet.backend == "in_process":
            return InProcessSession(self.plan, checkpoint)
        from actors.session import RaySession  # what only clusters need is loaded for them alone

        return RaySession(
            self.plan, checkpoint, shrink=shrink, data=self.data, place=self.place, say=self.live.note
        )

    def _ray(self) -> AbstractContextManager[str]:
        if self.config.fleet.backend == "in_process":
            return _in_order("this process")
        from actors.cluster import connected

        return connected(self.config.fleet, name=self.plan.title)
