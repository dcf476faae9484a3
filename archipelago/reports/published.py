"""The numbers that the papers print, and which run each of them belongs to.

`published_results.csv` holds one printed number a line: `source` (the key of a paper), `table`, and the setting as
the paper names it; `archipelago.core.citations` has the papers. A number stands beside a run only if data, partition
(with its parameters, and divided as the paper's code does: `partition.compat`), K and method are the paper's, and no
samples are shifted; whatever else differs (clients, rounds, network, groups, ...) is said beneath the table.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.vocabulary import built_in
from archipelago.reports.centres import served_by

FILE = Path(__file__).with_name("published_results.csv")

# The settings that a source's experiments share; a run that differs is still compared, and the report says so.
SETTINGS: dict[str, dict[str, Any]] = {
    "thesis-2023": {
        "clients": 200, "rounds": 100, "local.steps": 10, "local.epochs": None, "local.batch": 32, "local.lr": 0.001,
        "local.optimizer": "sgd", "local.momentum": 0.9, "participation.fraction": 1.0, "holdout_clients": 0.0,
        "partition.test_share": None, "weights": "size",
    },
    "fedsoft-2022": {"clients": 100, "partition.size_range": [100, 200], "local.optimizer": "adam"},
    "fesem-2022": {"local.batch": 10, "local.optimizer": "sgd", "partition.test_share": 0.2},
}  # fmt: skip
# What no source has: how the server steps, what becomes of updates, who attacks.
_PLAIN: dict[str, Any] = {
    "server.optimizer": "sgd", "server.lr": 1.0, "server.momentum": 0.0, "update.transforms": [],
    "participation.attackers": 0.0,
}  # fmt: skip
# ... and those of some of its experiments: (setting, value) of a run -> what they have.
_SETTINGS_OF_SOME: dict[str, dict[tuple[str, str], dict[str, Any]]] = {
    "thesis-2023": {
        ("partition.name", "cluster_dirichlet"): {"partition.groups": 10, "partition.group_sizes": []},
        ("partition.name", "cluster_n_class"): {"partition.groups": 10, "partition.group_sizes": []},
        ("method", "fedprox"): {"fedprox.mu": 0.95},
    },
    "fedsoft-2022": {("method", "fedem"): {"fedem.predict": "largest"}},
    "fesem-2022": {
        ("method", "robust"): {"robust.outliers": 0.0},
        ("data.name", "femnist"): {"local.epochs": 5, "local.lr": 0.003},
        ("data.name", "celeba"): {"local.epochs": 10, "local.lr": 0.03},
        ("method", "fedprox"): {"fedprox.mu": 0.1},
    },
}
# The networks of a source by their names here; `auto` takes them for its data.
_NETWORKS = {
    "thesis-2023": ("auto", "cnn_cifar", "cnn_fashion"),
    "fesem-2022": ("auto", "cnn_femnist", "cnn_celeba"),
}
# Other problems than the papers': clients whose samples or classes are shifted.
_SHIFTS = ("rotations", "label_swaps", "colours", "noises")

_METRICS = {
    "thesis-2023": {"accuracy": "micro_accuracy", "macro_f1": "micro_macro_f1"},
    "fesem-2022": {
        "micro_accuracy": "micro_accuracy",
        "micro_f1": "micro_macro_f1",
        "macro_accuracy": "macro_accuracy",
        "macro_f1": "macro_macro_f1",
    },
    # FedSoft measures clients' models on their own training data.
    "fedsoft-2022": {
        "accuracy[best center on lower]": "best_centre_accuracy[0]",
        "accuracy[best center on upper]": "best_centre_accuracy[1]",
        "accuracy[local models]": "train_macro_accuracy",
    },
}

# FedSoft's distributions, in the order in which the data set has them.
_DISTRIBUTIONS = {
    "emnist_letters": ["lower", "upper"],
    "emnist_letters_rotated": ["lower 0deg", "lower 90deg", "upper 0deg", "upper 90deg"],
    "synthetic": [f"theta_{number}" for number in range(8)],
}

# Our partition and its parameters in the papers -> the name in the file.
_PARTITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dirichlet": ("client_dirichlet", {"alpha": 0.1}),
    "cluster_dirichlet": ("cluster_dirichlet", {"alpha": 0.1, "alpha_within": 10.0}),
    "n_class": ("client_n_class", {"classes": 2}),
    "cluster_n_class": ("cluster_n_class", {"classes": 3, "classes_within": 2}),
}

_BASES = {
    "fedavg": "FedAvg", "fedprox": "FedProx", "fedsgd": "FedSGD", "feddane": "FedDane", "feddist": "FedDist",
    "feddws": "FedDist+WS", "local": "NoFed", "ifca": "IFCA", "fesem": "FeSEM", "wecfl": "WeCFL",
    "cfl": "FedCluster", "robust": "Robust(TKM)", "fedsoft": "FedSoft", "fedem": "FedEM",
}  # fmt: skip
_WARMUP = 30  # rounds of the thesis's Chapter 7, Table 7.6 apart


@dataclass(frozen=True)
class Published:
    """One printed number; `metric` is a column of `metrics.csv`, or the paper's own name where there is none."""

    source: str
    table: str
    dataset: str
    partition: str
    clusters: int | None
    method: str
    metric: str
    mean: float
    std: float | None

    @property
    def where(self) -> str:
        """`thesis-2023, Table 3.1`."""
        return f"{self.source}, Table {self.table}"


@cache
def published_results() -> tuple[Published, ...]:
    """Every printed number."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [
        Published(
            row["source"],
            row["table"],
            row["dataset"],
            row["partition"],
            int(row["clusters"]) if row["clusters"] else None,
            row["method"],
            _METRICS.get(row["source"], {}).get(row["metric"], row["metric"]),
            float(row["mean"]),
            float(row["std"]) if row["std"] else None,
        )
        for row in rows
    ]
    return tuple(_with_named_centres(found))


def _with_named_centres(rows: Sequence[Published]) -> list[Published]:
    """The same numbers; a centre of FedSoft's is named by the distribution it serves, as those of runs are."""
    matrices: dict[
        tuple[Any, ...], list[tuple[int, int, int]]
    ] = {}  # table of a paper -> (row, distribution, centre)
    for at, row in enumerate(rows):
        if found := re.fullmatch(r"(accuracy|mse)\[(.+),c(\d+)\]", row.metric):
            key = (row.table, row.dataset, row.partition, row.method, f"centre_{found[1]}")
            distribution = _DISTRIBUTIONS[row.dataset].index(found[2])
            matrices.setdefault(key, []).append((at, distribution, int(found[3])))
    made = list(rows)
    for (*_, name), cells in matrices.items():
        matrix = np.full((max(d for _, d, _ in cells) + 1, max(c for *_, c in cells) + 1), np.nan)
        for at, distribution, centre in cells:
            matrix[distribution, centre] = rows[at].mean
        serves = served_by(matrix, built_in().column(name.replace("centre", "micro")).higher_is_better)
        for at, distribution, centre in cells:
            made[at] = replace(rows[at], metric=f"{name}[{distribution},{serves[centre]}]")
    return made


@cache
def _by_setting() -> dict[tuple[str, str, str], list[Published]]:
    found: dict[tuple[str, str, str], list[Published]] = {}
    for each in published_results():
        found.setdefault((each.dataset, each.partition, each.method), []).append(each)
    return found


def find_table(text: str) -> tuple[str, str]:
    """(source, table) of what a user typed: `3.1`, `thesis-2023:3.1`, `fesem-2022:2`."""
    source, _, table = text.rpartition(":")
    found = sorted({(each.source, each.table) for each in published_results()})
    fitting = [each for each in found if each[1] == table and each[0].startswith(source)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        choices = " or ".join(":".join(each) for each in fitting)
        raise UserError(
            f"Expected one published table, got table={text}, which several papers have: write {choices}.",
            code="ambiguous", setting="table", given=text,
        )  # fmt: skip
    known = ", ".join(f"{source}:{table}" for source, table in found)
    raise UserError(
        f"Expected a published table, got table={text}: there are {known}.",
        code="unknown-name", kind="published table", name=text,
    )  # fmt: skip


def published_for(
    config: Mapping[str, Any], clusters: int | None, table: tuple[str, str] | None = None
) -> dict[str, Published]:
    """The printed numbers of a run's setting, by metric; the earliest table wins unless one is named."""
    found: dict[str, Published] = {}
    data = _data_name(config, clusters)
    for partition in _partition_names(config):
        for method in method_names(config):
            for each in _by_setting().get((data, partition, method), ()):
                fits = (
                    each.clusters is None
                    or each.clusters == clusters
                    or (clusters is None and each.clusters == 1)
                )
                # Tables that compare across K print the same FedAvg beside every K.
                fits = fits or (clusters is None and each.table == "7.5")
                if fits and (table is None or (each.source, each.table) == table):
                    found.setdefault(each.metric, each)
    return found


def _data_name(config: Mapping[str, Any], clusters: int | None) -> str:
    """What the papers call the data of a config; empty if they have none like it."""
    data = config.get("data") or {}
    name = str(data.get("name"))
    if any(
        int(data.get(shift) or 1) > 1 for shift in _SHIFTS if (name, shift) != ("emnist_cases", "rotations")
    ):
        return ""
    if name == "emnist_cases":  # FedSoft's letters: both cases, upright or also turned by 90 degrees
        return {1: "emnist_letters", 2: "emnist_letters_rotated"}.get(int(data.get("rotations") or 1), "")
    if name == "synthetic" and not _fedsoft_generator(data, clusters):
        return ""
    return name


def _fedsoft_generator(data: Mapping[str, Any], clusters: int | None) -> bool:
    """Whether data come from FedSoft's generator: ten features, weights of variance 10 (its tables, and its code), as
    many centres as ground-truth models."""
    scale, noise, common = (float(data.get(key) or 0.0) for key in ("weight_scale", "noise", "common_scale"))
    alike = math.isclose(scale**2, 10.0, rel_tol=0.01) and (noise, common) == (1.0, 0.0)
    return alike and data.get("dimension") == 10 and data.get("sources") == clusters


def _partition_names(config: Mapping[str, Any]) -> list[str]:
    partition = config.get("partition") or {}
    name = str(partition.get("name"))
    if name == "mixture":
        return [str(partition.get("mixture"))]
    if name not in _PARTITIONS:
        return [name]
    # The thesis's code divides differently: client-wise Dirichlet differs by 34 points of macro-F1 before any training.
    if partition.get("compat", "none") == "none":
        return []
    published, parameters = _PARTITIONS[name]
    return [published] if all(partition.get(key) == value for key, value in parameters.items()) else []


def method_names(config: Mapping[str, Any]) -> list[str]:
    """What the papers may call the method of a config, the likeliest first; empty if they do not have it.

    >>> method_names({"method": "fesem+cam", "rounds": 100, "cam": {"warmup": 0.3}})
    ['FeSEM-CAM', 'FeSEM-CAM(warmup=30)']
    >>> method_names({"ensemble": ["fedavg*5"]}), method_names({"ensemble": ["fedavg", "ifca"]})
    (['FedAvg+'], ['FedAvg+IFCA'])
    """
    members = [str(member) for member in config.get("ensemble") or []]
    if len(members) == 1:
        names = _names(re.sub(r"\*\d+$", "", members[0]), config)
        return [f"{names[0]}+"] if names and "*" in members[0] else []
    if members:
        parts = [_names(member, config) for member in members]
        return ["+".join(names[0] for names in parts)] if all(parts) else []
    return _names(str(config.get("method", "")), config)


def _names(method: str, config: Mapping[str, Any]) -> list[str]:
    base, *addons = method.split("+")
    if base not in _BASES:
        return []
    rest = [
        addon for addon in addons if addon != "few_shots"
    ]  # chapters 4 to 6 use it where clusters are stable
    if {"con", "cks"} <= set(rest):
        rest = ["con&cks", *(addon for addon in rest if addon not in ("con", "cks"))]
    if not set(rest) <= {"cam", "con", "cks", "con&cks", "finetune"}:
        return []
    endings = {"finetune": "-Finetune"}
    name = _BASES[base] + "".join(endings.get(addon, f"-{addon.upper()}") for addon in rest)
    aggregation = (config.get("aggregation") or {}).get("name", "mean")
    if aggregation != "mean":
        return [f"{name}-MA"] if aggregation == "matched" else []
    if "con" in rest:
        form = (config.get("con") or {}).get("form", "para")
        return [f"{name}-{form}", *([name] if form == "para" else [])]
    if "cam" in rest:
        share = (config.get("cam") or {}).get("warmup", 0.0)
        if share is None:  # it follows from the data: nobody has printed that
            return [name]
        warmup = round(float(share) * float(config.get("rounds") or 0))
        usual = warmup == _WARMUP or config.get("rounds") != 100  # a shorter run cannot have as many
        return ([name] if usual else []) + [f"{name}(warmup={warmup})"]
    return [name, "HypoCluster", f"{name}(warmup=0)"] if name == "IFCA" else [name]


def deviations(config: Mapping[str, Any], sources: Iterable[str]) -> list[str]:
    """Where a run's setting is not the one of a source: `clients=20 (thesis-2023: 200)`."""
    found = []
    for source in sources:
        for key, expected in _expected(config, source).items():
            value = _setting(config, key)
            if value is not _UNSAID and value != expected:
                found.append(f"{key}={value} ({source}: {expected})")
        network = _setting(config, "model.name")
        if network is not _UNSAID and network not in _NETWORKS.get(source, (network,)):
            found.append(f"model.name={network} ({source}: {' or '.join(_NETWORKS[source][1:])})")
    return found


def _expected(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    expected = {**_PLAIN, **SETTINGS.get(source, {})}
    for (key, value), more in _SETTINGS_OF_SOME.get(source, {}).items():
        if _setting(config, key) == value:
            expected |= more
    return expected


_UNSAID = object()


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; a config that does not have it says nothing about it."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, _UNSAID) if isinstance(value, Mapping) else _UNSAID
    return value


def rows_of(table: tuple[str, str], block: tuple[str, str] | None = None) -> Sequence[Published]:
    """The printed numbers of one table, of one data set and partition of it if these are given."""
    return [
        each
        for each in published_results()
        if (each.source, each.table) == table and (block is None or (each.dataset, each.partition) == block)
    ]
