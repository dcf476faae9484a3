"""What things are called: methods as the papers print them, metrics, settings in few words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_METHODS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedsgd": "FedSGD",
    "feddane": "FedDANE",
    "feddist": "FedDist",
    "feddws": "FedDWS",
    "local": "Local",
    "ditto": "Ditto",
    "fedper": "FedPer",
    "ifca": "IFCA",
    "fesem": "FeSEM",
    "wecfl": "WeCFL",
    "cfl": "CFL",
    "robust": "Robust",
    "fedsoft": "FedSoft",
    "fedem": "FedEM",
    "femam": "FeMAM",
    "oracle": "Oracle",
    "random": "Random clusters",
    "cam": "CAM",
    "con": "CON",
    "cks": "CKS",
    "prox": "Prox",
    "few_shots": "few shots",
    "finetune": "fine-tuning",
}


@dataclass(frozen=True)
class Metric:
    """A column of `metrics.csv` as it is shown: `scale` times its value, under `label`."""

    name: str
    label: str
    scale: float = 1.0
    higher_is_better: bool = True
    digits: int = 2


_SUMS = {
    "micro": "",
    "macro": ", plain mean",
    "worst10": ", worst 10%",
    "std": ", std over clients",
}


_SPLITS = {
    "validation": "on validation data",
    "train": "on training data",
    "holdout": "of clients held out",
}


def metric(name: str) -> Metric:
    """How a column of `metrics.csv` is shown; shares become percent, as the papers print them.

    >>> metric("micro_accuracy").label, metric("macro_loss").label, metric("ari").label
    ('accuracy (%)', 'loss, plain mean', 'ARI')
    >>> metric("validation_micro_accuracy").label, metric("best_centre_accuracy[1]").label
    ('accuracy (%) on validation data', 'accuracy (%) of the best model on distribution 1')
    """
    split, _, rest = name.partition("_")
    if split in _SPLITS:
        whole = metric(rest)
        return replace(whole, name=name, label=f"{whole.label} {_SPLITS[split]}")
    if found := re.fullmatch(r"(best_)?centre_(accuracy|mse)\[(.+)\]", name):
        plain = replace(metric(f"micro_{found[2]}"), name=name)
        where = f"of the best model on distribution {found[3]}"
        if not found[1]:
            where = "on distribution {} of the model for distribution {}".format(*found[3].split(","))
        return replace(plain, label=f"{plain.label} {where}")
    kind, _, rest = name.partition("_")
    ending = _SUMS.get(kind, "")
    if rest == "accuracy" or rest == "macro_f1":
        label = "accuracy" if rest == "accuracy" else "macro-F1"
        return Metric(name, f"{label} (%){ending}", 100.0, higher_is_better=kind != "std")
    if rest in ("mse", "loss") and kind in _SUMS:
        label = "mean squared error" if rest == "mse" else "loss"
        return Metric(name, f"{label}{ending}", higher_is_better=False, digits=4)
    if name in ("ari", "nmi"):
        return Metric(name, name.upper(), digits=3)
    return Metric(name, name.replace("_", " "), digits=4)


def headline_metrics(known: Sequence[str]) -> list[Metric]:
    """What a table shows first: accuracy and macro-F1, or the error of a regression, or the loss."""
    for names in (("micro_accuracy", "micro_macro_f1"), ("micro_mse",), ("micro_loss",)):
        if names[0] in known:
            return [metric(name) for name in names if name in known]
    return []


def method_label(method: str) -> str:
    """
    >>> method_label("fesem+cam"), method_label("fedavg*5"), method_label("mine+cks")
    ('FeSEM+CAM', 'FedAvg*5', 'mine+CKS')
    """
    return re.sub(r"[a-z_0-9]+", lambda found: _METHODS.get(found[0], found[0]), method)


def label_of(config: Mapping[str, Any]) -> str:
    """The method of a run, or the members of its ensemble."""
    members = config.get("ensemble") or []
    if members:
        return " & ".join(method_label(str(member)) for member in members)
    return method_label(str(config.get("method", "?")))


def setting_text(key: str, value: Any) -> str:
    """`name=value` without the section, as short as it can be said.

    >>> setting_text("local.lr", 0.1), setting_text("model.hidden", [64, 32]), setting_text("local.lr", 0.34423005968)
    ('lr=0.1', 'hidden=64,32', 'lr=0.34423')
    >>> setting_text("aggregation.name", "matched")  # as it is written on the command line
    'aggregation=matched'
    """
    return f"{key.removesuffix('.name').rpartition('.')[2]}={value_text(value)}"


def value_text(value: Any) -> str:
    """A setting's value as a label shows it."""
    shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"
    if isinstance(value, float) and len(shown) > 8:  # drawn: as the sweep calls it
        shown = f"{value:.6g}"
    return shown
