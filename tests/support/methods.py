"""Everything there is to run, for tests that hold for every method."""

from __future__ import annotations

from typing import Any

import pytest

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


# Their own files test layouts, restores and engines by default; the whole matrix of them is for `make check-all`.
BY_THEIR_OWN_TESTS = frozenset({
    "fedbn", "fednova", "fedrep", "moon", "perfedavg", "pfedme",
    # test_clustered_layouts.py
    "fedclust", "fedgroup", "fedgwc", "fedrc", "flhc", "flux", "ifca+rr_cluster", "pacfl", "stocfl",
})  # fmt: skip


def matrix() -> list[Any]:
    """`method=NAME` of `compositions`, as parameters of tests that take long."""
    return [
        pytest.param(f"method={name}", marks=[pytest.mark.full] if name in BY_THEIR_OWN_TESTS else [])
        for name in compositions()
    ]
