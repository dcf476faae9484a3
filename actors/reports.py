"""What one finished round says about itself, on its way from the server to the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Metric = float | int | list[Any] | None


@dataclass(frozen=True)
class RoundReport:
    """One round: what was measured, who sits where, how long it took, what happened.

    `metrics` and `clients` hold deterministic values only: equal runs write equal bytes. Seconds go to
    `timings`, and whatever a person should know (a dropped client, a lost actor) to `events`.
    """

    round: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    clients: Mapping[str, npt.NDArray[Any]] | None = None  # aligned columns, one of them "client"
    assignment: npt.NDArray[np.integer[Any]] | None = None  # cluster of client 0, 1, ...; -1 is unknown
    # Seconds by stage, "round" the whole; `share_...`: the share of a stage's work that was done.
    timings: Mapping[str, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    records: Mapping[str, Mapping[str, npt.NDArray[Any]]] = field(default_factory=dict)  # tables for figures
    engines: frozenset[str] = frozenset()  # that trained since these actors began
