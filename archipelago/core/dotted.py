"""Nested settings by dotted key, as the command line writes them: the one flat form that settings have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dotted(tree: Mapping[str, Any], *, keep_empty: bool = False) -> dict[str, Any]:
    """
    >>> dotted({"rounds": 5, "local": {"lr": 0.1, "trainer": {}}})
    {'rounds': 5, 'local.lr': 0.1}
    >>> dotted({"local": {"trainer": {}}}, keep_empty=True)
    {'local.trainer': {}}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            found[str(key)] = value
        elif value:
            found |= {f"{key}.{name}": item for name, item in dotted(value, keep_empty=keep_empty).items()}
        elif keep_empty:
            found[str(key)] = value
    return found
