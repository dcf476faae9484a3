"""Archipelago: experiments in clustered federated learning, on Ray actors and Lightning modules.

    import archipelago as ar

    run = ar.run(method="ifca+cam", clusters=4, data="digits", rounds=20, local={"lr": 0.05})
    sweep = ar.sweep(methods=["fedavg", "ifca"], seeds=3, data="digits")

`archipelago/api.py` says more; `archipelago.core.registry` is where methods, data sets and everything else that can be
replaced are registered.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from archipelago.api import (
        Page,
        Run,
        Sweep,
        open_run,
        open_sweep,
        partition,
        report,
        resume,
        run,
        sweep,
    )
    from archipelago.core.errors import UserError
    from archipelago.core.settings import setting
    from archipelago.data import use_arrays
    from archipelago.experiments.callbacks import Callback
    from archipelago.experiments.new_clients import NewClient, adopt

__all__ = [
    "Callback",
    "NewClient",
    "Page",
    "Run",
    "Sweep",
    "UserError",
    "adopt",
    "open_run",
    "open_sweep",
    "partition",
    "report",
    "resume",
    "run",
    "setting",
    "sweep",
    "use_arrays",
]

# Where what is not in archipelago/api.py is defined. Names are imported when they are asked for, so that help and
# mistakes are answered at once.
_HOMES = {
    "Callback": "archipelago.experiments.callbacks",
    "NewClient": "archipelago.experiments.new_clients",
    "UserError": "archipelago.core.errors",
    "adopt": "archipelago.experiments.new_clients",
    "setting": "archipelago.core.settings",
    "use_arrays": "archipelago.data",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from archipelago.core.program import version

        return version()
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, "archipelago.api")), name)
    raise AttributeError(f"module 'archipelago' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
