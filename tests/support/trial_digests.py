"""What every file of `tune_configs/`, and its small variant, asks for: pinned as one digest of its trials.

`python -m tests.support.trial_digests` writes the table anew. Do so only where a file is meant to ask for something
else: the table was first written from the files as they were before they shared bases. Digests leave out what is at
its default, so that a new setting changes none; `defaults.json` pins the defaults.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from archipelago.core.packaged import TUNE_CONFIGS
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.config import leaves, load_config
from archipelago.sweeps.config import load_sweep

TABLE = Path(__file__).with_name("trial_digests.json")
DEFAULTS = Path(__file__).with_name(
    "defaults.json"
)  # {setting: its default}: what files do not say counts, too


def settings_apart_from_defaults(config: ExperimentSettings) -> dict[str, Any]:
    """The settings of a config that are not at their defaults: a new setting changes nothing here."""
    found = {}
    for key, leaf in leaves(type(config)).items():
        value = functools.reduce(getattr, key.split("."), config)
        if value != leaf.default:
            found[key] = value
    return found


def defaults() -> dict[str, str]:
    """{setting: its default, as Python writes it} of an experiment."""
    return {key: repr(leaf.default) for key, leaf in sorted(leaves(type(load_config(env={}))).items())}


def digest(file: Path) -> dict[str, Any]:
    """How many trials a file asks for, and a digest of their names, groups, seeds and settings."""
    sweep = load_sweep(file, env={})
    if sweep is None:
        trials = [settings_apart_from_defaults(load_config(file, env={}))]
    else:
        found = sweep.trials() or [sweep.trial(label, {}, 0) for label in sweep.combinations]
        trials = [
            {"trial": t.name, "group": t.group, "seed": t.seed, "settings": settings_apart_from_defaults(t.config)}
            for t in found
        ]  # fmt: skip
        settings, defaults = sweep.settings, type(sweep.settings)()
        asked = {name: value for name, value in vars(settings).items() if value != getattr(defaults, name)}
        trials.append({"planned": sweep.planned, "seeds": sweep.seeds, "space": sweep.space, "sweep": asked})
    text = json.dumps(trials, sort_keys=True)
    return {"trials": len(trials), "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def digests(folder: Path, names: list[str]) -> dict[str, Any]:
    """The table of some names."""
    return {name: digest(folder / f"{name}.yaml") for name in sorted(names)}


if __name__ == "__main__":
    known = list(json.loads(TABLE.read_text()))
    TABLE.write_text(json.dumps(digests(TUNE_CONFIGS, known), indent=1) + "\n")
    DEFAULTS.write_text(json.dumps(defaults(), indent=1) + "\n")
