"""The platform's own listeners: run store, checkpoints, Ray metrics, progress, mirror, and what completes a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.shards import private_models
from actors.telemetry import Telemetry
from archipelago.core.errors import RunFailure
from archipelago.experiments.callbacks.base import Callback, LiveRun
from archipelago.experiments.figures_data import write_tsne
from archipelago.experiments.plan import method_name
from archipelago.experiments.progress import Progress
from archipelago.reports.summary import write_summary
from archipelago.runs.checkpoints import CheckpointWriter
from archipelago.runs.files import is_idle

if TYPE_CHECKING:
    from actors.reports import RoundReport
    from archipelago.runs.storage import Mirror


class RunStore(Callback):
    """Writes rounds and events into the run directory; first of all, so that others find them there."""

    _said: Mapping[str, Any] | None = None  # what this process is known to compute on

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """The round's rows and recorded tables; and what it was computed on, if that is news."""
        run.directory.append(report)
        for name, columns in report.records.items():
            run.directory.record(name, report.round, columns)
        assert run.session is not None
        compute = run.session.compute().to_json()
        if compute != self._said:
            run.directory.computes_on(report.round, compute)
            self._said = compute

    def on_session(self, run: LiveRun, text: str) -> None:
        """What it will compute on: an engine may leave clients to another one, which the first round shows."""
        assert run.session is not None
        run.directory.expects_to_compute_on(run.session.compute().to_json())

    def on_event(self, run: LiveRun, text: str) -> None:
        """A line of `events.jsonl`."""
        run.directory.note(run.round, text)


class IdleRounds(Callback):
    """Stops a run in which nobody trains: all its updates are dropped, and its results mean nothing.

    It looks at the run's own `metrics.csv` alone, so a run that is resumed stops after the same round.
    """

    def on_start(self, run: LiveRun) -> None:
        """Take in what an earlier process measured."""
        self._idle = self._seen = 0
        for row in run.history:
            self._see(row)

    def on_rollback(self, run: LiveRun, round: int) -> None:
        """The rounds after `round` will be reported again."""
        self.on_start(run)

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """Too many rounds in a row, or a whole run, without an update."""
        self._see(report.metrics)
        limit = run.config.idle_rounds
        if limit and (self._idle >= limit or (run.is_last_round and self._idle == self._seen)):
            first = report.round - self._idle + 1
            rounds = f"round {first}" if self._idle == 1 else f"rounds {first} to {report.round}"
            raise RunFailure(
                f"Nobody trained in {rounds}: every client's loss or model was not finite, and was dropped. Lower "
                f"local.lr (it is {run.config.local.lr:g}) or look at the data; idle_rounds={limit} says when such a "
                "run stops."
            )

    def _see(self, metrics: Mapping[str, Any]) -> None:
        self._seen += 1
        self._idle = self._idle + 1 if is_idle(metrics) else 0


class RayMetrics(Callback):
    """Reports every round to Ray's metrics endpoint."""

    def on_start(self, run: LiveRun) -> None:
        """Under the run's name."""
        config = run.config
        self._telemetry = Telemetry(run.name, method_name(config), config.data.name, config.seed)

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """Gauges and counters."""
        assert run.session is not None
        self._telemetry.update(report, run.session.spec)


class Checkpoints(Callback):
    """Writes a checkpoint whenever one is due, and after the last round; `fork` is a round that keeps its own."""

    def __init__(self, fork: int | None = None) -> None:
        self._fork = fork
        self._writer: CheckpointWriter | None = None

    def on_start(self, run: LiveRun) -> None:
        """Start the background thread."""
        wanted = run.config.checkpoint
        self._writer = CheckpointWriter(run.path, wanted.every, wanted.keep, wanted.minutes, fork=self._fork)

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """The tables are made durable before the checkpoint that stands on them."""
        assert self._writer is not None and run.session is not None
        if self._writer.due(report.round) or run.is_last_round:
            run.directory.flush(report.round)
            self._writer.submit(report.round, run.session.snapshot(), run.directory.digests(report.round))
            run.emit("on_checkpoint", report.round)

    def on_rollback(self, run: LiveRun, round: int) -> None:
        """The thread was ended before files were cut back; begin another one."""
        self.on_start(run)

    def on_complete(self, run: LiveRun) -> None:
        """Wait for the last checkpoint."""
        assert self._writer is not None
        self._writer.close()

    def abandon(self) -> None:
        """End the thread; what it was writing is on disk completely, or not at all."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()

    def on_close(self, run: LiveRun) -> None:
        """The same."""
        self.abandon()


class ProgressDisplay(Callback):
    """What a run shows while it runs."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._progress: Progress | None = None

    def on_start(self, run: LiveRun) -> None:
        """The title."""
        config = run.config
        title = f"{method_name(config)} on {config.data.name} ({run.where})"
        self._progress = Progress(config.rounds, first_round=run.round, title=title, quiet=self._quiet)
        self._progress.__enter__()

    def on_session(self, run: LiveRun, text: str) -> None:
        """Where the clients live."""
        self.on_event(run, text)

    def on_event(self, run: LiveRun, text: str) -> None:
        """A line among the rounds."""
        if self._progress is not None:
            self._progress.note(text)

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """The round's metrics."""
        assert self._progress is not None
        self._progress.update(report)

    def on_complete(self, run: LiveRun) -> None:
        """Why rounds are missing."""
        if run.stop_reason is not None:
            self.on_event(run, run.stop_reason)

    def on_close(self, run: LiveRun) -> None:
        """Give the terminal back."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.__exit__(None, None, None)


class ObjectStoreMirror(Callback):
    """Sends what is new to an object store after every checkpoint."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """Nothing is sent while there is no new checkpoint."""
        self._mirror.follow()


class FigureData(Callback):
    """What the figures of a report need besides the tables of rounds."""

    def on_complete(self, run: LiveRun) -> None:
        """t-SNE of client models, where it was asked for."""
        write_tsne(run.directory, run.config)


class Results(Callback):
    """Completes the run directory; last of all."""

    def on_complete(self, run: LiveRun) -> None:
        """The final models, the status, and the summary that reads them all."""
        assert run.session is not None
        final = run.session.models()
        private = private_models(run.session.snapshot().shards)
        run.directory.finish(final["models"] | private, final["spec"], run.stop_reason)
        write_summary(run.path)
