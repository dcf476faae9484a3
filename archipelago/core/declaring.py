"""How a setting is declared: a field of a dataclass, with one line about it and the values that it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any


def setting(
    default: Any,
    about: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    largest: int | None = None,
    choices: tuple[str, ...] | None = None,
    auto: bool | None = None,
    read_with: Mapping[str, Any] | None = None,
) -> Any:
    """A dataclass field with its documentation and the values it may take.

    `largest`: what is more can only be a mistake of typing, and is refused before memory or days are spent on it.
    `auto`: the platform finds the value out where none is given; users write `auto`, the config holds None.
    `read_with`: it is read only beside one of these, {setting: values} or {setting: what it must be more than}; a
    setting of the same section needs no prefix. Elsewhere it is refused (`experiments/readers.py`).

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Options:
    ...     mu: float = setting(0.1, "strength of the pull", at_least=0)
    >>> Options().mu, dataclasses.fields(Options)[0].metadata["about"]
    (0.1, 'strength of the pull')
    """
    limits = {
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "largest": largest,
        "choices": choices,
        "auto": auto,
        "read_with": read_with,
    }
    metadata = {"about": about, **{key: value for key, value in limits.items() if value is not None}}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(about: str) -> Any:
    """A dataclass field that holds settings of any name, for code that the platform does not know."""
    return field(default_factory=dict, metadata={"about": about})
