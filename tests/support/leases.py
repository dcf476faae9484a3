"""Leases of processes on other machines."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from archipelago.core.errors import UserError
from archipelago.runs.lease import Lease
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


def taken_by_one_of_six(address: str) -> Lease:
    """The lease that one of six threads wins; the others are told that it is taken."""
    start = threading.Barrier(6)
    won: list[Lease] = []
    lost: list[UserError] = []

    def take() -> None:
        start.wait()
        try:
            won.append(Lease(address))
        except UserError as error:
            lost.append(error)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    return won[0]
