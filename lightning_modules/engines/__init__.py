"""Engines of local training: one job per client in, one result per client out.

- `loop`: the module's own step and optimizer, no Trainer. The default on CPU.
- `compiled`: kernels in C for small networks on CPU; a network it does not cover runs in `loop`.
- `stacked`: all clients of a device as one batched model. The default on GPU.
- `trainer`: a real `lightning.Trainer`, for its callbacks, precision plugins and strategies.

Each is a file of its own here. An engine of your own is a subclass of `Engine` anywhere, chosen by its import path
(`my_module.MyEngine`) or by a name under `@ENGINES.register`; `lightning_modules/engines/base.py` has the contract.
Nothing here imports Lightning before a Trainer is asked for: the settings' schema imports these modules.
"""

from archipelago.core.plugins import import_all_of
from lightning_modules.engines.base import (
    ENGINES,
    Engine,
    check_precision,
    default_engine,
    engine_entry,
    make_engine,
)
from lightning_modules.engines.objective import Term, TrainJob, TrainResult

import_all_of(__name__, __path__)  # an engine registers itself: nothing lists it

__all__ = [
    "ENGINES",
    "Engine",
    "Term",
    "TrainJob",
    "TrainResult",
    "check_precision",
    "default_engine",
    "engine_entry",
    "make_engine",
]
