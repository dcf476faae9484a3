"""The version of the layout of a run directory, and how an older one is read.

`status.json` says `format`; directories from before have none and are version 1. What is read of an older run is
upgraded in memory, one version after the other; the files on disk stay as they are. To change the format: raise
`FORMAT`, and add what makes the version before like the new one to `MIGRATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError

FORMAT = 3

Document = dict[str, Any]


def _settings_of_listeners(config: Document) -> Document:
    """Version 2 has plug-ins, callbacks and loggers; before, there were none."""
    return {"plugins": [], "callbacks": [], "loggers": [], **config}


def _as_it_is(config: Document) -> Document:
    """Version 3 has an identity (`identity.py`); a run from before has none, and its config is the same."""
    return config


# {version: what makes a config of this version one of the next}
MIGRATIONS: dict[int, Callable[[Document], Document]] = {1: _settings_of_listeners, 2: _as_it_is}


def format_of(status: Mapping[str, Any], path: Path) -> int:
    """The version of a run directory by its `status.json`; one that is newer than this program is a `UserError`."""
    version = status.get("format", 1)
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"format is {version!r}")
    if version > FORMAT:
        raise UserError(
            f"Expected a run directory of format {FORMAT} or older, got {path} of format {version}: a newer version of "
            "Archipelago wrote it; update this one with `pip install --upgrade archipelago-fl`."
        )
    return version


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
