"""A Lightning logger as a callback that never stops a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.causes import cause_of
from archipelago.core.dotted import dotted
from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.registry import Entry, Registry
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.callbacks.base import (
    Callback,
    LiveRun,
    make_with,
    options_of,
)

if TYPE_CHECKING:
    from actors.reports import RoundReport

LOGGERS: Registry[Callable[..., Any]] = Registry("logger")

_MEMORY = (
    "loggers.json"  # of a run directory: the version of each logger, and the last round that it has for sure
)


def check_loggers(config: ExperimentSettings) -> None:
    """Refuse unknown loggers and those whose package is not installed, before anything is started."""
    for name in logger_names(config):
        needs = LOGGERS.entry_in("loggers", name).capabilities.get("needs")
        if needs is not None and importlib.util.find_spec(needs) is None:
            raise UserError(
                f"Expected the package {needs} for loggers=[{name}], got an environment without it: install it with "
                f"`pip install archipelago-fl[{name}]`, or leave the logger out.",
                code="needs-package", package=needs,
            )  # fmt: skip


def logger_names(config: ExperimentSettings) -> list[str]:
    """The loggers of a run, each once; a setting that is called as a logger and true is short for it."""
    switched_on = [name for name in LOGGERS if getattr(config, name, None) is True]
    return list(dict.fromkeys([*config.loggers, *switched_on]))


def loggers_from(config: ExperimentSettings) -> list[Callback]:
    """The loggers that the settings name."""
    return [LoggerCallback(LOGGERS.entry(name)) for name in logger_names(config)]


class LoggerCallback(Callback):
    """Hands rounds to a Lightning logger; whatever that raises is a warning, and the logger is left alone."""

    def __init__(self, entry: Entry[Callable[..., Any]]) -> None:
        self._entry = entry
        self._logger: Any = None
        self._logged = 0  # the last round that it has been given

    @classmethod
    def around(cls, logger: Any) -> LoggerCallback:
        """For a Lightning logger that was made already, in Python."""
        name = type(logger).__name__
        return cls(Entry(name, "", lambda: logger, name))

    def on_start(self, run: LiveRun) -> None:
        """Make the logger and give it the settings, and the rounds that it does not have yet."""
        self._guarded(run, "could not be started", self._open, run)

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """Every number of the round."""
        self._guarded(
            run, f"failed in round {report.round}", self._log, report.round, report.metrics, report.timings
        )

    def on_checkpoint(self, run: LiveRun, round: int) -> None:
        """Remember how far it came: a resume begins at this round."""
        self._guarded(run, f"failed in round {round}", self._remember, run, round)

    def on_end(self, run: LiveRun) -> None:
        """The report, where the logger takes files; then the run is called successful there."""
        self._guarded(run, "failed at the end", self._finish, run)

    def on_failure(self, run: LiveRun, error: BaseException) -> None:
        """The run is called failed there, until it is resumed."""
        self._guarded(run, "failed at the end", self._finalize, "failed")

    def on_close(self, run: LiveRun) -> None:
        """After a pause the logger is only closed."""
        self._guarded(run, "failed at the end", self._finalize, None)

    def _guarded(self, run: LiveRun, when: str, action: Callable[..., None], *arguments: Any) -> None:
        if self._logger is None and action != self._open:
            return
        try:
            action(*arguments)
        except Exception as error:  # whatever a logger or the service behind it raises
            self._logger = None
            run.note(
                f"Warning: logger '{self._entry.name}' {when} ({cause_of(error)}); the run continues without it."
            )

    def _open(self, run: LiveRun) -> None:
        import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)

        capabilities = self._entry.capabilities
        known = {} if capabilities.get("starts_over") else _read_memory(run).get(self._entry.name, {})
        logger = make_with(
            self._entry.value,
            f"logger '{self._entry.name}'",
            save_dir=str(run.path / self._entry.section),
            name=run.name,
            version=known.get("version"),
            group=run.sweep,
            options=options_of(self._entry, run.config),
            run=run,
        )
        self._logger = logger
        if "version" not in known:  # some refuse to get them again, with values that changed on the way (PBT)
            logger.log_hyperparams(self._parameters(run))
        self._logged = (
            run.round if capabilities.get("keeps_rounds") else min(known.get("round", 0), run.round)
        )
        for row, seconds in _rounds_between(run, self._logged, run.round):
            self._log(row["round"], row, seconds)
        self._remember(run, run.round)

    def _log(self, round: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        self._logger.log_metrics(numbers_of(metrics, timings), step=round)
        self._logged = round

    def _remember(self, run: LiveRun, round: int) -> None:
        self._logger.save()
        memory = _read_memory(run)
        memory[self._entry.name] = {
            "version": _plain(self._logger.version),
            "round": min(round, self._logged),
        }
        write_whole(run.path / _MEMORY, json.dumps(memory, indent=2) + "\n", durable=False)

    def _finish(self, run: LiveRun) -> None:
        artifact = self._entry.capabilities.get("artifact")
        if artifact is not None:
            for file in self._files(run):
                artifact(self._logger, file)
        self._remember(run, run.round)
        self._finalize("success")

    def _parameters(self, run: LiveRun) -> dict[str, Any]:
        return hyperparameters(run.config)

    def _files(self, run: LiveRun) -> list[Path]:
        """What a logger that takes files gets at the end."""
        kept = ("config.yaml", "metrics.csv", "summary.md")
        return [*(run.path / name for name in kept), *report_files(run.path)]

    def _finalize(self, status: str | None) -> None:
        logger, self._logger = self._logger, None
        logger.save()
        if status is not None:
            logger.finalize(status)
        if (close := self._entry.capabilities.get("close")) is not None:
            close(logger)


def numbers_of(metrics: Mapping[str, Any], timings: Mapping[str, float]) -> dict[str, float]:
    """A round as loggers take it: plain numbers; sizes of clusters and seconds of stages one by one.

    >>> numbers_of({"micro_accuracy": 0.5, "cluster_sizes": [3, 5], "ari": None}, {"train": 0.25})
    {'micro_accuracy': 0.5, 'cluster_size/0': 3, 'cluster_size/1': 5, 'seconds/train': 0.25}
    """
    numbers = {
        name: value for name, value in metrics.items() if name != "round" and isinstance(value, int | float)
    }
    sizes = metrics.get("cluster_sizes")
    for cluster, size in enumerate(sizes if isinstance(sizes, list) else []):
        numbers[f"cluster_size/{cluster}"] = size
    for stage, seconds in timings.items():
        share = stage.startswith("share_")
        numbers[f"share/{stage[6:]}" if share else f"seconds/{stage}"] = seconds
    return numbers


def hyperparameters(settings: ExperimentSettings | Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, those without a value left out.

    >>> hyperparameters({"sweep": {"seeds": [0, 1], "table": None}})
    {'sweep.seeds': '[0, 1]'}
    """
    tree = settings if isinstance(settings, Mapping) else dataclasses.asdict(settings)
    given = {key: value for key, value in dotted(tree).items() if value is not None and value != []}
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in given.items()
    }


def _rounds_between(run: LiveRun, after: int, last: int) -> Sequence[tuple[dict[str, Any], dict[str, float]]]:
    """Metrics and timings of rounds that are in the run directory already."""
    from archipelago.runs.files import read_numbers

    if after >= last:
        return []
    seconds = {row.pop("round"): row for row in read_numbers(run.path / "timings.csv")}
    for row in seconds.values():
        if "total" in row:  # as a report calls it
            row["round"] = row.pop("total")
    return [(row, seconds.get(row["round"], {})) for row in run.history if row["round"] > after]


def report_files(path: Path, out: str = "") -> list[Path]:
    """The files of the report of a run or a sweep, made now."""
    from archipelago.reports.build import ReportRequest, build_report

    return [Path(file) for file in build_report(ReportRequest([str(path)], out, figures="no")).files]


def _read_memory(run: LiveRun) -> dict[str, dict[str, Any]]:
    try:
        memory: dict[str, dict[str, Any]] = json.loads((run.path / _MEMORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the first start, or damaged: everything is logged again
        return {}
    return memory


def _plain(version: Any) -> Any:
    return version if isinstance(version, int | str) else None
