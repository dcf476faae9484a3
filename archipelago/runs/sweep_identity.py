"""What a sweep was asked for when it was made, so that an edited `sweep.yaml` is noticed.

Trials of a sweep that was edited between two processes would be of two experiments under one name: those that are
over of the first, the others of the second. `identity.json` beside `sweep.yaml` holds what counts of it. Sweeps from
before have none; the trials that began still refuse other settings than their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.runs.files import read_yaml
from archipelago.runs.identity import first_difference
from archipelago.runs.storage import join, read_text, write_text

FILE = "identity.json"

# Of the section `sweep`: how its trials are executed and shown, which may differ between two processes of one sweep.
_ELSEWHERE = ("fleet", "concurrent", "table")


def write_identity(address: str, text: str) -> None:
    """Write down what a new sweep is asked for; `text` is its `sweep.yaml`."""
    content = _asked(text, join(address, "sweep.yaml"))
    write_text(join(address, FILE), json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def is_identity(text: str | None) -> bool:
    """Whether this text, if there is one, is what `write_identity` writes."""
    if text is None:
        return True
    try:
        content = json.loads(text)
        return isinstance(content["settings"], dict) and isinstance(content["sweep"], dict)
    except (ValueError, KeyError, TypeError):
        return False


def check_sweep_identity(address: str) -> None:
    """A `UserError` that names the first setting of `sweep.yaml` that was changed since the sweep was made."""
    written, text = read_text(join(address, FILE)), read_text(join(address, "sweep.yaml"))
    if written is None or text is None:
        return
    if not is_identity(written):
        raise UserError(
            f"{join(address, FILE)} is damaged: restore it, or remove it if sweep.yaml is as it was; the runs of the "
            "trials are whole.",
            code="damaged", file=join(address, FILE),
        )  # fmt: skip
    known = json.loads(written)
    now = _asked(text, join(address, "sweep.yaml"))
    other = first_difference(known["settings"], now["settings"])
    if other is None and (of_sweep := first_difference({"sweep": known["sweep"]}, {"sweep": now["sweep"]})):
        other = of_sweep
    if other is not None:
        raise UserError(
            f"Expected {join(address, 'sweep.yaml')} as it was when the sweep was made, got another one: {other}. Set "
            "it back, or start a sweep of its own with name=...",
            code="other-config",
            path=address,
        )


def _asked(text: str, source: str) -> dict[str, dict[str, Any]]:
    """The part of a `sweep.yaml` that the results depend on."""
    content = read_yaml(text, Path(source))
    document: Mapping[str, Any] = content if isinstance(content, dict) else {}
    asked = document.get("sweep") or {}
    return {
        "settings": dict(document.get("settings") or {}),
        "sweep": {key: value for key, value in asked.items() if key not in _ELSEWHERE},
    }
