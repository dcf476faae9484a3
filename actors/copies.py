"""Copies of committed states in other actors, so that a loss costs the running round and no more.

Every member of a session, a block of clients or the server, has a neighbour that holds a copy of its committed state.
A round commits in two steps: first each member sends what the round changed to its neighbour, where it waits; when all
have arrived the round is decided, and members and copies take the changes over. So whatever is lost, and when, those
that are left hold everything of the round before, or everything of the round that was decided.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.client_states import Changes

SERVER = -1  # as a neighbour: the server's process


@dataclass
class _Copy:
    round: int
    whole: Any  # the states of a block by client, or what a server has
    waiting: tuple[int, Any] | None = None  # a round that is not decided, and what it changes


class Copies:
    """What one process holds of others, by the name of the member it is of."""

    def __init__(self) -> None:
        self._held: dict[str, _Copy] = {}

    def hold(self, member: str, round: int, whole: Any) -> None:
        """A member's whole committed state."""
        self._held[member] = _Copy(round, owned(whole))

    def prepare(self, member: str, round: int, changes: Any) -> None:
        """What a round would change: `Changes` of a block, or the whole of a server."""
        held = self._held.setdefault(member, _Copy(round - 1, {}))
        held.waiting = (round, _owned_changes(changes))

    def settle(self, round: int) -> None:
        """Take over what waits for this round, which is decided; forget what waits for another one."""
        for held in self._held.values():
            waiting, held.waiting = held.waiting, None
            if waiting is not None and waiting[0] == round > held.round:
                held.whole = waiting[1].onto(held.whole) if isinstance(waiting[1], Changes) else waiting[1]
                held.round = round

    def only(self, members: Sequence[str]) -> None:
        """Let go of the copies of others."""
        self._held = {name: held for name, held in self._held.items() if name in members}

    def rounds(self) -> dict[str, tuple[int, int | None]]:
        """(committed round, round that waits) of each member."""
        return {
            name: (held.round, held.waiting[0] if held.waiting else None) for name, held in self._held.items()
        }

    def of(self, member: str) -> Any:
        """A member's committed state."""
        return self._held[member].whole


def owned(value: Any) -> Any:
    """The same value in memory of this process: what a call brings lies in the object store, in one piece."""
    if isinstance(value, np.ndarray):
        mine = np.array(value)
        mine.flags.writeable = False
        return mine
    if isinstance(value, dict):
        return {key: owned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [owned(each) for each in value] if isinstance(value, list) else tuple(map(owned, value))
    return copy.deepcopy(value)  # a report, or a plain number


def _owned_changes(changes: Any) -> Any:
    return Changes(owned(changes.put), changes.gone) if isinstance(changes, Changes) else owned(changes)


def neighbours(nodes: Sequence[str]) -> list[int]:
    """Who holds each block's copy: a block on another node where there is one, each about as many; alone: the server.

    >>> neighbours(["a", "a", "b", "b"]), neighbours(["a", "a", "a"]), neighbours(["a"])
    ([2, 3, 0, 1], [1, 2, 0], [-1])
    """
    count, held, found = len(nodes), [0] * len(nodes), []
    if count == 1:
        return [SERVER]
    for b in range(count):
        others = [(b + step) % count for step in range(1, count)]
        best = min(others, key=lambda k: (nodes[k] == nodes[b], held[k]))  # the first of equals: the next one
        held[best] += 1
        found.append(best)
    return found


def neighbour_of_server(node: str, nodes: Sequence[str]) -> int:
    """Which block holds the server's copy: the first on another node, or the first.

    >>> neighbour_of_server("a", ["a", "a", "b"]), neighbour_of_server("a", ["a"])
    (2, 0)
    """
    return next((b for b, other in enumerate(nodes) if other != node), 0)
