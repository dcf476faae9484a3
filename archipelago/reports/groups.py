"""Runs that differ by their seeds alone are a group: one row of a table, one curve with a band."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from archipelago.core.dotted import dotted
from archipelago.core.vocabulary import (
    Column,
    Labels,
    Vocabulary,
    built_in,
    merged,
    of_run,
    registered_labels,
)
from archipelago.reports.guessing import guessing, lift
from archipelago.reports.names import setting_text, value_text
from archipelago.reports.repeats import Repeat, mean, repeat_of, std, units
from archipelago.reports.summary import figures_of
from archipelago.runs.files import RunFiles
from archipelago.runs.sweeps import Trial

_AUTO = "auto"  # stands for the K that each seed chose for itself

# Settings that never tell two groups apart: where a run lives, how it was executed, what it wrote down.
_ELSEWHERE = ("seed", "partition.seed", "name", "storage", "fleet.", "checkpoint.", "records.", "idle_rounds",
              "choose_clusters", "data.root", "data.download", "data.cache", "data.mapped", "partition.cache",
              "tensorboard", "local.executor", "local.engine", "local.normalise", "local.trainer", "local.chunk",
              "local.convolution", "local.compile", "determinism", "sweep.")  # fmt: skip
# Settings that runs of earlier versions do not have, and the value that says what those did.
_ADDED = {"precision": "32"}
# Settings that name the problem, and not the way it is solved: each combination is a table of its own.
_PROBLEM = ("data.", "partition.", "clients", "holdout_clients", "model.")


@dataclass
class Group:
    """Runs of one setting with different seeds, and trials of it that left nothing behind."""

    label: str
    block: str
    settings: Mapping[str, Any]
    runs: list[RunFiles] = field(default_factory=list)
    missing: list[Trial] = field(default_factory=list)
    name: str = ""  # as a sweep calls it
    reported: Mapping[Path, Trial] = field(default_factory=dict)  # what a sweep says of the runs
    vocabulary: Vocabulary = field(default_factory=built_in)

    @property
    def method(self) -> str:
        """The label of its method alone."""
        return self.vocabulary.label_of(self.config)

    @property
    def tuned(self) -> Column | None:
        """The metric on validation data that the group competed with others by; None where it did not."""
        trial = next((trial for trial in self.reported.values() if trial.tuned), None)
        if trial is None:
            return None
        by = self.vocabulary.column(trial.tuned)
        return by if trial.mode == "auto" else replace(by, higher_is_better=trial.mode == "max")

    @cached_property
    def counted(self) -> list[RunFiles]:
        """The finished runs; of two runs of one partition and seed the first counts."""
        return _one_of_each(run for run in self.runs if run.status.state == "finished")

    @cached_property
    def shown(self) -> list[RunFiles]:
        """The runs that curves are drawn from: those that count, or, while there are none, those that have begun."""
        return self.counted or _one_of_each(run for run in self.runs if run.metrics)

    @cached_property
    def finished(self) -> dict[Repeat, dict[str, Any]]:
        """Final metrics of the runs that count."""
        return {repeat_of(run): figures_of(run) for run in self.counted}

    @cached_property
    def has_no_rank(self) -> bool:
        """Whether nobody trained at the end of one of the runs, or one is not of the config that it has now."""
        return any(run.ended_idle or run.edited is not None for run in self.counted)

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of the first run; empty if there is none."""
        return self.runs[0].config if self.runs else {}

    @cached_property
    def engines(self) -> list[str]:
        """What ran the local steps of its runs, resumed parts included, where they say so."""
        parts = [part for run in self.runs for part in (run.environment, *run.environment.get("resumed", []))]
        found = ((part.get("compute") or {}).get("engine") for part in parts)
        return sorted({str(engine) for engine in found if engine})

    @cached_property
    def clustered(self) -> bool:
        """Whether the method put clients into clusters."""
        return any("cluster_sizes" in row for run in self.runs for row in run.metrics[-1:])

    @property
    def clusters(self) -> int | None:
        """K, where the method has one: of its clusters, or of the copies in an ensemble."""
        members = [str(member) for member in self.config.get("ensemble") or []]
        if len(members) == 1 and members[0].rpartition("*")[2].isdigit():
            return int(members[0].rpartition("*")[2])
        if not self.clustered or len(self._chosen) > 1:
            return None
        return int(self.config["clusters"]) if "clusters" in self.config else None

    @cached_property
    def _chosen(self) -> dict[int, list[Repeat]]:
        """K -> the seeds that chose it, where each chose its own; empty where K was given."""
        found: dict[int, list[Repeat]] = {}
        for run in self.runs if self.settings.get("clusters") == _AUTO else []:
            found.setdefault(int(run.setting("clusters")), []).append(repeat_of(run))
        return found

    def by_repeat(self, metric: str) -> dict[Repeat, float]:
        """The mean of a metric over the last evaluations of each run, where it was measured."""
        values = ((repeat, found["final"].get(metric)) for repeat, found in sorted(self.finished.items()))
        return {repeat: float(value) for repeat, value in values if isinstance(value, int | float)}

    @cached_property
    def guessed(self) -> dict[Repeat, dict[str, dict[str, float]]]:
        """What guessing is worth on the data of each run that counts."""
        return {repeat_of(run): found for run in self.counted if (found := guessing(run))}

    def lift(self, metric: str) -> float | None:
        """Mean of how far each run is above guessing; None where that cannot be said of all of them."""
        found = {
            key: lift(each["final"], self.guessed.get(key, {}), metric) for key, each in self.finished.items()
        }
        known = {key: value for key, value in found.items() if value is not None}
        return mean(list(units(known).values())) if known and len(known) == len(found) else None

    def mean(self, metric: str) -> float | None:
        """Mean over partitions, or over the starts of one; None where nothing was measured."""
        values = list(units(self.by_repeat(metric)).values())
        return mean(values) if values else None

    def std(self, metric: str) -> float | None:
        """Standard deviation over the same (ddof 0, as the papers' tables); None of fewer than two."""
        values = list(units(self.by_repeat(metric)).values())
        return std(values) if len(values) > 1 else None

    @cached_property
    def note(self) -> str:
        """What a reader of the row must know: a K of its own for each seed, trials that failed or are not finished."""
        words = []
        if len(self._chosen) > 1:
            by_k = (f"{k} (seed {', '.join(map(str, seeds))})" for k, seeds in sorted(self._chosen.items()))
            words.append(f"K was chosen on validation data: {', '.join(by_k)}")
        for trial in self.missing:
            words.append(_words(trial.seed, trial.status or "not run", trial.reason))
        for run in self.runs:
            state = str(run.status.state)
            if state == "finished":
                continue
            why = str(run.status.sentence or "")
            # What a run that was stopped, or lost its process, cannot say itself, the sweep knows.
            reported = self.reported.get(run.path)
            if reported is not None and reported.status in ("stopped", "failed"):
                state, why = reported.status, reported.reason or why
            done = f"{state} after {run.status.rounds_done} rounds"
            words.append(_words(repeat_of(run), done, why))
        for run in self.runs:
            if run.edited is not None:
                words.append(_words(repeat_of(run), f"changed since it was made: {run.edited}", "no rank"))
        for run in self.runs:
            if run.altered is not None:
                words.append(_words(repeat_of(run), f"changed since it was made: {run.altered}", ""))
        words += other_code([self])
        for run in self.counted:
            if run.dropped_share:
                lost = f"{share_text(run.dropped_share)} of the updates were not finite and were dropped"
                words.append(_words(repeat_of(run), lost, "no rank" if run.ended_idle else ""))
        return "; ".join(words)


def other_code(groups: Iterable[Group]) -> list[str]:
    """Code of somebody's own that is not the same in all runs that import it, in words."""
    found: dict[str, set[str]] = {}
    for run in (run for group in groups for run in group.runs):
        for name, digest in run.code.items():
            found.setdefault(name, set()).add(digest)
    return [
        f"the runs were made with {len(digests)} versions of the code of {name}"
        for name, digests in found.items()
        if len(digests) > 1
    ]


def share_text(share: float) -> str:
    """
    >>> share_text(0.0004), share_text(0.256), share_text(0.9999), share_text(1.0)
    ('less than 1 %', '26 %', 'more than 99 %', '100 %')
    """
    if 0 < share < 0.01 or 0.99 < share < 1:
        return "less than 1 %" if share < 0.5 else "more than 99 %"
    return f"{100 * share:.0f} %"


def _one_of_each(runs: Iterable[RunFiles]) -> list[RunFiles]:
    found: dict[Repeat, RunFiles] = {}
    for run in runs:
        found.setdefault(repeat_of(run), run)
    return list(found.values())


def _words(seed: Any, what: str, why: str) -> str:
    text = f"seed {seed}: {what}" if seed is not None else what
    return f"{text} ({' '.join(why.split())})" if why else text


@dataclass
class _Entry:
    """What becomes a group, before it is known what tells it from others."""

    settings: dict[str, Any]
    name: str = ""
    runs: list[RunFiles] = field(default_factory=list)
    missing: list[Trial] = field(default_factory=list)


def make_groups(trials: Iterable[Trial], labels: Labels = registered_labels) -> list[Group]:
    """The groups of all trials, in the order in which their first run was given.

    `labels` are those of methods, for runs from before a run said itself what its method is called.
    """
    trials = list(trials)
    with_runs = [(trial, trial.run, _telling(trial, trial.run)) for trial in trials if trial.run is not None]
    # What a sweep compares although it tells no results apart, as executors: names of one sweep by settings.
    names: dict[Any, set[str]] = {}
    for trial, _, settings in with_runs:
        names.setdefault((trial.sweep, _key(settings)), set()).add(trial.group)
    found: dict[Any, _Entry] = {}
    by_name: dict[Any, _Entry] = {}
    reported: dict[Path, Trial] = {}
    for trial, run, settings in with_runs:
        if len(names[trial.sweep, _key(settings)]) > 1:
            settings["group"] = trial.group
        # By settings alone: a further seed has no group of a sweep, or one of another name.
        entry = found.setdefault(_key(settings), _Entry(settings))
        entry.runs.append(run)
        if trial.group:
            reported[run.path] = trial
            entry.name = entry.name or trial.group
            by_name.setdefault(_named(trial), entry)
    alone: dict[Any, list[Trial]] = {}
    for trial in (trial for trial in trials if trial.run is None):
        if _named(trial) in by_name:
            by_name[_named(trial)].missing.append(trial)
        else:
            alone.setdefault(_named(trial), []).append(trial)
    groups = _labelled(list(found.values()), labels)
    for group in groups:
        group.reported = {run.path: reported[run.path] for run in group.runs if run.path in reported}
    return groups + _without_runs(list(alone.values()))


def _telling(trial: Trial, run: RunFiles) -> dict[str, Any]:
    """The settings that tell a run from those of other groups."""
    given = {**_ADDED, **dotted(run.config, keep_empty=True)}
    settings = {key: value for key, value in given.items() if not key.startswith(_ELSEWHERE)}
    if settings.get("data.name") != "synthetic" and not settings.get("plugins"):
        settings.pop("data.weight_scale", None)  # in every config, read by one, and its default moved
    if run.chose_clusters:
        settings["clusters"] = _AUTO
    settings |= _taken_over(run)
    if trial.population:  # its members of two seeds have nothing in common but where they began
        settings["seed"] = trial.seed
    return settings


def _key(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in settings.items()))


def _named(trial: Trial) -> tuple[Path | None, str, int | None]:
    """What a sweep calls the group: two sweeps may use one name for different things."""
    return trial.sweep, trial.group, trial.seed if trial.population else None


def _without_runs(lost: Sequence[list[Trial]]) -> list[Group]:
    """A group for each name of a sweep of which nothing was written; sweeps are named where they share one."""
    names = [(trials[0].group, trials[0].sweep) for trials in lost]
    groups = []
    for (name, sweep), trials in zip(names, lost, strict=True):
        shared = len({other for same, other in names if same == name}) > 1
        label = f"{name} ({sweep})" if shared and sweep is not None else name
        groups.append(Group(label, "", {}, [], trials, name))
    return groups


def _taken_over(run: RunFiles) -> dict[str, str]:
    """Settings that changed on the way, with the rounds they were in force: `0.1 (rounds 1-4), 0.05 (5-8)`."""
    found: dict[str, str] = {}
    for key in dict.fromkeys(key for entry in run.schedule for key in entry["values"]):
        stretches: list[tuple[int, Any]] = [(0, run.setting(key))]  # (last round before it, value)
        for entry in run.schedule:
            if key in entry["values"] and entry["values"][key] != stretches[-1][1]:
                stretches.append((int(entry["round"]), entry["values"][key]))
        ends = [before for before, _ in stretches[1:]] + [int(run.setting("rounds") or 0)]
        found[key] = ", ".join(
            f"{value_text(value)} ({'' if before else 'rounds '}{before + 1}-{end})"
            for (before, value), end in zip(stretches, ends, strict=True)
        )
    return found


def _labelled(entries: Sequence[_Entry], labels: Labels) -> list[Group]:
    varied = varying([entry.settings for entry in entries])
    words = [merged(of_run(run.path, labels) for run in entry.runs) for entry in entries]
    everything = merged(
        words
    )  # an older run of the same data calls it by its name, and belongs into the same block
    groups = []
    for entry, vocabulary in zip(entries, words, strict=True):
        settings = entry.settings
        chosen = {key: vocabulary.value(settings[key]) for key in varied if key in settings}
        problem = [setting_text(key, value) for key, value in chosen.items()
                   if key.startswith(_PROBLEM) and key not in ("data.name", "partition.name")]  # fmt: skip
        own = [setting_text(key, value) for key, value in chosen.items()
               if not key.startswith(_PROBLEM) and key not in ("method", "ensemble")
               and (key != "clusters" or value == _AUTO)]  # fmt: skip
        data, partition = (str(settings.get(f"{section}.name", "?")) for section in ("data", "partition"))
        block = ", ".join(
            [everything.data.get(data, data), everything.partitions.get(partition, partition), *problem]
        )
        label = vocabulary.label_of(entry.runs[0].config) + (f" ({', '.join(own)})" if own else "")
        groups.append(
            Group(label, block, settings, entry.runs, entry.missing, entry.name, vocabulary=vocabulary)
        )
    return groups


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that do not have one value in all groups that have them."""
    values: dict[str, set[str]] = {}
    for each in settings:
        for key, value in each.items():
            values.setdefault(key, set()).add(repr(value))
    return [key for key, found in values.items() if len(found) > 1]


def by_block(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Groups by the problem they solve, in their order."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.block, []).append(group)
    return found
