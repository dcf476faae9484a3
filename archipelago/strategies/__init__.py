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
    matching,
    prox,
    reference_clusters,
    robust,
    wecfl,
)
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.aggregation import AGGREGATION
from archipelago.strategies.base import METHODS, ClusteredModels, Context, SingleModel, Strategy
from archipelago.strategies.clustering import CLUSTERING
from archipelago.strategies.ensemble import Ensemble, assemble, build_ensemble, check_members, expand
from archipelago.strategies.method import (
    AnyMethod,
    Method,
    build,
    check_options,
    label_of,
    parse_method,
    parts_of,
)

__all__ = [
    "ADDONS",
    "AGGREGATION",
    "CLUSTERING",
    "METHODS",
    "Addon",
    "AnyMethod",
    "ClusteredModels",
    "Context",
    "Ensemble",
    "Method",
    "SingleModel",
    "Strategy",
    "assemble",
    "build",
    "build_ensemble",
    "check_members",
    "check_options",
    "expand",
    "label_of",
    "parse_method",
    "parts_of",
]
