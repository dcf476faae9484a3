"""Named things with one line of explanation each, and errors that name the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from archipelago.core.errors import UserError

T = TypeVar("T")


def nearest(given: object, choices: Iterable[str]) -> str:
    """A sentence that lists the choices and points at the closest one.

    >>> nearest("fedavgg", ["fedavg", "ifca"])
    "Did you mean 'fedavg'? Choices: fedavg, ifca."
    """
    names = sorted(choices)
    close = difflib.get_close_matches(str(given).lower(), names, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Choices: {', '.join(names)}."


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing."""

    name: str
    about: str
    value: T


class Registry(Mapping[str, Entry[T]]):
    """A mapping from name to `Entry`; `registry.find(name)` answers a wrong name with a sentence."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, about: str) -> Callable[[T], T]:
        """Decorator: put a function or class in the registry under `name`."""

        def add(value: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = Entry(name, about, value)
            return value

        return add

    def remove(self, name: str) -> None:
        """Forget `name`, if it is there."""
        self._entries.pop(name, None)

    def find(self, name: str) -> T:
        """The thing registered as `name`, or a `UserError` that says what there is."""
        if name not in self._entries:
            raise UserError(f"Unknown {self.kind} '{name}'. {nearest(name, self._entries)}")
        return self._entries[name].value

    def __getitem__(self, name: str) -> Entry[T]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
