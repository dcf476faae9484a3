"""Archipelago: experiments in clustered federated learning, on Ray actors and Lightning modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from archipelago.experiments.callbacks import Callback
    from archipelago.experiments.new_clients import NewClient, adopt
    from archipelago.runs.reader import open_run

__all__ = ["Callback", "NewClient", "adopt", "open_run"]

# Where each name is defined: imported when it is asked for, so that help and mistakes are answered at once.
_HOMES = {
    "Callback": "archipelago.experiments.callbacks",
    "NewClient": "archipelago.experiments.new_clients",
    "adopt": "archipelago.experiments.new_clients",
    "open_run": "archipelago.runs.reader",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'archipelago' has no attribute '{name}'")
