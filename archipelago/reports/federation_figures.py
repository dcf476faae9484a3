"""The pictures of a federation: classes per client as stacked bars, and how alike any two clients are.

Drawn with matplotlib's file canvases, so that no screen is needed and nobody's plotting state is touched.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.files import whole_file
from archipelago.reports.federation import SHOWN, Described, alikeness, divergence, read_federation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#5f6368"
FORMATS = ("png", "svg")


def draw_federation(path: str | Path, folder: str | Path | None = None) -> list[Path]:
    """`classes` and `similarity` as PNG and SVG, into `figures/` of the run or into `folder`."""
    described = read_federation(path)
    target = Path(path) / "figures" if folder is None else Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    made = []
    for name, figure in (("classes", bars(described)), ("similarity", similarity(described))):
        for kind in FORMATS:
            made.append(target / f"partition-{name}.{kind}")
            save(figure, made[-1])
    return made


def save(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all; equal figures give equal bytes."""
    from matplotlib import rc_context

    kind = path.suffix[1:]
    nothing = {"Date": None} if kind == "svg" else {"Software": None}
    with (
        rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}),
        whole_file(path, durable=False) as file,
    ):
        figure.savefig(file, format=kind, dpi=160, metadata=nothing, facecolor="white")


def bars(described: Described) -> Figure:
    """Stacked bars of classes per client (thesis, Figures A.1 to A.4), with a strip of the planted groups.

    Where samples come from several sources, their shares stand below.
    """
    shown = _shown(described)
    mixed = described.facts["sources"] > 1 and described.facts["classes"] is not None
    strips = described.planted
    figure, panels = _panels([*([0.32] * len(strips)), 4.2, *([1.1] if mixed else [])])
    axes = panels[len(strips) :]
    by = "label" if described.facts["classes"] is not None else "source"
    counts = described.table(by=by)[shown]
    _stack(axes[0], counts, _colours(counts.shape[1]))
    axes[0].set_ylabel("training samples", color=GREY)
    axes[0].set_ylim(0, max(1.02 * counts.sum(axis=1).max(), 1))
    _legend(figure, axes[0], counts.shape[1], "class" if by == "label" else "source")
    if mixed:
        shares = described.table(by="source")[shown]
        shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1)
        _stack(axes[1], shares, _source_colours(shares.shape[1]))
        axes[1].set_ylim(0, 1)
        axes[1].set_yticks([0, 1], ["0", "1"])
        axes[1].set_ylabel("sources", color=GREY)
        _legend(figure, axes[1], shares.shape[1], "source", _source_colours(shares.shape[1]))
        axes[0].tick_params(labelbottom=False)
    for number, (panel, column) in enumerate(zip(panels, strips, strict=False)):
        name = "group" if len(strips) == 1 else f"level {number + 1}"
        _group_strip(panel, described.clients[column][shown], name)
    _client_axis(axes[-1], shown)
    _title(figure, described, _bars_title(described, len(shown)))
    return _laid_out(figure)


def similarity(described: Described) -> Figure:
    """How alike any two clients are: one minus the total variation distance of what they hold."""
    from matplotlib.figure import Figure

    shown, alike, compared = alikeness(described)
    figure = Figure(figsize=(7.4, 6.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(alike, vmin=0, vmax=1, cmap="viridis", interpolation="nearest",
                        extent=(0, len(shown), len(shown), 0))  # fmt: skip
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label(
        f"similarity of {' and '.join(compared) or 'samples'}: 1 alike, 0 nothing in common", color=GREY
    )
    bar.outline.set_visible(False)
    planted = [_blocks(described.clients[column][shown]) for column in described.planted]
    for border in planted[-1][0] if planted else ():
        axes.axhline(border, color="white", linewidth=0.8)
        axes.axvline(border, color="white", linewidth=0.8)
    if planted:
        _, middles, names = planted[-1]
        axes.set_xticks(middles, names)
        axes.set_yticks(middles, names)
    what = "clients, by planted group" if planted else "client"
    axes.set_xlabel(what, color=GREY)
    axes.set_ylabel(what, color=GREY)
    axes.tick_params(length=0, colors=GREY)
    axes.spines[:].set_visible(False)
    _title(figure, described, _similarity_title(described, "kind" if "sources" in compared else "label"))
    return _laid_out(figure)


# Parts of figures -------------------------------------------------------------------------------------------


def _shown(described: Described) -> NDArray[Any]:
    order = described.order
    return order if len(order) <= SHOWN else order[np.arange(SHOWN) * len(order) // SHOWN]


def _laid_out(figure: Figure) -> Figure:
    """With its parts in their final places: found once, not again for every file."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _panels(heights: list[float]) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(hspace=0.0, h_pad=0.02)
    figure = Figure(figsize=(12, sum(heights) + 0.9), layout=engine)
    grid = {"height_ratios": heights}
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    for each in axes:
        each.tick_params(colors=GREY)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color("#c4c7c5")
    return figure, list(axes)


def _stack(axes: Axes, counts: NDArray[Any], colours: list[Any]) -> None:
    """One patch per class rather than one per bar: hundreds of clients stay quick to draw and small."""
    edges = np.arange(len(counts) + 1)
    below = np.zeros(len(counts))
    for column, colour in enumerate(colours):
        above = below + counts[:, column]
        if counts[:, column].any():
            axes.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = above
    if len(counts) <= 100:  # white lines part the bars while there is room
        axes.vlines(edges[1:-1], 0, max(float(below.max()), 1) * 1.02, color="white",
                    linewidth=min(2.0, 60 / len(counts)))  # fmt: skip
    axes.set_xlim(0, len(counts))


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](k) for k in range(count)]
    if count <= 20:
        return [colormaps["tab20"](k) for k in range(count)]
    return [colormaps["turbo"](0.03 + 0.94 * k / (count - 1)) for k in range(count)]


def _source_colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["cividis"](0.1 + 0.8 * k / max(count - 1, 1)) for k in range(count)]


def _legend(figure: Figure, axes: Axes, count: int, what: str, colours: list[Any] | None = None) -> None:
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    colours = _colours(count) if colours is None else colours
    if count <= 20:
        patches = [Patch(color=colours[k], label=str(k)) for k in range(count)]
        columns = 2 if count > 10 else 1
        small = what == "source" and count > 3
        axes.legend(
            handles=patches[::-1] if columns == 1 and not small else patches, title=what, frameon=False,
            loc="upper left", bbox_to_anchor=(1.0, 1.02), ncols=-(-count // 3) if small else columns,
            labelcolor=GREY, title_fontsize=9, fontsize=8 if small else 9,
            handlelength=1.0, handleheight=1.0, columnspacing=0.8,
        )  # fmt: skip
        return
    from matplotlib.cm import ScalarMappable

    mapped = ScalarMappable(Normalize(0, count - 1), ListedColormap(colours))
    bar = figure.colorbar(mapped, ax=axes, pad=0.01, aspect=30)
    bar.set_label(what, color=GREY)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=GREY)


def _blocks(groups: NDArray[Any]) -> tuple[list[int], list[float], list[str]]:
    """Where one planted group ends and the next begins, the middle of each, and its name (if there is room)."""
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    middles = [(a + b) / 2 for a, b in pairwise(cuts)]
    wide = [b - a >= len(groups) / 60 for a, b in pairwise(cuts)]
    names = [str(groups[a]) if room else "" for a, room in zip(cuts, wide, strict=False)]
    return cuts[1:-1], middles, names


def _group_strip(axes: Axes, groups: NDArray[Any], title: str) -> None:
    """The planted groups as alternating shades, with their numbers."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelbottom=False, labelleft=False)
    axes.set_yticks([])
    borders, middles, names = _blocks(groups)
    cuts = [0, *borders, len(groups)]
    for number, (start, end) in enumerate(pairwise(cuts)):
        axes.axvspan(start, end, color="#dadce0" if number % 2 else "#eceff1", linewidth=0)
    for middle, name in zip(middles, names, strict=True):
        axes.text(middle, 0.5, name, ha="center", va="center", fontsize=9, color="#3c4043")
    axes.set_ylim(0, 1)
    axes.set_ylabel(title, rotation=0, ha="right", va="center", color=GREY, fontsize=9)


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
    sorted_by = ", sorted by planted group" if not np.array_equal(shown, np.sort(shown)) else ""
    axes.set_xlabel(f"client{sorted_by}", color=GREY)


def _title(figure: Figure, described: Described, text: str) -> None:
    facts = described.facts
    marked = "published protocol, with copied clients: " if facts["published_protocol"] else ""
    figure.suptitle(f"{marked}{text}", fontsize=11, color="#202124", x=0.01, ha="left")


def _bars_title(described: Described, shown: int) -> str:
    facts = described.facts
    text = f"{facts['data']}, {facts['partition']}: what {facts['clients']:,} clients train on"
    return text if shown == facts["clients"] else f"{text} ({shown} of them, evenly chosen)"


def _similarity_title(described: Described, by: str) -> str:
    found, facts = divergence(described, by), described.facts
    text = f"{facts['data']}, {facts['partition']}: mean distance"
    if found["between"] is None or found["within"] is None:
        return f"{text} of two clients {found['all'] or 0:.2f}"
    return f"{text} between groups {found['between']:.2f}, within {found['within']:.2f}"
