"""Everything there is to run, for tests that hold for every method."""

from __future__ import annotations

from archipelago.core.errors import UserError
from archipelago.strategies import ADDONS, METHODS, parse_method


def compositions() -> list[str]:
    """Every method, and every add-on with the first base that takes it."""
    found = sorted(METHODS)
    for addon in sorted(ADDONS):
        for base in ("ifca", "fesem", "fedavg", *sorted(METHODS)):
            try:
                parse_method(f"{base}+{addon}")
            except UserError:
                continue
            found.append(f"{base}+{addon}")
            break
    # A warm-up of private models that are forgotten at its end, and two add-ons that share the model's parts.
    return [*found, "fesem+cam", "wecfl+con+prox"]
