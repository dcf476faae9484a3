"""The situations of `archipelago.strategies.expectations` as settings: digits, the platform's defaults.

A run takes a third of a second in this process with the engine `compiled`; methods whose steps that leaves to autograd
take `stacked`, all clients at once. A setting that a method does not read is left out: such situations are one run. The
network has two hidden layers: with
one, updates of clients that are alike stay alike, and a method that splits such clients is not noticed. Its last layer
is the head, so that there is a backbone to share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUPS = 2  # ground-truth groups, where there are any
BASELINE = "fedavg"  # what every method is compared with
SEEDS = (0, 1, 2)

COMMON: Mapping[str, str] = {
    "data": "digits", "data.rotations": str(GROUPS), "partition": "iid", "clients": "20", "clusters": str(GROUPS),
    "rounds": "20", "model": "mlp", "model.hidden": "[64,32]", "model.head": "[fc3]", "local.lr": "0.05",
    "local.engine": "compiled", "fleet.backend": "in_process", "partition.cache": "off", "records.rounds": "0",
}  # fmt: skip
CHANGES: Mapping[str, Mapping[str, str]] = {
    "iid": {"data.rotations": "1"},
    "rotations": {},
    "dirichlet": {"data.rotations": "1", "partition": "cluster_dirichlet", "partition.groups": str(GROUPS)},
    "participation": {"participation.fraction": "0.2", "rounds": "60", "evaluation.every": "3"},
    "slow": {"local.lr": "0.005"},
    "fast": {"local.lr": "0.5"},
    "one_cluster": {"clusters": "1"},
    "twice_clusters": {"clusters": str(2 * GROUPS)},
    "sizes": {"partition": "quantity", "partition.alpha": "0.5"},
    "one_class": {"partition": "odd_client"},
    "stragglers": {"participation.stragglers": "0.5"},
    "batchnorm": {"model": "benchmarks.behaviour.parts.BatchNormMLP", "model.hidden": "", "model.head": ""},
}
# Steps of these follow a rule of their own, train some layers only or compare features: autograd does them.
TOGETHER = frozenset({"apfl", "con", "fedrep", "moon", "perfedavg", "pfedme"})


def settings(method: str, situation: str, seed: int, length: int = 1) -> list[str]:
    """One run as the command line would be given it, `length` times as long; an empty value leaves a setting out."""
    merged = {**COMMON, **CHANGES[situation], "method": method, "seed": str(seed)}
    base = _base(method)
    if base is not None and not base.takes_steps:
        merged.pop("participation.stragglers", None)  # a part of no steps: it is refused
    if base is not None and not (base.clustered or base.reads_clusters):
        merged.pop("clusters")
    if TOGETHER & set(method.split("+")):
        merged["local.engine"] = "stacked"
    merged["rounds"] = str(length * int(merged["rounds"]))
    return [f"{name}={value}" for name, value in merged.items() if value]


def _base(method: str) -> Any:
    """The class of a method's base; None if there is none of that name."""
    from archipelago.strategies import METHODS

    base = method.partition("+")[0]
    return METHODS.find(base) if base in METHODS else None


def clusters_of(situation: str) -> int:
    """K of a situation."""
    return int({**COMMON, **CHANGES[situation]}["clusters"])
