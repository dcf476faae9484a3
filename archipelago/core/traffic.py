"""What a round moves between a server and its clients, in bytes: the one rule, for figures, tables and monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bytes_moved(row: Mapping[str, Any], model_bytes: int) -> dict[str, float] | None:
    """Bytes that a participant received and sent in a round, by direction; None where its models were not counted.

    `row` is a row of metrics.csv. What transforms made of updates counts by its bytes, everything else by models.

    >>> bytes_moved({"cost_models_down": 2.0, "cost_models_up": 1.0}, 100)
    {'down': 200.0, 'up': 100.0}
    >>> bytes_moved({"cost_models_down": 2.0, "cost_models_up": 1.0, "cost_bytes_up": 12.5}, 100)
    {'down': 200.0, 'up': 12.5}
    """
    if "cost_models_down" not in row or "cost_models_up" not in row:
        return None
    up = row.get("cost_bytes_up", row["cost_models_up"] * model_bytes)
    return {"down": float(row["cost_models_down"] * model_bytes), "up": float(up)}
