"""The matrix as a picture: colours for those who look, numbers and letters for those who read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archipelago.reports.palette import SOFT, VERDICTS
from benchmarks.behaviour.checks import AMBER, GREEN, NONE, RED
from benchmarks.behaviour.page import LETTERS, TITLES, Result

# Told apart by readers who do not see red and green, too: by lightness, and by the letters of what was missed.
COLOURS, INK = ({state: pair[at] for state, pair in VERDICTS.items()} for at in (0, 1))
CELL = (0.92, 0.26)  # inches
LABELS = 1.7  # inches left of the matrix


def draw(result: Result, path: Path) -> None:
    """Write the heat map: a row for each method, bases first, a column for each situation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    verdicts, methods, situations = result.verdicts(), result.methods, result.situations
    bases = sum("+" not in name for name in methods)
    height = (len(methods) + 3.2) * CELL[1]
    figure = Figure(figsize=(LABELS + len(situations) * CELL[0], height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, method in enumerate(methods):
        for column, situation in enumerate(situations):
            found = verdicts.get((method, situation))
            if found is None:
                continue
            axes.add_patch(
                Rectangle(
                    (column, row), 1, 1, facecolor=COLOURS[found.state], edgecolor="white", linewidth=1.5
                )
            )
            number = (
                "" if found.margin is None else f"{100 * found.margin:+.1f}".replace("-", "\N{MINUS SIGN}")
            )
            letters = "".join(LETTERS[check] for check in found.missed)
            axes.text(
                column + 0.5, row + 0.53, f"{number}  {letters}".strip(), ha="center", va="center", fontsize=7.5,
                color=INK[found.state], weight="bold" if found.state == RED else "normal",
            )  # fmt: skip
    if 0 < bases < len(methods):
        axes.axhline(bases, color=SOFT, linewidth=1)
    axes.set(xlim=(0, len(situations)), ylim=(len(methods), 0))
    axes.set_xticks(
        [column + 0.5 for column in range(len(situations))], [_two_lines(TITLES[name]) for name in situations]
    )
    axes.set_yticks([row + 0.5 for row in range(len(methods))], methods)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    shown = {
        GREEN: "as expected",
        AMBER: "some seeds, or a declared reason",
        RED: "missed",
        NONE: "does not apply",
    }
    handles = [Patch(facecolor=COLOURS[state], label=words) for state, words in shown.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.text(0.005, 0.005, "points of accuracy over FedAvg", fontsize=7, color=SOFT)
    _save_small(figure, path)


def _save_small(figure: Any, path: Path) -> None:
    """As a PNG of few colours: the matrix has four, and shades of grey between them and the letters."""
    import io

    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90, metadata={"Software": None})
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(48).save(path, optimize=True)


def _two_lines(title: str) -> str:
    """
    >>> _two_lines("rotations, K = true")
    'rotations,\\nK = true'
    """
    if len(title) < 12:
        return title
    cut = title.find(", ") + 1 or title.find(" ", 3)
    return f"{title[:cut].rstrip()}\n{title[cut:].lstrip()}"
