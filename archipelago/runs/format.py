"""The versions of the layouts of run directories and of sweep directories, and how older ones are read.

`status.json` of a run and `sweep.yaml` of a sweep say `format`; directories from before have none and are version 1.
What is read of an older one is upgraded in memory, one version after the other; the files on disk stay as they are. To
change a format: raise `FORMAT` or `SWEEP_FORMAT`, and add what makes the version before like the new one to its
migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError

FORMAT = 3
SWEEP_FORMAT = 2
DOCUMENT, TRIALS = "sweep.yaml", "trials.csv"  # of a sweep: what was asked for, and what became of each trial

Document = dict[str, Any]


def _settings_of_listeners(config: Document) -> Document:
    """Version 2 has plug-ins, callbacks and loggers; before, there were none."""
    return {"plugins": [], "callbacks": [], "loggers": [], **config}


def _as_it_is(config: Document) -> Document:
    """Version 3 has an identity (`identity.py`); a run from before has none, and its config is the same."""
    return config


# {version: what makes a config of this version one of the next}
MIGRATIONS: dict[int, Callable[[Document], Document]] = {1: _settings_of_listeners, 2: _as_it_is}


def _population(sweep: Document) -> Document:
    """Version 2 says what the sweep's scheduler declares; before, one scheduler alone exchanged states."""
    return {**sweep, "declares": {"population": (sweep.get("sweep") or {}).get("scheduler") == "pbt"}}


# {version: what makes a `sweep.yaml` of this version one of the next}
SWEEP_MIGRATIONS: dict[int, Callable[[Document], Document]] = {1: _population}


def format_of(status: Mapping[str, Any], path: Path) -> int:
    """The version of a run directory by its `status.json`; one that is newer than this program is a `UserError`."""
    return _version(status, FORMAT, "run", path)


def _version(document: Mapping[str, Any], newest: int, what: str, where: object) -> int:
    version = document.get("format", 1)
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"format is {version!r}")
    if version > newest:
        raise UserError(
            f"Expected a {what} directory of format {newest} or older, got {where} of format {version}: a newer "
            "version of Archipelago wrote it; update this one with `pip install --upgrade archipelago-fl`.",
            code="newer-format",
            format=version,
            known=newest,
        )
    return version


def upgraded_sweep(content: Mapping[str, Any], address: str) -> Document:
    """The content of `sweep.yaml` as this version writes it, without its format."""
    document = {key: value for key, value in content.items() if key != "format"}
    for each in range(_version(content, SWEEP_FORMAT, "sweep", address), SWEEP_FORMAT):
        document = SWEEP_MIGRATIONS[each](document)
    return document


def upgraded_status(status: Mapping[str, Any], path: Path) -> Document:
    """The content of `status.json` as this version writes it, without its format."""
    format_of(status, path)
    return {key: value for key, value in status.items() if key != "format"}


def upgraded_config(config: Mapping[str, Any], version: int) -> Document:
    """The settings of a run of an older version, as this version would have stored them."""
    document = dict(config)
    for each in range(version, FORMAT):
        document = MIGRATIONS[each](document)
    return document
