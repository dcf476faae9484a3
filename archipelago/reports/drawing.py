"""The figures as PNG and SVG files for papers, drawn with matplotlib from the same data as the page's.

matplotlib's file canvases are used directly: no screen is needed, and nobody's plotting state is touched.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from archipelago.core.files import whole_file
from archipelago.reports.figures import Figure
from archipelago.reports.palette import FAINT, INK, PALETTE, color, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawn

_WORTH_A_PROCESS = 20  # figures: as long to draw as an interpreter takes to start
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX*ph"
FORMATS = ("png", "svg")
Data = Mapping[str, Any]


def draw_figures(figures: Sequence[Figure], folder: Path, *, processes: int | None = None) -> list[Path]:
    """Every figure as `NAME.png` and `NAME.svg`; returns the files. Many are drawn by several processes."""
    folder.mkdir(parents=True, exist_ok=True)
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), 4) if hasattr(os, "sched_getaffinity") else 1
    processes = min(processes, len(figures) // _WORTH_A_PROCESS)
    others = [_draw_elsewhere(figures[at::processes], folder) for at in range(1, processes)]
    for figure in figures[:: max(processes, 1)]:
        _draw_files(figure, folder)
    for process in others:
        if process.wait():
            raise RuntimeError(f"drawing into {folder} ended with exit code {process.returncode}")
    return [folder / f"{figure.name}.{kind}" for figure in figures for kind in FORMATS]


def _draw_elsewhere(figures: Sequence[Figure], folder: Path) -> subprocess.Popen[bytes]:
    """A fresh interpreter that draws what it reads from its standard input: nothing of this one is inherited."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = "from archipelago.reports.drawing import draw_as_asked; draw_as_asked()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(
            json.dumps({"folder": str(folder.resolve()), "figures": [vars(f) for f in figures]}).encode()
        )
    return process


def draw_as_asked() -> None:
    """Draw the figures that standard input names, as `_draw_elsewhere` writes them."""
    asked = json.load(sys.stdin)
    for figure in asked["figures"]:
        _draw_files(Figure(**figure), Path(asked["folder"]))


def _draw_files(figure: Figure, folder: Path) -> None:
    drawn = draw(figure)
    for kind in FORMATS:
        save(drawn, folder / f"{figure.name}.{kind}")
        drawn.set_layout_engine("none")  # laid out by the first format, and kept for the other


def draw(figure: Figure) -> Drawn:
    """One figure, as matplotlib knows it."""
    drawn = _KINDS[figure.kind](figure.data)
    if figure.data.get("heading"):
        drawn.suptitle(figure.data["heading"], fontsize=11, color=INK, x=0.01, ha="left")
    return drawn


def save(drawn: Drawn, path: Path) -> None:
    """Write a figure, all or nothing; equal figures give equal bytes."""
    from matplotlib import rc_context

    kind = path.suffix[1:]
    nothing = {"Date": None} if kind == "svg" else {"Software": None}
    with (
        rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}),
        whole_file(path, durable=False) as file,
    ):
        drawn.savefig(file, format=kind, dpi=160, metadata=nothing, facecolor="white")


def _new(
    width: float = 6.4, height: float = 4.0, rows: int = 1, columns: int = 1
) -> tuple[Drawn, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as New

    drawn = New(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = list(np.atleast_1d(drawn.subplots(rows, columns)).ravel())
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def _legend(axes: Axes, names: Sequence[str], *, most: int = 40) -> None:
    """Names beneath the axes, in as many columns as their lengths allow; of very many, none."""
    if 1 < len(names) <= most:
        columns = max(1, min(len(names), 84 // (max(map(len, names)) + 6)))
        axes.figure.legend(fontsize=7.5, frameon=False, loc="outside lower center", ncols=columns)


def _lines(data: Data) -> Drawn:
    from matplotlib.ticker import MaxNLocator

    drawn, (axes,) = _new()
    for series in data["series"]:
        dash = _DASHES[(series["dash"] + max(series["color"], 0) // len(PALETTE)) % len(_DASHES)]
        x, y, paint = series["x"], _floats(series["y"]), color(series["color"])
        axes.plot(x, y, dash, color=paint, label=series["name"], linewidth=1.6)
        if series["low"] is not None:
            low, high = _floats(series["low"]), _floats(series["high"])
            axes.fill_between(x, low, high, color=paint, alpha=0.16, linewidth=0)
        for mark in series["marks"]:
            axes.axvline(mark, color=paint, linestyle=":", linewidth=1)
    axes.set(xlabel=data["x"], ylabel=data["y"])
    if data["x"] == "round":
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # there is no round one and a half
    axes.grid(alpha=0.25)
    _legend(axes, [series["name"] for series in data["series"]])
    return drawn


def _floats(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


def _stack(data: Data) -> Drawn:
    names = [str(at) for at in data["at"]]
    if not data["bars"]:
        drawn, (axes,) = _new()
        axes.stackplot(data["at"], [series["y"] for series in data["series"]], step="post", alpha=0.85,
                       colors=[color(series["color"]) for series in data["series"]],
                       labels=[series["name"] for series in data["series"]])  # fmt: skip
        axes.set(xlabel=data["x"], ylabel=data["y"])
        _legend(axes, [series["name"] for series in data["series"]])
        return drawn
    many = len(names) > 25
    drawn, (axes,) = _new() if many else _new(6.4, 1.4 + 0.28 * len(names))
    base = np.zeros(len(names))
    for series in data["series"]:
        values = np.asarray(_floats(series["y"]))
        look: dict[str, Any] = {
            "color": color(series["color"]),
            "alpha": FAINT if series["color"] >= len(PALETTE) else 1.0,
        }
        if many:
            axes.bar(range(len(names)), values, 1.0, bottom=base, label=series["name"], **look)
        else:
            axes.barh(range(len(names)), values, 0.75, left=base, label=series["name"], **look)
        base += values
    if many:
        axes.set(xlabel=data["x"], ylabel=data["y"], xlim=(-0.5, len(names) - 0.5))
    else:
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(data["y"])
    _legend(axes, [series["name"] for series in data["series"]])
    return drawn


def _bars(data: Data) -> Drawn:
    names = data["names"]
    drawn, (axes,) = _new(6.4, 1.0 + 0.34 * len(names))
    places = range(len(names))
    values, errors, published = (_floats(data[key]) for key in ("values", "errors", "published"))
    axes.barh(places, values, 0.65, color=[color(at) for at in data["colors"]])
    axes.errorbar(values, places, xerr=np.nan_to_num(errors), fmt="none", ecolor=INK, capsize=3, linewidth=1)
    if any(np.isfinite(published)):
        axes.plot(published, places, "D", markerfacecolor="white", markeredgecolor=INK, label="published")
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlim(*data["range"])
    axes.set_yticks(list(places), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(data["y"])
    return drawn


def _spread(data: Data) -> Drawn:
    series = data["series"]
    drawn, (axes,) = _new(6.4, 1.0 + 0.42 * len(series))
    for at, each in enumerate(series):
        values = np.asarray(_floats(each["values"]))
        axes.boxplot(values, positions=[at], orientation="horizontal", widths=0.5, showfliers=False, patch_artist=True,
                     boxprops={"facecolor": f"{color(each['color'])}44", "edgecolor": color(each["color"])},
                     medianprops={"color": INK})  # fmt: skip
        axes.plot(values, np.full(len(values), at), "|", color=color(each["color"]), alpha=0.5, markersize=7)
    axes.set_yticks(range(len(series)), [each["name"] for each in series], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(data["y"])
    return drawn


def _flow(data: Data) -> Drawn:
    """Ribbons between stacked columns of nodes, as wide as the clients that take them."""
    drawn, (axes,) = _new(7.2, 4.2)
    columns = len(data["columns"])
    total = max(sum(node["size"] for node in data["nodes"] if node["column"] == at) for at in range(columns))
    gap, width = 0.04 * total, 0.06
    bottoms: list[float] = []
    height = [0.0] * columns
    for node in data["nodes"]:
        bottoms.append(height[node["column"]])
        height[node["column"]] += node["size"] + gap
    out, into = list(bottoms), list(bottoms)
    bend = (1 - np.cos(np.linspace(0, np.pi, 30))) / 2
    for link in sorted(data["links"], key=lambda each: (each["source"], each["target"])):
        source, target, count = data["nodes"][link["source"]], data["nodes"][link["target"]], link["count"]
        x = np.linspace(source["column"] + width, target["column"] - width, 30)
        low = out[link["source"]] + (into[link["target"]] - out[link["source"]]) * bend
        axes.fill_between(x, low, low + count, color=color(source["color"]), alpha=0.4, linewidth=0)
        out[link["source"]] += count
        into[link["target"]] += count
    for node, bottom in zip(data["nodes"], bottoms, strict=True):
        axes.bar(node["column"], node["size"], 2 * width, bottom=bottom, color=color(node["color"]))
        if node["column"] in (0, columns - 1):
            left = node["column"] == 0
            x, y = node["column"] + (-1.5 if left else 1.5) * width, bottom + node["size"] / 2
            axes.text(x, y, node["name"], fontsize=8, ha="right" if left else "left", va="center")
    axes.set_xticks(range(columns), data["columns"], fontsize=8)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return drawn


def _scatter(data: Data) -> Drawn:
    panels = data["panels"]
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    drawn, axes = _new(3.3 * columns, 3.1 * rows, rows, columns)
    for each, panel in zip(axes, panels, strict=False):
        cluster, symbol = np.asarray(panel["color"]), np.asarray(panel["symbol"])
        x, y = np.asarray(_floats(panel["x"])), np.asarray(_floats(panel["y"]))
        for group in np.unique(symbol):
            mine = symbol == group
            colors = [color(int(at)) for at in cluster[mine]]
            marker = _MARKERS[int(group) % len(_MARKERS)]
            each.scatter(x[mine], y[mine], s=26, c=colors, linewidths=0.4, edgecolors="white", marker=marker)
        each.set_title(panel["title"], fontsize=9)
        each.set(xticks=[], yticks=[])
        each.spines[:].set_visible(True)
    for each in axes[len(panels) :]:
        each.set_visible(False)
    return drawn


def _heatmap(data: Data) -> Drawn:
    from matplotlib.colors import ListedColormap

    z = np.asarray(data["z"], np.float64)
    columns = z.shape[1]
    size = (7.4, 6.6) if data.get("heading") else (5.2, 4.5)  # a heading needs the width
    drawn, (axes,) = _new(1.6 + 0.9 * columns, 4.6) if data["names"] else _new(*size)
    if data["names"]:
        shown = np.where(z < 0, np.nan, z % len(PALETTE))
        axes.imshow(shown, cmap=ListedColormap(PALETTE), vmin=-0.5, vmax=len(PALETTE) - 0.5, aspect="auto",
                    interpolation="nearest")  # fmt: skip
    else:
        low, high = data.get("range") or (z.min(), 1 if data["title"] == "cosine" else z.max())
        image = axes.imshow(z, cmap=scale(), vmin=low, vmax=high, aspect="equal", interpolation="nearest")
        drawn.colorbar(image, ax=axes, label=data["title"], shrink=0.85)
    if "cuts" in data:
        for column in range(1, columns):
            axes.axvline(column - 0.5, color="white", linewidth=2)
    if data.get("cuts"):
        column, above = np.asarray(data["cuts"]).T
        width = min(1.2, 0.3 * 4.0 * 72 / len(z))  # a third of a row's height at most
        axes.hlines(above + 0.5, column - 0.5, column + 0.5, color="white", linewidth=width)
    for edge in data["edges"]:
        axes.axhline(edge, color="white", linewidth=1)
        axes.axvline(edge, color="white", linewidth=1)
    axes.set_xticks(*_edge(data, data["x"], 14), fontsize=7, rotation=30)
    axes.set_yticks(*_edge(data, data["y"], 30), fontsize=6)
    axes.tick_params(length=0)
    return drawn


def _edge(data: Data, names: list[str], most: int) -> tuple[list[int], list[str]]:
    """Where an edge of a heatmap is named, and how: every row while names fit, else blocks, if there are any."""
    if len(names) <= most:
        return list(range(len(names))), names
    blocks = data.get("blocks") or []
    return [block["at"] for block in blocks], [block["name"] for block in blocks]


def _images(data: Data) -> Drawn:
    from PIL import Image

    rows = data["rows"]
    drawn, axes = _new(7.2, 0.75 * len(rows) + 0.2, len(rows))
    for each, row in zip(axes, rows, strict=True):
        each.imshow(Image.open(io.BytesIO(base64.b64decode(row["image"]))), interpolation="nearest")
        each.set_ylabel(row["name"], rotation=0, ha="right", va="center", fontsize=8)
        each.set(xticks=[], yticks=[])
        each.spines[:].set_visible(False)
        each.set_anchor("W")
    return drawn


def _holdings(data: Data) -> Drawn:
    from archipelago.reports.drawing_federation import draw_holdings

    return draw_holdings(data)


_KINDS: dict[str, Callable[[Data], Drawn]] = {
    "holdings": _holdings,
    "lines": _lines,
    "stack": _stack,
    "bars": _bars,
    "spread": _spread,
    "flow": _flow,
    "scatter": _scatter,
    "heatmap": _heatmap,
    "images": _images,
}
