"""The colours of all figures, of reports, documents and benchmarks: a cluster, class or method has the same ones."""

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
INK, SOFT, DARK = "#222222", "#5f6368", "#3c4043"  # lines and words beside the data, on white and on stripes
LINE, STRIPES = "#c4c7c5", ("#eceff1", "#dadce0")
ACCENT, GREY = "#2a63c4", "#8a94a3"  # one curve, and what it is compared with
# (surface, words) of verdicts, which readers who do not see red and green tell apart by lightness.
VERDICTS = {
    "green": ("#cdebd0", "#1c3d22"),
    "amber": ("#ffd166", "#3d2e00"),
    "red": ("#d1495b", "#ffffff"),
    "none": ("#f1f1f1", "#9a9a9a"),
}
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
