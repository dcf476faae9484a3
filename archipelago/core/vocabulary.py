"""What a run calls things: labels of its method, data and whatever is somebody's own, and what its metrics declare.

A run writes this into its directory (`vocabulary.json`), so that a report in another process, or of another year,
shows a plug-in's method and metric as their author named them without importing the plug-in. Runs from before have
none: their metrics are the platform's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.files import check_regular
from archipelago.core.metrics import METRICS, Spec, spec_of, specs
from archipelago.core.plugins import is_ours
from archipelago.core.readings import Reading, readings_of
from archipelago.core.registry import REGISTRIES

FILE = "vocabulary.json"
FORMAT = 1

Labels = Callable[[], Mapping[str, str]]  # asked only if a run does not say itself what its method is called

_PARTS_OF_METHODS = ("method", "add-on")  # kinds of registries
_NAMED_KINDS = (
    *_PARTS_OF_METHODS,
    "data set",
    "partition",
    "metric",
)  # whose labels have places of their own
_NAME = re.compile(r"[\w.]+")
_SUMS = {"micro": "", "macro": ", plain mean", "worst10": ", worst 10%", "std": ", std over clients"}
_RECOVERY = re.compile(r"recovery_time(?:_(\w+))?")
_SPLITS = {
    "validation": "on validation data",
    "train": "on training data",
    "holdout": "of clients held out",
    "honest": "of honest clients",
    "personal": "of each participant's own model, before averaging",
}
_CENTRE = re.compile(r"(best_)?centre_(\w+)\[(.+)\]")


@dataclass(frozen=True)
class Column:
    """A column of `metrics.csv` as it is shown: `scale` times its value, under `label`."""

    name: str
    label: str
    scale: float = 1.0
    higher_is_better: bool = True
    digits: int = 4


@dataclass(frozen=True)
class Vocabulary:
    """Labels of methods and add-ons by name, specs of metrics by name, labels of data sets and partitions by name.

    `readings` has the table of each method and add-on: how its paper was read. `others` are labels of somebody's own
    rules, networks, engines and the like by name or import path; the platform's are shown as they are written.
    """

    methods: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Spec] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, Sequence[Reading]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    # Methods ------------------------------------------------------------------------------------------------

    def method_label(self, method: str) -> str:
        """
        >>> words = Vocabulary({"fesem": "FeSEM", "cam": "CAM"})
        >>> words.method_label("fesem+cam"), words.method_label("fesem*5"), words.method_label("my.module.Mine+cam")
        ('FeSEM+CAM', 'FeSEM*5', 'Mine+CAM')
        """
        return _NAME.sub(lambda found: self.methods.get(found[0], found[0].rpartition(".")[2]), method)

    def label_of(self, config: Mapping[str, Any]) -> str:
        """The method of a run, or the members of its ensemble."""
        members = config.get("ensemble") or []
        if members:
            return " & ".join(self.method_label(str(member)) for member in members)
        return self.method_label(str(config.get("method", "?")))

    # Data ---------------------------------------------------------------------------------------------------

    def data_label(self, config: Mapping[str, Any]) -> str:
        """The data set of a run: a label that somebody gave it, or its name.

        >>> Vocabulary(data={"blobs": "Blobs"}).data_label({"data": {"name": "blobs"}}), Vocabulary().data_label({})
        ('Blobs', '?')
        """
        return _label_in(self.data, config, "data")

    def partition_label(self, config: Mapping[str, Any]) -> str:
        """The partition of a run, likewise."""
        return _label_in(self.partitions, config, "partition")

    def value(self, value: Any) -> Any:
        """A setting's value with labels in place of names that are not the platform's.

        >>> Vocabulary(others={"own.nets.tanh": "Tanh network"}).value(["own.nets.tanh", "mlp"])
        ['Tanh network', 'mlp']
        """
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return self.others.get(value, value) if isinstance(value, str) else value

    # Metrics ------------------------------------------------------------------------------------------------

    def column(self, name: str) -> Column:
        """How a column of `metrics.csv` is shown; shares become percent, as the papers print them.

        >>> column = built_in().column
        >>> column("micro_accuracy").label, column("macro_loss").label, column("ari").label
        ('accuracy (%)', 'loss, plain mean', 'ARI')
        >>> column("validation_micro_accuracy").label, column("best_centre_accuracy[1]").label
        ('accuracy (%) on validation data', 'accuracy (%) of the best model on distribution 1')
        """
        first, _, rest = name.partition("_")
        if first in _SPLITS:
            whole = self.column(rest)
            return replace(whole, name=name, label=f"{whole.label} {_SPLITS[first]}")
        if found := _CENTRE.fullmatch(name):
            plain = replace(self.column(f"micro_{found[2]}"), name=name)
            where = f"of the best model on distribution {found[3]}"
            if not found[1]:
                where = "on distribution {} of the model for distribution {}".format(*found[3].split(","))
            return replace(plain, label=f"{plain.label} {where}")
        if (recovered := _RECOVERY.fullmatch(name)) is not None:
            of = self.metrics.get(str(recovered[1]))
            label = "rounds to recover" + (f", {of.label}" if of is not None else "")
            return Column(name, label, higher_is_better=False, digits=1)
        if name == "epsilon":
            return Column(name, "epsilon", higher_is_better=False, digits=2)
        spec = self.metrics.get(rest if first in _SUMS else name)
        if spec is None or (first in _SUMS) != (spec.over == "clients"):
            return Column(name, name.replace("_", " "))
        higher = spec.better == "higher" and first != "std"
        return Column(name, f"{spec.title}{_SUMS.get(first, '')}", spec.scale, higher, spec.digits)

    def shown(self, place: str, over: str = "clients") -> list[Spec]:
        """The metrics that are shown at one of `PLACES`, in the order in which they were declared."""
        return [spec for spec in self.metrics.values() if place in spec.shown and spec.over == over]

    def headline(self, known: Iterable[str]) -> list[Column]:
        """What a table shows first, of the columns that are known: accuracy and macro-F1, say; else the loss."""
        names = [f"micro_{spec.name}" for spec in self.shown("table")]
        there = set(known)
        found = [name for name in names if name in there] or [
            name for name in ("micro_loss",) if name in there
        ]
        return [self.column(name) for name in found]

    def curves(self, known: Sequence[str]) -> list[Column]:
        """What is drawn over rounds: the headline, then what else asks for it."""
        found = [column.name for column in self.headline(known)]
        found += [f"micro_{spec.name}" for spec in self.shown("curve")]
        found += [spec.name for spec in self.shown("curve", over="clusters")]
        found += [f"worst10_{spec.name}" for spec in self.shown("worst")]
        return [self.column(name) for name in dict.fromkeys(found) if name in known]

    def progress(self, over: str = "clients") -> dict[str, str]:
        """{column: short label} of what a line of progress shows of clients, or of a clustering.

        >>> built_in().progress()
        {'micro_accuracy': 'accuracy', 'micro_macro_f1': 'macro-F1', 'micro_mse': 'mse'}
        """
        first = "micro_" if over == "clients" else ""
        return {f"{first}{spec.name}": spec.short for spec in self.shown("progress", over)}

    def summary(self, over: str = "clients") -> dict[str, str]:
        """{metric: label} of what the summary of a run lists of clients, those of tables first, or of a clustering."""
        rows = sorted(self.shown("summary", over), key=lambda spec: "table" not in spec.shown)
        return {spec.name: spec.label for spec in rows}

    # Files --------------------------------------------------------------------------------------------------

    def stored(self) -> dict[str, Any]:
        """Plain values for JSON."""
        metrics = {name: spec.stored() for name, spec in self.metrics.items()}
        return {
            "format": FORMAT, "methods": dict(self.methods), "metrics": metrics,
            "data": dict(self.data), "partitions": dict(self.partitions),
            "readings": {name: [row.stored() for row in rows] for name, rows in self.readings.items()},
            **({"others": dict(self.others)} if self.others else {}),
        }  # fmt: skip


def _label_in(labels: Mapping[str, str], config: Mapping[str, Any], section: str) -> str:
    name = str((config.get(section) or {}).get("name", "?"))
    return labels.get(name, name)


def built_in() -> Vocabulary:
    """The platform's metrics, and whatever methods are registered in this process."""
    return Vocabulary(registered_labels(), {spec.name: spec for spec in specs()})


def registered() -> Vocabulary:
    """Whatever is registered in this process: what a run under way may show, if it has it."""
    return Vocabulary(registered_labels(), {name: spec_of(entry) for name, entry in METRICS.items()})


def registered_labels() -> dict[str, str]:
    """{name or import path: label} of the methods and add-ons whose modules this process has imported."""
    return _labels_of(_PARTS_OF_METHODS)


def _labels_of(kinds: Iterable[str]) -> dict[str, str]:
    tables = [REGISTRIES[kind] for kind in kinds if kind in REGISTRIES]
    names = {name: entry.label for table in tables for name, entry in table.items()}
    return names | {path: table[name].label for table in tables for path, name in table.paths.items()}


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run with this config (nested mappings) writes into its `vocabulary.json`."""
    named = _NAME.findall(" ".join(map(str, [config.get("method"), *(config.get("ensemble") or [])])))
    known = registered_labels()
    methods = {name: known[name] for name in named if name in known}
    also = (config.get("evaluation") or {}).get("metrics") or ()
    metrics = {spec.name: spec for spec in specs(config.get("plugins") or (), also=also)}
    data, partitions = _chosen(config, "data", "data set"), _chosen(config, "partition")
    return Vocabulary(methods, metrics, data, partitions, _readings(methods), _others(config)).stored()


def _others(config: Mapping[str, Any]) -> dict[str, str]:
    """Labels of somebody's own entries of all other kinds that the config names, wherever it does."""
    known: dict[str, str] = {}
    for table in REGISTRIES.values():
        if table.kind not in _NAMED_KINDS:
            theirs = {name: entry.label for name, entry in table.items() if _somebodys(entry.value)}
            known |= theirs | {path: theirs[name] for path, name in table.paths.items() if name in theirs}
    return {text: known[text] for text in _texts(config) if text in known}


def _somebodys(value: Any) -> bool:
    """Whether an entry is neither the platform's nor one of torch's that the platform lists."""
    module = str(value.__module__)
    return not is_ours(module) and not module.startswith("torch.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _readings(names: Iterable[str]) -> dict[str, Sequence[Reading]]:
    """The tables of these methods and add-ons, those that have one."""
    tables = [REGISTRIES[kind] for kind in _PARTS_OF_METHODS if kind in REGISTRIES]
    found = {
        name: readings_of(table[table.paths.get(name, name)])
        for table in tables
        for name in names
        if table.paths.get(name, name) in table
    }
    return {name: rows for name, rows in found.items() if rows}


def _chosen(config: Mapping[str, Any], section: str, kind: str = "") -> dict[str, str]:
    """The label of the one entry that a section of the config names."""
    name = str((config.get(section) or {}).get("name", ""))
    known = _labels_of([kind or section])
    return {name: known[name]} if name in known else {}


def read_vocabulary(run: Path) -> Vocabulary | None:
    """The vocabulary of a run directory; None of a run from before there was one."""
    path = run / FILE
    check_regular(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        metrics = {name: Spec.read(each) for name, each in stored["metrics"].items()}
        data, partitions = (
            dict(stored.get(each) or {}) for each in ("data", "partitions")
        )  # not in older runs
        read = {
            name: [Reading(**row) for row in rows] for name, rows in (stored.get("readings") or {}).items()
        }
        others = dict(stored.get("others") or {})
        return Vocabulary(dict(stored["methods"]), metrics, data, partitions, read, others)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): expected labels and metrics; remove it to report without.",
            code="damaged", file=path,
        ) from error  # fmt: skip


def of_run(run: Path, labels: Labels = registered_labels) -> Vocabulary:
    """The vocabulary of a run directory; of an older run the platform's metrics, and methods as `labels` calls them."""
    return read_vocabulary(run) or Vocabulary(labels(), {spec.name: spec for spec in specs()})


def merged(vocabularies: Iterable[Vocabulary]) -> Vocabulary:
    """One for all of several runs; where they call a thing differently, the first wins."""
    methods: dict[str, str] = {}
    metrics: dict[str, Spec] = {}
    data: dict[str, str] = {}
    partitions: dict[str, str] = {}
    readings: dict[str, Sequence[Reading]] = {}
    others: dict[str, str] = {}
    for each in vocabularies:
        methods = {**each.methods, **methods}
        data, partitions = {**each.data, **data}, {**each.partitions, **partitions}
        readings, others = {**each.readings, **readings}, {**each.others, **others}
        metrics |= {name: spec for name, spec in each.metrics.items() if name not in metrics}
    return Vocabulary(methods, metrics, data, partitions, readings, others)
