"""What runs cost: models stored and moved, samples trained on, time."""

from __future__ import annotations

import json
import math
import statistics
import struct
from pathlib import Path
from urllib.parse import unquote

from archipelago.core.traffic import bytes_moved
from archipelago.reports.groups import Group
from archipelago.reports.repeats import mean

COSTS = {
    "models_stored": "models stored",
    "models_down": "models received",
    "models_up": "models delivered",
    "gradients": "samples trained on",
    "forwards": "samples evaluated",
    "computation": "computation",
    "megabytes_up": "MB delivered",
    "megabytes": "MB moved",
    "seconds_per_round": "s per round",
    "minutes": "minutes",
}
WITH_TRANSFORMS = ("megabytes_up",)  # counted where updates are transformed, and nowhere else


def costs(group: Group) -> dict[str, float]:
    """What the group's finished runs cost: means over all rounds and seeds; empty if nothing is finished."""
    finished = group.counted
    found: dict[str, float] = {}
    for name in ("models_stored", "models_down", "models_up", "gradients", "forwards", "computation"):
        values = [row[f"cost_{name}"] for run in finished for row in run.metrics if f"cost_{name}" in row]
        if values:
            found[name] = mean(values)
    size = model_size(finished[0].path) if finished else None
    if size is not None and {"models_down", "models_up"} <= set(found):
        rows = [row for run in finished for row in run.metrics]
        moved = [each for row in rows if (each := bytes_moved(row, 4 * size)) is not None]
        if any("cost_bytes_up" in row for row in rows):  # what transforms made of updates: what really left
            found["megabytes_up"] = mean([each["up"] for each in moved]) / 1e6
        found["megabytes"] = mean([each["down"] + each["up"] for each in moved]) / 1e6
    seconds = [[row["total"] for row in run.timings if "total" in row] for run in finished]
    if any(seconds):
        found["seconds_per_round"] = statistics.median(value for each in seconds for value in each)
        found["minutes"] = mean([math.fsum(each) for each in seconds]) / 60
    return found


def model_size(run: Path) -> int | None:
    """Parameters and buffers of one model of the run, from the header of a model file; None without one."""
    for path in sorted((run / "models").glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == unquote(path.stem) and entry["dtype"] == "F32":  # no copy under another name
                return int(entry["shape"][-1])
    return None
