"""The platform's own listeners: run store, checkpoints, Ray metrics, progress, mirror, and what completes a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.telemetry import Telemetry
from archipelago.experiments.callbacks.base import Callback, LiveRun
from archipelago.experiments.figures_data import write_tsne
from archipelago.experiments.plan import method_name
from archipelago.experiments.progress import Progress
from archipelago.reports.summary import write_summary
from archipelago.runs.checkpoints import CheckpointWriter

if TYPE_CHECKING:
    from actors.reports import RoundReport
    from actors.session import Session
    from archipelago.runs.storage import Mirror


class RunStore(Callback):
    """Writes rounds and events into the run directory; first of all, so that others find them there."""

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """The round's rows and recorded tables."""
        run.directory.append(report)
        for name, columns in report.records.items():
            run.directory.record(name, report.round, columns)

    def on_event(self, run: LiveRun, text: str) -> None:
        """A line of `events.jsonl`."""
        run.directory.note(run.round, text)


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
            self._writer.submit(report.round, run.session.snapshot())
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
        run.directory.finish(final["models"] | private_models(run.session), final["spec"], run.stop_reason)
        write_summary(run.path)


def private_models(session: Session) -> Mapping[str, Any]:
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
