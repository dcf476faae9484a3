"""One experiment from config to run directory: the round loop, checkpoints, recovery and resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from actors.cluster import connected
from actors.reports import RoundReport
from actors.session import ActorsLost, Checkpoint, InProcessSession, Place, RaySession, Session
from actors.telemetry import Telemetry
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.data import Federation, build_federation, load_dataset
from archipelago.experiments.choose_clusters import choose_clusters
from archipelago.experiments.config import (
    check_network,
    check_settings_of_methods,
    config_from_yaml,
    config_to_yaml,
)
from archipelago.experiments.figures_data import write_examples, write_tsne
from archipelago.experiments.plan import make_plan, method_name, run_path
from archipelago.experiments.progress import Progress
from archipelago.experiments.round_log import RoundLog
from archipelago.reports.summary import write_summary
from archipelago.runs.checkpoints import CheckpointWriter, latest
from archipelago.runs.directory import RunDirectory
from archipelago.runs.environment import describe_environment
from archipelago.runs.trees import read_arrays

OnRound = Callable[[RoundReport], None]


def run_experiment(
    config: ExperimentSettings,
    run_directory: str | Path | None = None,
    on_round: OnRound | None = None,
    *,
    quiet: bool = False,
    command: str | None = None,
) -> Path:
    """Run an experiment to its end; returns its run directory. `command` is kept in `environment.json`."""
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
            Drive(config, federation, run, on_round, quiet).run(0, None)
        except Exception as error:
            if _is_mistake(error) and not run.status.rounds_done:
                run.discard()  # nothing was started: the name stays free for the corrected command
            raise
    return path


def _is_mistake(error: Exception) -> bool:
    """Whether it is a sentence for the user, here or (Ray's `cause`) in an actor."""
    return isinstance(error, UserError) or isinstance(getattr(error, "cause", None), UserError)


def resume(path: str | Path, on_round: OnRound | None = None, *, quiet: bool = False) -> Path:
    """Go on with a run from its last checkpoint; the result has the bits of a run that was never stopped."""
    with RunDirectory.open(path, environment=describe_environment()) as run:
        config = config_from_yaml(run.config_yaml)
        if run.status.state == "finished" and not (run.path / "summary.md").exists():
            write_summary(run.path)  # it was ended between the two
            return Path(path)
        if run.status.state == "finished":
            raise UserError(
                f"Expected a run that is not finished, got {path} with all {config.rounds} rounds done: "
                "open it with archipelago.open_run, or run it again under another name."
            )
        dataset = load_dataset(config.data, config.seed)
        federation = Federation.from_indices(dataset, read_arrays(run.path / "partition.safetensors"))
        drive = Drive(config, federation, run, on_round, quiet)
        drive.run(*drive.last_checkpoint(), resumed=True)
    return Path(path)


class Drive:
    """The driver's side of a run.

    `place` is the part of a cluster that was reserved for this run already (a trial of a sweep), and `data` the
    references to samples and labels that are in the object store already. `fork` is a round at which another run
    begins, whose checkpoint is kept.
    """

    def __init__(
        self,
        config: ExperimentSettings,
        federation: Federation,
        run: RunDirectory,
        on_round: OnRound | None = None,
        quiet: bool = False,
        *,
        place: Place | None = None,
        data: tuple[Any, Any] | None = None,
        fork: int | None = None,
    ) -> None:
        self.fork = fork
        self.config, self.run_directory, self.on_round, self.quiet = config, run, on_round, quiet
        self.place, self.data = place, data
        self._log: RoundLog | None = None
        self.plan = make_plan(config, federation)
        self.telemetry = Telemetry(run.path.name, method_name(config), config.data.name, config.seed)

    def run(self, done: int, checkpoint: Checkpoint | None, *, resumed: bool = False) -> None:
        """Rounds `done` + 1 to the last."""
        for _ in self.rounds(done, checkpoint, resumed=resumed):
            pass

    def rounds(
        self, done: int, checkpoint: Checkpoint | None, *, resumed: bool = False
    ) -> Iterator[RoundReport]:
        """Rounds `done` + 1 to the last, one at a time, through losses of actors and nodes.

        A run that is resumed, or that lost an actor, makes do with what the cluster has now. Who stops asking
        closes the iterator: what was started is ended, and the run can be resumed.
        """
        config, run = self.config, self.run_directory
        losses = 0
        with ExitStack() as stack:
            where = stack.enter_context(self._ray())
            progress = stack.enter_context(self._progress(done, where))
            self._log = stack.enter_context(RoundLog(run.path, done)) if config.tensorboard else None
            while True:
                try:
                    state, checkpoint = checkpoint, None
                    yield from self._rounds(done, state, progress, shrink=resumed or losses > 0)
                    break
                except ActorsLost as error:
                    losses += 1
                    if losses > config.fleet.restarts:
                        raise
                    done, checkpoint = self.last_checkpoint()
                    text = f"Lost an actor ({error}); going on from round {done}."
                    run.note(done, text)
                    progress.note(text)
                except UserError as error:
                    if not losses:
                        raise
                    # Not the user's mistake: the run had its place, and lost it. It can be gone on with.
                    raise ActorsLost(f"no place to go on: {error}") from error

    def last_checkpoint(self) -> tuple[int, Checkpoint | None]:
        """(round, state) of the newest whole checkpoint; files are cut back to that round."""
        run = self.run_directory
        found = latest(run.path)
        if found is None:
            run.truncate(0)
            return 0, None
        done, parts, warnings = found
        run.truncate(done)
        for warning in warnings:
            run.note(done, warning)
        clients: dict[int, dict[str, Any]] = {}
        for name, part in parts.items():
            if name.startswith("clients-"):
                clients.update(part)
        return done, Checkpoint(parts["server"], clients)

    def _rounds(
        self, done: int, checkpoint: Checkpoint | None, progress: Any, *, shrink: bool
    ) -> Iterator[RoundReport]:
        config, run = self.config, self.run_directory
        wanted = config.checkpoint
        writer = CheckpointWriter(run.path, wanted.every, wanted.keep, wanted.minutes, fork=self.fork)
        try:
            session = self._session(checkpoint, shrink)
        except BaseException:
            writer.abandon()
            raise
        del checkpoint  # a copy of every client's state, which the session has now
        try:
            progress.note(session.describe())
            if said := session.shortfall():
                progress.note(said)
                run.note(done, said)
            for round in range(done + 1, config.rounds + 1):
                report = session.run_round(round)
                run.append(report)
                for name, columns in report.records.items():
                    run.record(name, round, columns)
                if writer.due(round) or round == config.rounds:
                    run.flush(round)
                    writer.submit(round, session.snapshot())
                progress.update(report)
                self.telemetry.update(report, session.spec)
                if self._log is not None:
                    self._log.update(report)
                if self.on_round is not None:
                    self.on_round(report)
                yield report
            writer.close()
            write_tsne(run, config)
            final = session.models()
            run.finish(final["models"] | _private_models(session), final["spec"])
            write_summary(run.path)
        finally:
            writer.abandon()
            session.close()

    def _session(self, checkpoint: Checkpoint | None, shrink: bool) -> Session:
        if self.config.fleet.backend == "in_process":
            return InProcessSession(self.plan, checkpoint)
        return RaySession(self.plan, checkpoint, shrink=shrink, data=self.data, place=self.place)

    def _ray(self) -> AbstractContextManager[str]:
        if self.config.fleet.backend == "in_process":
            return nullcontext("this process")
        return connected(self.config.fleet, name=self.plan.title)

    def _progress(self, done: int, where: str) -> AbstractContextManager[Any]:
        config = self.config
        title = f"{method_name(config)} on {config.data.name} ({where})"
        return Progress(config.rounds, first_round=done, title=title, quiet=self.quiet)


def _private_models(session: Session) -> Mapping[str, Any]:
    """Models that clients keep: `private-<name>`, a row for each client of `private-<name>-clients`."""
    rows: dict[str, dict[int, Any]] = {}
    for part, fetch in session.snapshot().items():
        if part.startswith("clients-"):
            for client, state in fetch().items():
                for key, value in state.items():
                    if key.startswith("model/"):
                        rows.setdefault(key.removeprefix("model/"), {})[client] = value
    found: dict[str, Any] = {}
    for name, models in rows.items():
        found[f"private-{name}"] = np.stack([models[client] for client in sorted(models)])
        found[f"private-{name}-clients"] = np.asarray(sorted(models), np.int64)
    return found
