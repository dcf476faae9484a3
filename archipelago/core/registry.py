"""What a researcher may choose or replace: named entries of every kind, the platform's own and anybody's.

    method, add-on, aggregation rule, clustering rule, data set, partition, network, metric, engine,
    sampler, scheduler, callback, logger

An entry declares whatever the platform must know about it, where it is defined: its name, one line about it, its
label in tables, its options (a dataclass of `setting` fields) and its capabilities. No other file names it.

    @METHODS.register("mine", "what it is, in one line", label="Mine")
    class Mine(Strategy): ...

An import path (`package.module.Thing`) is as good as a name: it is imported and registered when it is looked up.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from archipelago.core.errors import UserError

T = TypeVar("T")
O = TypeVar("O")  # noqa: E741  (a dataclass of options)

REGISTRIES: dict[str, Registry[Any]] = {}  # by kind; a registry is here once its module is imported

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def nearest(given: object, choices: Iterable[str]) -> str:
    """A sentence that lists the choices and points at the closest one.

    >>> nearest("fedavgg", ["fedavg", "ifca"])
    "Did you mean 'fedavg'? Choices: fedavg, ifca."
    """
    names = sorted(choices)
    close = closest(given, names)
    hint = f"Did you mean '{close}'? " if close else ""
    return f"{hint}Choices: {', '.join(names)}."


def closest(given: object, choices: Iterable[str]) -> str | None:
    """The choice that somebody may have meant.

    >>> closest("fedavgg", ["fedavg", "ifca"]), closest("zzz", ["fedavg"])
    ('fedavg', None)
    """
    return next(iter(difflib.get_close_matches(str(given).lower(), sorted(choices), n=1, cutoff=0.5)), None)


@dataclass(frozen=True)
class NoOptions:
    """An entry without options of its own."""


def read_options(kind: type[O], settings: Any) -> O:
    """Options of a kind with the values that `settings` (any object with fields of these names) has for them."""
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]  # options are dataclasses
    return kind(**{name: getattr(settings, name) for name in names if hasattr(settings, name)})


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing and what it declares."""

    name: str
    about: str
    value: T
    label: str  # in tables and figures
    options: type = NoOptions  # a dataclass of `setting` fields
    capabilities: Mapping[str, Any] = field(default_factory=dict)

    @property
    def section(self) -> str:
        """The settings section of its options, where its kind has no section in common.

        >>> Entry("my_package.methods.Mine", "", object, "Mine").section
        'Mine'
        """
        return self.name.rpartition(".")[2]

    def options_from(self, settings: Any) -> Any:
        """Its options with the values that `settings` (any object with fields of these names) has for them."""
        return read_options(self.options, settings)


class Registry(Mapping[str, Entry[T]]):
    """A mapping from name to `Entry`; `find` and `entry` answer a wrong name with a sentence.

    `section` is the settings section that the options of its entries belong to (`data` for data sets); without
    one, every entry with options has a section of its own name (methods). `base` is what an entry must be a
    subclass of, where entries are classes.
    """

    def __init__(self, kind: str, *, section: str | None = None, base: type | None = None) -> None:
        self.kind, self.section, self.base = kind, section, base
        self._entries: dict[str, Entry[T]] = {}
        self.paths: dict[str, str] = {}  # import path of an entry that registered itself -> its name
        REGISTRIES[kind] = self

    def register(
        self, name: str, about: str = "", *, label: str = "", options: type | None = None, **capabilities: Any
    ) -> Callable[[T], T]:
        """Decorator: put a function or class in the registry under `name`.

        A class may declare its options as its attribute `Options` instead.
        """

        def add(value: T) -> T:
            if not callable(value) and not dataclasses.is_dataclass(value):
                raise TypeError(f"expected a class or function to be {self.kind} {name!r}, got {value!r}")
            known = self._entries.get(name)
            if known is not None and _origin(known.value) != _origin(value):
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice: by {_origin(known.value)} and by {_origin(value)}"
                )
            of_class: type = getattr(value, "Options", NoOptions)
            self._entries[name] = Entry(
                name, about, value, label or _label(name), options or of_class, capabilities
            )
            return value

        return add

    def remove(self, name: str) -> None:
        """Forget `name`, if it is there, and the import paths that lead to it."""
        self._entries.pop(name, None)
        self.paths = {path: known for path, known in self.paths.items() if known != name}

    def entry(self, name: str) -> Entry[T]:
        """The entry called `name`, or at that import path; a `UserError` that says what there is, otherwise."""
        if name not in self._entries and name not in self.paths and IMPORT_PATH.fullmatch(name):
            self._import(name)
        known = self.paths.get(name, name)
        if known not in self._entries:
            raise UserError(
                f"Unknown {self.kind} '{name}'. {nearest(name, self._entries)}",
                code="unknown-name", kind=self.kind, name=name, nearest=closest(name, self._entries),
            )  # fmt: skip
        return self._entries[known]

    def entry_in(self, setting: str, name: str) -> Entry[T]:
        """The entry that a list of names in a setting means; a sentence about it names the setting."""
        try:
            return self.entry(name)
        except UserError as error:
            sentence = f"Expected {setting} to list what can be found, got '{name}': {error}"
            raise error.rephrased(sentence) from error

    def listed(self, names: Iterable[str], setting: str) -> list[Entry[T]]:
        """The entries that a list of names stands for; a wrong name is a sentence that says where it was given."""
        return [self.entry_in(setting, name) for name in names]

    def find(self, name: str) -> T:
        """The thing registered as `name`, or a `UserError` that says what there is."""
        return self.entry(name).value

    def _import(self, path: str) -> None:
        """Make an import path a name of this registry: of the entry that it registered itself as, or a new one."""
        from archipelago.core.plugins import import_object

        found = import_object(path, f"a {self.kind}")
        fits = (
            isinstance(found, type) and issubclass(found, self.base)
            if self.base is not None
            else callable(found)
        )
        if not fits:
            wanted = f"a subclass of {self.base.__name__}" if self.base is not None else "a function or class"
            raise UserError(
                f"Expected {self.kind} '{path}' to be {wanted}, got {found!r}: name another one.",
                code="wrong-kind", kind=self.kind, name=path,
            )  # fmt: skip
        for entry in list(self._entries.values()):
            if getattr(entry.value, "origin", entry.value) is found:
                self.paths[path] = entry.name
                return
        summary = (found.__doc__ or "").strip().splitlines()
        self.adopt(path, summary[0] if summary else "", found)

    def adopt(self, path: str, about: str, found: Any) -> None:
        """Register what stands at an import path and has not registered itself; registries of records make one."""
        self.register(path, about)(found)

    def __getitem__(self, name: str) -> Entry[T]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> ValuesView[Entry[T]]:
        """All entries; asked for often, and a mapping's own answer looks each of them up."""
        return self._entries.values()


def _origin(value: Any) -> str:
    """Where a thing is defined; equal for the old and the new one when a module is imported again."""
    value = getattr(value, "origin", value)  # a record around a function may name it
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', value)}"


def _label(name: str) -> str:
    """
    >>> _label("my_package.methods.Mine"), _label("mine")
    ('Mine', 'mine')
    """
    return name.rpartition(".")[2]
