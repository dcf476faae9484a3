"""The algorithms: one paper, one file. Imports neither Ray nor Lightning."""

from archipelago.strategies import (  # noqa: F401  (importing a method registers it)
    cam,
    cfl,
    cks,
    con,
    ditto,
    fedavg,
    feddane,
    feddist,
    fedem,
    fedper,
    fedprox,
    fedsgd,
    fedsoft,
    femam,
    fesem,
    finetune,
    ifca,
    local,
    prox,
    reference_clusters,
    robust,
    wecfl,
)
from archipelago.strategies.base import ADDONS, METHODS, Context, Strategy, build, parse_method
from archipelago.strategies.ensemble import build_ensemble, check_members, expand

__all__ = [
    "ADDONS",
    "METHODS",
    "Context",
    "Strategy",
    "build",
    "build_ensemble",
    "check_members",
    "expand",
    "parse_method",
]
