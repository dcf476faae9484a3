"""The colours of all figures: drawn by matplotlib or by the page, a cluster, class or method has the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

# Ten colours that differ in lightness too.
PALETTE = (
    "#3b7dd8",
    "#e07b2a",
    "#2f9e6e",
    "#c2478b",
    "#8468d0",
    "#a8861a",
    "#1d9fb0",
    "#cf4a4a",
    "#6f8296",
    "#7f9f2f",
)
NONE = "#9aa3af"  # what belongs to no cluster
SCALE = ((0.0, "#f3ecdf"), (0.35, "#9ccfc9"), (0.7, "#3f86b5"), (1.0, "#1f2f6b"))  # from little to much
INK, SOFT = "#222222", "#5f6368"  # lines and words beside the data, on white
LINE, STRIPES = "#c4c7c5", ("#eceff1", "#dadce0")
FAINT = 0.55  # opacity of the second ten


def for_page() -> dict[str, Any]:
    """What `page.js` draws with."""
    return {"palette": PALETTE, "none": NONE, "scale": SCALE, "faint": FAINT}


def color(at: int) -> str:
    """
    >>> color(0) == color(10), color(-1)
    (True, '#9aa3af')
    """
    return NONE if at < 0 else PALETTE[at % len(PALETTE)]


def scale() -> Colormap:
    """The scale as matplotlib's colour map."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("archipelago", list(SCALE))


def many(count: int) -> Sequence[Any]:
    """Colours of that many classes: the palette, once more but fainter, and beyond twenty steps of the scale."""
    if count <= 2 * len(PALETTE):
        return [(color(k), 1.0 if k < len(PALETTE) else FAINT) for k in range(count)]
    return steps(count)


def steps(count: int) -> Sequence[Any]:
    """Evenly spaced colours of the scale, without its palest end."""
    mapped = scale()
    return [mapped(0.15 + 0.85 * k / max(count - 1, 1)) for k in range(count)]
