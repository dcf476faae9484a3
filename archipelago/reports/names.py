"""Settings in few words, for labels. What methods and metrics are called is `archipelago.core.vocabulary`."""

from __future__ import annotations

from typing import Any


def setting_text(key: str, value: Any) -> str:
    """`name=value` without the section, as short as it can be said.

    >>> setting_text("local.lr", 0.1), setting_text("model.hidden", [64, 32]), setting_text("local.lr", 0.34423005968)
    ('lr=0.1', 'hidden=64,32', 'lr=0.34423')
    >>> setting_text("aggregation.name", "matched")  # as it is written on the command line
    'aggregation=matched'
    """
    return f"{key.removesuffix('.name').rpartition('.')[2]}={value_text(value)}"


def value_text(value: Any) -> str:
    """A setting's value as a label shows it."""
    shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"
    if isinstance(value, float) and len(shown) > 8:  # drawn: as the sweep calls it
        shown = f"{value:.6g}"
    return shown
