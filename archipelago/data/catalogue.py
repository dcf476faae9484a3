"""What `launch data list` and `launch data fetch` say and do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from archipelago.core.errors import UserError
from archipelago.core.settings import DataSettings
from archipelago.data.arrays import find_kept
from archipelago.data.datasets import DATASETS
from archipelago.data.files import size_of
from archipelago.data.kept import kept_names

Row = tuple[str, str, str, str]


def listing(settings: DataSettings, *, sizes: bool = True) -> list[Row]:
    """(name, present or missing, size, where or what it is) of every data set."""
    for name in kept_names():
        find_kept(name)
    return [_row(name, settings, sizes) for name in DATASETS]


def _row(name: str, settings: DataSettings, sizes: bool) -> Row:
    source = DATASETS.find(name)
    where = source.present(settings)
    if where is None:
        how = "data fetch gets it" if source.fetch is not None else "bring your own"
        return name, "missing", "", f"{DATASETS[name].about} ({how})"
    files = source.files(settings) if source.files is not None and sizes else []
    return name, "present", _readable(size_of(files)) if files else "", where


def _readable(size: int) -> str:
    """Bytes in a unit that reads well.

    >>> _readable(559580), _readable(30_878_551)
    ('560 kB', '30.9 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def fetch_dataset(name: str, settings: DataSettings) -> str:
    """Fetch a data set if it is not there yet; returns a sentence about where it is."""
    source = DATASETS.find(name)
    settings = replace(settings, name=name)
    where = source.present(settings)
    if where is not None:
        return f"{name} is here already: {where}"
    if source.fetch is None:
        source(settings, 0)  # says how to get it
        raise UserError(f"Data set '{name}' cannot be fetched.", code="cannot-be-fetched", name=name)
    root: Path = source.fetch(settings)
    return f"{name} is in {source.present(settings) or root}"
