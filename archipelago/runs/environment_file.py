"""`environment.json` of a run: what it ran on, each process that resumed it included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipelago.core.files import write_whole
from archipelago.runs.environment import environment_differences
from archipelago.runs.written import as_json


class EnvironmentFile:
    """The file, as the process that writes the run sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._only_expected = False  # what it says of this process is not known yet

    def expects(self, compute: Mapping[str, Any]) -> None:
        """Say on what a new run is going to compute, until `computed` knows what did the work."""
        whole = self._content()
        if not whole.get("resumed") and "compute" not in whole:
            whole["compute"] = dict(compute)
            write_whole(self.path, as_json(whole))
            self._only_expected = True

    def computed(self, compute: Mapping[str, Any]) -> str | None:
        """Say on what this process's part was computed; a sentence if that is something else than before."""
        whole = self._content()
        parts = [whole, *whole.get("resumed", [])]
        known = [] if self._only_expected else [part["compute"] for part in parts if "compute" in part]
        before = known[-1] if known else compute
        self._only_expected = False
        parts[-1]["compute"] = dict(compute)
        write_whole(self.path, as_json(whole))
        if _arithmetic(before) == _arithmetic(compute):
            return None
        return (
            f"Computes on {compute['sentence']} from here on; before, on {before['sentence']}: "
            "results may differ in the last bits."
        )

    def resumed(self, environment: Mapping[str, Any]) -> list[str]:
        """Add the environment of another process; sentences about what differs from the first one's."""
        try:
            first = self._content()
        except (OSError, ValueError):
            first, warnings = {}, [f"{self.path.name} was damaged or missing and was written anew."]
        else:
            warnings = list(environment_differences(first, environment))
        first["resumed"] = [*first.get("resumed", []), dict(environment)]
        write_whole(self.path, as_json(first))
        return warnings

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return content


def _arithmetic(compute: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of it may move a bit."""
    return (sorted(compute["devices"]), *(compute[key] for key in ("engine", "precision", "determinism")))
