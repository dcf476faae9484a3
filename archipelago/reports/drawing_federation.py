"""The pictures of a federation with matplotlib: what clients hold as stacked bars, under the ground-truth groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from archipelago.reports import drawing
from archipelago.reports.federation import Described, read_federation
from archipelago.reports.figures import Figure
from archipelago.reports.figures_federation import holdings, similarities
from archipelago.reports.palette import DARK, LINE, SOFT, STRIPES, many, steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawn


def draw_federation(path: str | Path, folder: str | Path | None = None) -> list[Path]:
    """`classes` and `similarity` as PNG and SVG, into `figures/` of the run or into `folder`."""
    described = read_federation(path)
    target = Path(path) / "figures" if folder is None else Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    made = []
    for name, drawn in (("classes", bars(described)), ("similarity", similarity(described))):
        for kind in drawing.FORMATS:
            made.append(target / f"partition-{name}.{kind}")
            drawing.save(drawn, made[-1])
    return made


def bars(described: Described) -> Drawn:
    """Stacked bars of classes per client (thesis, Figures A.1 to A.4)."""
    return _laid_out(drawing.draw(Figure("classes", "data", "", "", "holdings", holdings(described))))


def similarity(described: Described) -> Drawn:
    """How alike any two clients are."""
    return _laid_out(drawing.draw(Figure("similarity", "data", "", "", "heatmap", similarities(described))))


def draw_holdings(data: Mapping[str, Any]) -> Drawn:
    """Stacked bars of what clients hold, below strips of the ground-truth groups; shares of sources stand beneath."""
    strips, mixed = data["strips"], data["shares"] is not None
    figure, panels = _panels([*([0.32] * len(strips)), 4.2, *([1.1] if mixed else [])])
    axes = panels[len(strips) :]
    counts = np.asarray([series["y"] for series in data["series"]]).T
    _stack(axes[0], counts, many(counts.shape[1]))
    axes[0].set_ylabel(data["y"], color=SOFT)
    axes[0].set_ylim(0, max(1.02 * counts.sum(axis=1).max(), 1))
    _legend(figure, axes[0], data["word"], many(counts.shape[1]))
    if mixed:
        shares = np.asarray(data["shares"]).T
        _stack(axes[1], shares, steps(shares.shape[1]))
        axes[1].set_ylim(0, 1)
        axes[1].set_yticks([0, 1], ["0", "1"])
        axes[1].set_ylabel("sources", color=SOFT)
        _legend(figure, axes[1], "source", steps(shares.shape[1]))
        axes[0].tick_params(labelbottom=False)
    for panel, strip in zip(panels, strips, strict=False):
        _group_strip(panel, np.asarray(strip["groups"]), strip["name"])
    _client_axis(axes[-1], np.asarray(data["clients"]))
    return figure


# Parts of figures -------------------------------------------------------------------------------------------


def _laid_out(figure: Drawn) -> Drawn:
    """With its parts in their final places: found once, not again for every file."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _panels(heights: list[float]) -> tuple[Drawn, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(hspace=0.0, h_pad=0.02)
    figure = Figure(figsize=(12, sum(heights) + 0.9), layout=engine)
    grid = {"height_ratios": heights}
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    for each in axes:
        each.tick_params(colors=SOFT)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(LINE)
    return figure, list(axes)


def _stack(axes: Axes, counts: NDArray[Any], colours: Sequence[Any]) -> None:
    """One patch per class rather than one per bar: hundreds of clients stay quick to draw and small."""
    edges = np.arange(len(counts) + 1)
    below = np.zeros(len(counts))
    for column, colour in enumerate(colours):
        above = below + counts[:, column]
        if counts[:, column].any():
            axes.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = above
    if len(counts) <= 100:  # white lines part the bars while they are wide enough
        axes.vlines(edges[1:-1], 0, max(float(below.max()), 1) * 1.02, color="white",
                    linewidth=min(2.0, 60 / len(counts)))  # fmt: skip
    axes.set_xlim(0, len(counts))


def _legend(figure: Drawn, axes: Axes, what: str, colours: Sequence[Any]) -> None:
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    count = len(colours)
    if count <= 20:
        patches = [Patch(color=colours[k], label=str(k)) for k in range(count)]
        columns = 2 if count > 10 else 1
        small = what == "source" and count > 3
        axes.legend(
            handles=patches[::-1] if columns == 1 and not small else patches, title=what, frameon=False,
            loc="upper left", bbox_to_anchor=(1.0, 1.02), ncols=-(-count // 3) if small else columns,
            labelcolor=SOFT, title_fontsize=9, fontsize=8 if small else 9,
            handlelength=1.0, handleheight=1.0, columnspacing=0.8,
        )  # fmt: skip
        return
    from matplotlib.cm import ScalarMappable

    mapped = ScalarMappable(Normalize(0, count - 1), ListedColormap(list(colours)))
    bar = figure.colorbar(mapped, ax=axes, pad=0.01, aspect=30)
    bar.set_label(what, color=SOFT)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=SOFT)


def _blocks(groups: NDArray[Any]) -> tuple[list[int], list[float], list[str]]:
    """Where one ground-truth group ends and the next begins, the middle of each, and its name (if it fits)."""
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    middles = [(a + b) / 2 for a, b in pairwise(cuts)]
    wide = [b - a >= len(groups) / 60 for a, b in pairwise(cuts)]
    names = [str(groups[a]) if fits else "" for a, fits in zip(cuts, wide, strict=False)]
    return cuts[1:-1], middles, names


def _group_strip(axes: Axes, groups: NDArray[Any], title: str) -> None:
    """The ground-truth groups as alternating shades, with their numbers."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelbottom=False, labelleft=False)
    axes.set_yticks([])
    borders, middles, names = _blocks(groups)
    cuts = [0, *borders, len(groups)]
    for number, (start, end) in enumerate(pairwise(cuts)):
        axes.axvspan(start, end, color=STRIPES[number % 2], linewidth=0)
    for middle, name in zip(middles, names, strict=True):
        axes.text(middle, 0.5, name, ha="center", va="center", fontsize=9, color=DARK)
    axes.set_ylim(0, 1)
    axes.set_ylabel(title, rotation=0, ha="right", va="center", color=SOFT, fontsize=9)


def _client_axis(axes: Axes, shown: NDArray[Any]) -> None:
    """Client numbers below the middle of their bars, as many as fit."""
    step = max(1, -(-len(shown) // 25))
    for nice in (1, 2, 5, 10, 20, 25, 50, 100):
        if nice >= step:
            step = nice
            break
    at = np.arange(0, len(shown), step)
    axes.set_xticks(at + 0.5, [str(shown[i]) for i in at])
    axes.tick_params(axis="x", length=2)
    sorted_by = ", sorted by ground-truth group" if not np.array_equal(shown, np.sort(shown)) else ""
    axes.set_xlabel(f"client{sorted_by}", color=SOFT)
