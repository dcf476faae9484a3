"""The algorithms: one paper, one file. Imports neither Ray nor Lightning."""

from archipelago.core.plugins import import_all_of
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.aggregation import AGGREGATION
from archipelago.strategies.base import METHODS, ClusteredModels, Context, SingleModel, Strategy
from archipelago.strategies.clustering import CLUSTERING
from archipelago.strategies.descriptors import DESCRIPTORS
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

import_all_of(__name__, __path__)  # a file in this folder registers what it defines: nothing lists it

__all__ = [
    "ADDONS",
    "AGGREGATION",
    "CLUSTERING",
    "DESCRIPTORS",
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
