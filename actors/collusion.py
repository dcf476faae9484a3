"""Attackers that agree on what to send: made from the updates of clients that they know, piece by piece of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from archipelago.strategies.attacks import Attack
from archipelago.strategies.references import Indices, Reference, Rows

if TYPE_CHECKING:
    from actors.fleet import Fleet

MEMORY = 64e6  # bytes of updates that are looked at a time


class Collusion:
    """The attackers of a federation and their common plan."""

    def __init__(self, attack: Attack, attackers: Indices) -> None:
        self.attack, self.attackers = attack, attackers

    def replace(
        self,
        view: Fleet,
        handle: str,
        start: Reference | None,
        magnitude: npt.NDArray[np.float64],
        sent: npt.NDArray[np.float64],
    ) -> None:
        """Have the attackers of a call send what they agreed on; `magnitude` and `sent` become those of that.

        Whoever has no finite magnitude never delivered anything. Clusters craft for themselves.
        """
        there, attacks = np.isfinite(magnitude), np.isin(view.ids, self.attackers)
        group = start.rows if isinstance(start, Rows) else np.zeros(len(view.ids), np.int64)
        groups = np.unique(group[there & attacks])
        if not len(groups):
            return
        crafted = np.zeros((len(groups), view.spec.size), np.float32)
        for row, each in enumerate(groups):
            inside = there & (group == each)
            own, honest = np.flatnonzero(inside & attacks), np.flatnonzero(inside & ~attacks)
            known = honest if self.attack.knows == "honest" and len(honest) else own
            for columns in self._pieces(view, len(known)):
                table = self._updates(view, handle, known, columns)
                crafted[row, slice(*columns)] = self.attack.craft(table, int(inside.sum()), len(own))
        crafted.flags.writeable = False
        at = np.flatnonzero(there & attacks)
        some = view.select(view.ids[at])
        rows = np.searchsorted(groups, group[at])
        clients = some.participants()
        arguments = {
            b: (handle, view._round.number, some.names(where), rows[where].tolist())
            for b, where in clients.items()
        }
        found = some._table(some._reach("collude", arguments, [view.placed(crafted)]), clients, 2)
        magnitude[at], sent[at] = found.T

    def _pieces(self, view: Fleet, count: int) -> list[tuple[int, int]]:
        size, width = view.spec.size, max(1, int(MEMORY // (4 * max(count, 1))))
        return [(first, min(first + width, size)) for first in range(0, size, width)]

    def _updates(
        self, view: Fleet, handle: str, at: Indices, columns: tuple[int, int]
    ) -> npt.NDArray[np.float32]:
        """(clients, columns) updates before any attack and transform, in id order."""
        some = view.select(view.ids[at])
        clients = some.participants()
        arguments = {b: (handle, some.names(where), columns) for b, where in clients.items()}
        found = some._reach("updates", arguments)
        table = np.zeros((len(at), columns[1] - columns[0]), np.float32)
        for b, where in clients.items():
            table[where] = found[b]
        return table
