"""Tables for a terminal, and the statistics that stand in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]  # fmt: skip
    return "\n".join([title, "", lines[0], "  ".join("-" * width for width in widths), *lines[1:], ""])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
    return {"median": float(middle), "lower_quartile": float(low), "upper_quartile": float(high)}


def shown(found: dict[str, float], digits: int = 3) -> str:
    """`1.023 (1.010 to 1.041)`."""
    return (
        f"{found['median']:.{digits}f} "
        f"({found['lower_quartile']:.{digits}f} to {found['upper_quartile']:.{digits}f})"
    )


def verdict(value: float, limit: float) -> str:
    """Whether a limit is kept."""
    return "kept" if value <= limit else "MISSED"
