"""Loggers: any Lightning logger listens to a run, by name or import path (`loggers=[tensorboard,mlflow]`).

One file per logger that has a name. Another one is a class or function that returns a
`lightning.pytorch.loggers.Logger`, registered in `LOGGERS` or named by import path. It is called with those of
these arguments that it has parameters for:

    save_dir   a folder in the run directory, called as the logger
    name       the run's name           version   what an earlier process of this run had as `version`, else None
    group      the sweep's name, or None          options   the settings section of its name (its `Options`)
    run        the `LiveRun`

Every number of a round is logged with the round as its step, settings as hyper-parameters. A logger that fails is a
warning in the run's events and on the terminal, and is left alone from then on: it never stops a run. What it missed is
logged when the run is resumed.

Capabilities that an entry may declare: `needs` (a package, with the extra that brings it), `artifact(logger, path)`
(takes files: the report), `close(logger)` (after `finalize`), `starts_over` (its files are written anew by every
process, earlier rounds included), `keeps_rounds` (its files of earlier rounds are there already), `files` (a regular
expression: names of the files that it writes into `save_dir`). Without `files`, what it wrote counts as somebody
else's: it is never deleted, and stays behind when a trial of a sweep begins with the rounds of another one.
"""

from __future__ import annotations

from archipelago.core.plugins import import_all_of
from archipelago.experiments.loggers.base import LOGGERS, LoggerCallback, check_loggers, loggers_from

import_all_of(__name__, __path__)  # a logger registers itself: nothing lists it

__all__ = ["LOGGERS", "LoggerCallback", "check_loggers", "loggers_from"]
