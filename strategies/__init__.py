"""The algorithms: one paper, one file. Imports neither Ray nor Lightning."""

from strategies import fedavg, fedprox, ifca, local  # noqa: F401  (importing a method registers it)
from strategies.base import ADDONS, METHODS, Context, Strategy, build, parse_method

__all__ = ["ADDONS", "METHODS", "Context", "Strategy", "build", "parse_method"]
