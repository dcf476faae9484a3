"""Figures as plain data: drawn twice from the same numbers, by the page (plotly) and as files (matplotlib).

`kind` says how `data` is drawn:

| kind    | data |
|---------|------|
| lines   | `x`, `y` titles; `series` of name, x, y, low, high (or None), marks (x of vertical lines), color, dash |
| stack   | `x`, `y` titles; `at` (positions or names); `series` of name, y, color; `bars` or areas |
| bars    | `y` title; `names`, `values`, `errors`, `published`, `colors`; `range` of the axis |
| spread  | `y` title; `series` of name, values, color |
| flow    | `columns`; `nodes` of column, name, size, color; `links` of source, target, count |
| scatter | `panels` of title, x, y, client, color, symbol; `colors` and `symbols` are their names |
| heatmap | `z`; `x`, `y` labels; `edges` between blocks; `title` of the scale; `names` if values are categories; |
|         | for some: fixed `range` of the scale; `blocks` (at, name) to be named at the edge; |
|         | `cuts` (column, row): lines beneath a cell, in its column alone |
| holdings | a stack of bars by client, with `strips` of ground-truth groups and `shares` of sources for files   |
| images  | `rows` of name, about, image (PNG as base64), width, height |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import Registry

SECTIONS = {
    "results": "Results",
    "clients": "Clients",
    "clusters": "Clusters",
    "inside": "Inside the method",
    "cost": "Cost",
    "data": "The federation",
}


FEW = 4  # runs on a page that can show everything


@dataclass(frozen=True)
class Figure:
    """One picture. Figures of one `family` share a place on the page, where `choice` says which of them is shown."""

    family: str
    section: str
    title: str
    caption: str
    kind: str
    data: Mapping[str, Any]
    choice: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What its files are called."""
        return "-".join([self.family, *(slug(value) for value in self.choice.values())])


Maker = Callable[..., list[Figure]]


class FigureRegistry(Registry[Maker]):
    """The figures that there are, in their order on the page.

    A maker of one run (`of="run"`) is a function of a `RunFiles` and of how many runs share the page, one of a
    comparison (`of="problem"`) of a `Problem`; both return what the files can show, which may be nothing.
    `families` are those of the figures it returns, `wide` the ones that take the page's whole width.
    """

    def register(  # type: ignore[override]  # of a figure, capabilities are known
        self,
        name: str,
        about: str = "",
        *,
        label: str = "",
        of: str = "run",
        families: Sequence[str] = (),
        wide: Sequence[str] = (),
    ) -> Callable[[Maker], Maker]:
        """Decorator: a function that makes figures."""
        return super().register(
            name, about, label=label, of=of, families=tuple(families) or (name,), wide=tuple(wide)
        )

    def of(self, what: str) -> dict[str, Maker]:
        """The makers of one run, or of a comparison, by name."""
        return {name: entry.value for name, entry in self.items() if entry.capabilities["of"] == what}

    def families(self) -> list[str]:
        """All families, in the order of the page."""
        return [family for entry in self.values() for family in entry.capabilities["families"]]

    def wide(self) -> set[str]:
        """The families that take the whole width."""
        return {family for entry in self.values() for family in entry.capabilities["wide"]}


FIGURES = FigureRegistry("figure")


def slug(text: str) -> str:
    """
    >>> slug("FeSEM+CAM (K = 4), seed 0")
    'fesem-cam-k-4-seed-0'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def without_lone_choices(figures: Sequence[Figure]) -> list[Figure]:
    """A choice of one thing is none: it is dropped, and so is its part of the file name."""
    offered: dict[tuple[str, str], set[str]] = {}
    for figure in figures:
        for key, value in figure.choice.items():
            offered.setdefault((figure.family, key), set()).add(value)
    return [
        Figure(f.family, f.section, f.title, f.caption, f.kind, f.data,
               {key: value for key, value in f.choice.items() if len(offered[f.family, key]) > 1})
        for f in figures
    ]  # fmt: skip


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Plain numbers for JSON; what is not finite is None."""
    return [float(value) if value is not None and np.isfinite(value) else None for value in values]


def short(values: Iterable[Any]) -> list[float | None]:
    """The same to six digits, for what is only looked at: bands, and curves beside the headline's."""
    return [None if value is None else float(f"{value:.6g}") for value in numbers(values)]


def evenly(values: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """At most `most` of the values, the first and the last among them.

    >>> evenly(np.arange(10), 4).tolist(), evenly(np.arange(3), 4).tolist()
    ([0, 3, 6, 9], [0, 1, 2])
    """
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).astype(int)]


def chosen_of(shown: int, every: int) -> str:
    """What a caption says of clients that were left out; empty if none was.

    >>> chosen_of(400, 1000), chosen_of(5, 5)
    (' 400 of 1,000 clients, evenly chosen.', '')
    """
    return f" {shown:,} of {every:,} clients, evenly chosen." if shown < every else ""


def spaced(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, the first and the last among them, denser at the start.

    >>> spaced(range(1, 101), 5), spaced([3, 4], 5)
    ([1, 3, 10, 32, 100], [3, 4])
    """
    if len(values) <= most:
        return list(values)
    places = np.geomspace(1, len(values), most).round().astype(int) - 1
    return [values[place] for place in sorted(set(places.tolist()))]
