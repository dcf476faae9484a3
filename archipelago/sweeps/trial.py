"""One trial of a sweep, a few rounds at a time: it is stepped, stopped, saved and moved to another process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.node_data import shared_federation
from actors.plan import Place
from actors.ray_errors import ActorsLost
from actors.reports import RoundReport
from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.settings import ExperimentSettings
from archipelago.core.vocabulary import registered
from archipelago.data import Federation
from archipelago.experiments.choose_clusters import choose_clusters
from archipelago.experiments.config import (
    check_network,
    check_settings_of_methods,
    config_from_yaml,
    config_to_yaml,
)
from archipelago.experiments.figures_data import write_examples
from archipelago.experiments.given import code_of, parse_yaml
from archipelago.experiments.readers import without_unread
from archipelago.experiments.runner import Drive
from archipelago.runs.checkpoints import adopt_checkpoint, checkpoints, remove_checkpoint
from archipelago.runs.directory import RunDirectory
from archipelago.runs.environment import describe_environment
from archipelago.runs.identity import first_difference
from archipelago.runs.status import is_run, read_status
from archipelago.runs.storage import Mirror, join, name_of, read_text, writable
from archipelago.runs.trust import remember
from archipelago.sweeps.config import Trial, with_values
from archipelago.sweeps.shared_prefix import branch_point, take_rounds

QUIET_SECONDS = 1.0  # rounds shorter than this are reported together where nobody decides by them
PATIENCE = 120.0  # seconds that a checkpoint may take to be written, or a killed process to be gone
TRIES = 2  # times that actors are started again where they were before Tune is asked for another placement
FAILED = "failed"
_SCHEDULE = "schedule.json"  # of a trial whose settings change on the way


def payload(trial: Trial, address: str, **more: Any) -> dict[str, Any]:
    """What Tune hands to the process of a trial."""
    config = dataclasses.replace(trial.config, name=None)
    return {
        "trial": trial.name,
        "address": address,
        "settings": config_to_yaml(config),
        "values": dict(trial.values),
        **more,
    }


class TrialRun:
    """A run that continues whenever `step` is called, in the run directory at `address`.

    `actors` is how many client actors it has; none means that the clients live in this process. `gpus` is what each
    process with clients reserved; None, where nothing was reserved: it finds out. `label` names the sweep whose data
    this node shares. `watched`: every evaluation is reported by itself, because something decides by it. `replay`:
    what an earlier process left is reported again first; `ended`: and nothing after it. `prefix` is the address of a
    run whose first rounds it shares, `branches` whether another run shares its own.
    """

    def __init__(
        self,
        address: str,
        settings: str,
        values: Mapping[str, Any],
        *,
        metric: str | None = None,
        actors: int = 0,
        gpus: float | None = None,
        label: str | None = None,
        watched: bool = False,
        replay: bool = False,
        ended: bool = False,
        command: str | None = None,
        prefix: str | None = None,
        branches: bool = False,
    ) -> None:
        self._prefix, self._branches = prefix, branches
        self.address, self.metric = address, metric
        self._settings, self._values = settings, dict(values)
        self._actors, self._gpus, self._label = actors, gpus, label
        self._watched, self._replay, self._ended, self._command = watched, replay, ended, command
        self._stack = contextlib.ExitStack()
        self._rounds: Iterator[RoundReport] | None = None
        self._run: RunDirectory | None = None
        self._mirror: Mirror | None = None
        self._old: list[dict[str, Any]] = []
        self._old_is_known = False  # the rounds before were reported to Tune
        self._taken = 0  # rounds that this process did not train: of an earlier one, or a shared prefix
        self._last: dict[str, Any] = {}
        self.total = config_from_yaml(settings).rounds

    # What Tune asks for ---------------------------------------------------------------------------------------

    def step(self) -> dict[str, Any]:
        """Continue for a while; the result says how far the trial is. A failure is a result, not an exception.

        Actors that cannot be started again where they were are no failure of the trial: Tune is to begin it again
        elsewhere, from its last checkpoint.
        """
        try:
            if self._rounds is None:
                self._begin()
            return self._reported_again() or self._continue()
        except ActorsLost:
            with contextlib.suppress(Exception):  # its files are let go of, whatever else is gone
                self.close()
            raise
        except Exception as error:  # whatever goes wrong in one trial must not stop the others
            return self._failure(error)

    def close(self) -> None:
        """End what was started; the run can be resumed."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None and hasattr(rounds, "close"):
            if self._run is not None and self._run.status.state == "running":
                self._run.flush(self._run.status.rounds_done)
            rounds.close()
        self._stack.close()
        self._run = None

    def save(self, folder: Path) -> None:
        """A copy of the state after the last round that was reported, for another trial to take over."""
        assert self._run is not None
        done = self._run.status.rounds_done
        path = self._run.path / "checkpoints" / f"round-{done:06d}"
        deadline = time.monotonic() + PATIENCE
        while not path.is_dir():  # it is written in the background
            if time.monotonic() > deadline:
                raise RuntimeError(f"the trial has no checkpoint of round {done}")
            time.sleep(0.01)
        shutil.copytree(path, folder / path.name)
        write_whole(folder / "trial.json", json.dumps({"address": self.address, "round": done}))

    def take_over(self, folder: Path, values: Mapping[str, Any]) -> None:
        """Continue from a saved state, of this trial or of a better one, with these values."""
        saved = json.loads((folder / "trial.json").read_text())
        self.close()
        with writable(self.address, PATIENCE) as (path, _), RunDirectory.open(path, wait=PATIENCE) as run:
            run.truncate(saved["round"])
            name = f"round-{saved['round']:06d}"
            if (path / "checkpoints" / name).is_dir():
                remove_checkpoint(path / "checkpoints" / name)
            shutil.copytree(folder / name, path / "checkpoints" / name)
            adopt_checkpoint(path / "checkpoints" / name)
            if saved["address"] != self.address:
                shown = ", ".join(
                    f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in values.items()
                )
                donor = name_of(saved["address"])
                run.note(saved["round"], f"Took over the state of {donor}; continues with {shown}.")
            schedule = [entry for entry in _schedule(path) if entry["round"] <= saved["round"]]
            schedule.append({"round": saved["round"], "values": dict(values)})
            write_whole(path / _SCHEDULE, json.dumps(schedule) + "\n")
        self._values = dict(values)
        self._old_is_known = True

    # Behind it ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        path, self._mirror = self._stack.enter_context(writable(self.address, PATIENCE))
        config = with_values(config_from_yaml(self._settings), self._values)
        known = is_run(path)
        if known:
            _refuse_other_settings(path, config)
        if (
            self._mirror is not None and not known
        ):  # the first files of a process that was killed while it sent them
            shutil.rmtree(path, ignore_errors=True)
        if known and (self._ended or read_status(path).state == "finished"):
            self._old = reported_rows(path, self.metric)
            self._taken = self.total
            self._rounds = iter(())
            return
        notes: list[str] = []
        adopted = False
        if known:
            config = _scheduled(path, config)
        elif config.choose_clusters:
            chosen = choose_clusters(config, place=self._place(), gpus=self._gpus)
            config = dataclasses.replace(config, clusters=chosen.clusters, choose_clusters=False)
            notes.append(chosen.sentence)
        federation, data = shared_federation(config, self._label)
        config = dataclasses.replace(config, fleet=_fleet(config, self._actors))
        if known:
            run = RunDirectory.open(path, environment=describe_environment(), wait=PATIENCE)
        else:
            check_network(config, federation.input_shape, federation.classes)
            check_settings_of_methods(config, federation.groups)
            environment = describe_environment(self._command)
            text = config_to_yaml(config)
            code = code_of(parse_yaml(text, "config.yaml"))
            run = RunDirectory.create(path, text, environment, federation, code)
            remember(run.status.identity, code)
        self._run = self._stack.enter_context(run)
        if not known:
            for note in [*notes, *federation.notes]:
                run.note(0, note)
            write_examples(run, federation, config)
        if self._prefix is not None and not checkpoints(run):
            adopted = take_rounds(run, config, self._prefix)
        self._rounds = self._drive(config, federation, data, run, known or adopted)

    def _drive(
        self, config: ExperimentSettings, federation: Federation, data: Any, run: RunDirectory, known: bool
    ) -> Iterator[RoundReport]:
        branch = branch_point(config) if self._branches else None
        drive = Drive(
            config, federation, run, quiet=True, place=self._place(), data=data, fork=branch, mirror=self._mirror,
            sweep=sweep_name(self.address), gpus=self._gpus,
        )  # fmt: skip
        done, checkpoint = drive.last_checkpoint() if known else (0, None)
        self._taken = done
        self._old = reported_rows(run.path, self.metric) if known and not self._old_is_known else []
        return drive.rounds(done, checkpoint, resumed=known)

    def _place(self) -> Place | None:
        """The trial's own placement group, where its actors have theirs; None without actors."""
        if not self._actors:
            return None
        from ray.util import get_current_placement_group

        group = get_current_placement_group()
        assert group is not None, "a trial with actors has a placement group"
        return Place(group, group.bundle_count - self._actors, self._actors)

    def _reported_again(self) -> dict[str, Any] | None:
        """One round of an earlier process; all but the last are left out where nobody decides by them."""
        if not self._old:
            return None
        rows = self._old if self._replay else self._old[-1:]
        result, self._old = rows[0], rows[1:]
        self._last = result
        over = not self._old and self._run is None
        return self._result("finished" if over else "running")

    def _continue(self) -> dict[str, Any]:
        assert self._rounds is not None
        began = time.monotonic()
        for report in self._rounds:
            shown = _metrics(report.round, report.metrics, self.metric)
            # Rounds without an evaluation have nothing new to show.
            self._last = {**self._last, **shown}
            last = report.round == self.total
            awaited = self._watched and (self.metric is None or self.metric in shown)
            if not last and (awaited or (not self._watched and time.monotonic() - began >= QUIET_SECONDS)):
                return self._result("running")
        self.close()
        return self._result("finished")

    def _result(self, state: str, reason: str = "") -> dict[str, Any]:
        return {
            **self._last,
            "training_iteration": self._last.get("round", 0),
            "rounds": self.total,
            "taken": self._taken,
            "state": state,
            "reason": reason,
            "done": state != "running",
        }

    def _failure(self, error: Exception) -> dict[str, Any]:
        """The sentence that the final table shows; the run directory says it too."""
        reason = reason_of(error)
        with contextlib.suppress(Exception):  # the same trouble again (a full disk) changes nothing
            if self._run is not None and self._run.status.state == "running":
                self._run.fail(reason)
            self.close()
        return self._result(FAILED, reason)


def reason_of(error: Exception) -> str:
    """Why a trial failed, in a sentence."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"


def sweep_name(address: str) -> str | None:
    """The name of the sweep that a trial at `address` belongs to; None outside of sweeps.

    >>> sweep_name("s3://bucket/results/tuned/runs/ifca-seed0?region=here"), sweep_name("runs/alone")
    ('tuned', None)
    """
    parts = address.partition("?")[0].rstrip("/").split("/")
    return parts[-3] or None if len(parts) > 2 and parts[-2] == "runs" else None


def _fleet(config: ExperimentSettings, actors: int) -> Any:
    if actors:
        # After that the placement itself may be gone, and Tune finds another one.
        restarts = min(config.fleet.restarts, TRIES)
        return dataclasses.replace(config.fleet, backend="ray", restarts=restarts)
    return type(config.fleet)(backend="in_process", gpus=config.fleet.gpus)  # nothing else is read there


def _metrics(round: int, metrics: Mapping[str, Any], metric: str | None) -> dict[str, Any]:
    shown = {
        name: metrics[name] for name in registered().progress() if isinstance(metrics.get(name), int | float)
    }
    found: dict[str, Any] = {"round": round, **({"shown": shown} if shown else {})}
    if metric is not None and isinstance(metrics.get(metric), int | float):
        found[metric] = metrics[metric]
    return found


def reported_rows(path: Path, metric: str | None) -> list[dict[str, Any]]:
    """What a run directory says that its rounds came to, evaluated ones and the last."""
    from archipelago.runs.reader import open_run

    rows: list[dict[str, Any]] = []
    for row in open_run(path).metrics.to_dict("records"):
        metrics = {
            name: value for name, value in row.items() if value == value
        }  # an empty cell is not a number
        found = _metrics(int(row["round"]), metrics, metric)
        if "shown" in found or metric in found:
            rows.append(found)
    return rows


def values_now(address: str, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a trial continues with: those it took over last, those that were drawn if it took over none."""
    text = read_text(join(address, _SCHEDULE))
    schedule = json.loads(text) if text is not None else []
    return dict(schedule[-1]["values"]) if schedule else dict(drawn)


def _schedule(path: Path) -> list[dict[str, Any]]:
    file = path / _SCHEDULE
    return json.loads(file.read_text()) if file.is_file() else []


def _refuse_other_settings(path: Path, config: ExperimentSettings) -> None:
    """A `UserError` if the run in `path` was begun with other settings: its rounds would be of two experiments."""
    written = config_from_yaml((path / "config.yaml").read_text(encoding="utf-8"))
    changed_on_the_way = {key for entry in _schedule(path) for key in entry["values"]}
    if config.choose_clusters:
        changed_on_the_way.add("clusters")
    read = (
        without_unread(each, lambda found: True) for each in (written, config)
    )  # earlier versions took others too
    then, now = (parse_yaml(config_to_yaml(each), "config.yaml") for each in read)
    other = first_difference(then, now, changed_on_the_way)
    if other is not None:
        raise UserError(
            f"Expected the settings that {path} was begun with, got others: {other}. Set it back, or start a sweep of "
            "its own with name=...",
            code="other-config",
            path=path,
        )


def _scheduled(path: Path, config: ExperimentSettings) -> ExperimentSettings:
    """The run's own config, with the values that its newest checkpoint continues with."""
    written = config_from_yaml((path / "config.yaml").read_text(encoding="utf-8"))
    config = dataclasses.replace(config, clusters=written.clusters, choose_clusters=False)
    found = checkpoints(path)
    done = found[-1][0] if found else 0
    for entry in _schedule(path):
        if entry["round"] <= done:
            config = with_values(config, entry["values"])
    return config
