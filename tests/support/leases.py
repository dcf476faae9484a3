"""Leases of processes on other machines."""

from __future__ import annotations

import json
import time
from typing import Any

from archipelago.runs.storage import LEASE, join, read_text, write_text


def put_lease(address: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """What a process of another machine would have left there."""
    content = {"id": "theirs", "host": "other", "pid": 7, "started": 1.0, "where": "other", **changes}
    content["expires"] = time.time() + seconds
    write_text(join(address, LEASE), json.dumps(content))
    return content


def holder(address: str) -> str:
    text = read_text(join(address, LEASE))
    return "" if text is None else json.loads(text)["id"]
