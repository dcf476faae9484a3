"""Callbacks: the round loop emits, everything else listens.

    class Printer(archipelago.Callback):
        def on_round(self, run, report):
            print(report.round, report.metrics.get("micro_accuracy"))

    run_experiment(config, callbacks=[Printer()])                  # an instance, in Python
    archipelago callbacks=[early_stopping,my_package.Printer]      # names and import paths, anywhere

`base.py` has the hooks and their order, `platform_callbacks.py` the platform's own listeners.
"""

from __future__ import annotations

from archipelago.experiments.callbacks.base import CALLBACKS, Callback, CallbackFailure, LiveRun
from archipelago.experiments.callbacks.early_stopping import EarlyStopping

__all__ = ["CALLBACKS", "Callback", "CallbackFailure", "EarlyStopping", "LiveRun"]
