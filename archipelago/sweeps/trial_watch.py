"""A watchdog for the processes of trials: Ray Tune waits for ever for one that is stopped but not dead.

A trial's actors have a watchdog of their own (`actors/watchdog.py`), run by the trial. The trial's process waits or
computes for as long as its rounds take, so that silence says nothing about it; what does is a process that is stopped
(SIGSTOP), or stands in one read or write of a dead file system, and used no processor since the last look. One that was
so for a `fleet.patience` is named, after a second it is ended: Tune then begins the trial again, from its last
checkpoint.

Each process writes where it is into Ray's key-value store as soon as it starts, since Tune knows that only from a first
report, which may be hours away.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from actors.watchdog import Member, Vital, kill, on_node, vital

_STANDING = ("stopped", "disk-sleep")
_PREFIX = "archipelago-trial"


def announce(label: str, trial: str) -> None:
    """Say where this process is, and whose trial it has now."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_put  # Ray has no public word for it

    context = ray.get_runtime_context()
    here = {"trial": trial, "pid": os.getpid(), "node": context.get_node_id(), "host": os.uname().nodename}
    _internal_kv_put(f"{_PREFIX}-{label}-{context.get_actor_id()}", json.dumps(here))


def announced(label: str) -> dict[str, Member]:
    """The processes that have said where they are, by key."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    found = {}
    for key in _internal_kv_list(f"{_PREFIX}-{label}-"):
        text = _internal_kv_get(key)
        if text is not None:
            it: dict[str, Any] = json.loads(text)
            name = f"The process of {it['trial']}"
            found[key.decode()] = Member(None, name, it["pid"], it["node"], it["host"])
    return found


def _forget(key: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key)


@contextlib.contextmanager
def watched(label: str, patience: float, say: Callable[[str], None]) -> Iterator[None]:
    """Look at the processes of a sweep's trials from time to time, in a thread."""
    over = threading.Event()
    looks = Looks(label, patience, say)

    def watch() -> None:
        while not over.wait(patience):
            with contextlib.suppress(Exception):  # a cluster out of reach: Tune's to notice
                looks.look()

    thread = threading.Thread(target=watch, name="trial-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(patience)
        with contextlib.suppress(Exception):
            for key in announced(label):
                _forget(key)


class Looks:
    """One look after the other."""

    def __init__(self, label: str, patience: float, say: Callable[[str], None]) -> None:
        self._label, self._patience, self._say = label, patience, say
        self._seen: dict[str, tuple[Vital, int]] = {}  # what was seen, and for how many looks it stood still

    def look(self) -> None:
        """At every process there is: name who stands still, end who has been named."""
        for key, member in announced(self._label).items():
            now = vital(member)
            before, looks = self._seen.get(key, (Vital("unknown"), 0))
            stands = now.status in _STANDING and (looks == 0 or now.seconds <= before.seconds)
            looks = looks + 1 if stands else 0
            self._seen[key] = now, looks
            if now.status == "gone":
                _forget(key)
            elif looks == 2:  # one look may fall into a write
                self._say(
                    f"{member} is late: it is {now.status}, and will be ended in {self._patience:.3g} s."
                )
            elif looks == 3:
                self._say(f"{member} was {now.status} for {2 * self._patience:.3g} s, and was ended.")
                on_node(kill, member, None)
                _forget(key)
