"""How many clients stand behind what the server learns of their uploads in a round, for the reported privacy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from archipelago.strategies.references import Indices


class Exposure:
    """Of every call, the least number of clients behind a sum of its uploads; 1 if somebody looked at a single one."""

    def __init__(self) -> None:
        self._behind: dict[str, float] = {}
        self._summed: dict[str, set[int]] = {}  # by handle: clients that entered a sum already

    def sums(self, handle: str, weights: npt.NDArray[np.float64], ids: Indices) -> None:
        """The server takes the sums of some clients' uploads with these (K, n) weights.

        Weights w hide a client as well as sum w^2 / max w^2 equal ones do. An upload in two sums counts as seen:
        its noise might be computed from them.
        """
        squares = weights * weights
        largest = squares.max(axis=1, initial=0.0)
        used = largest > 0
        if not used.any():
            return
        behind = float((squares[used].sum(axis=1) / largest[used]).min())
        entered = ids[np.flatnonzero(weights.any(axis=0))]
        before = self._summed.setdefault(handle, set())
        twice = bool((np.count_nonzero(weights, axis=0) > 1).any()) or not before.isdisjoint(entered.tolist())
        before.update(entered.tolist())
        self._behind[handle] = min(self._behind.get(handle, np.inf), 1.0 if twice else behind)

    def alone(self, handle: str) -> None:
        """The server looks at single uploads."""
        self._behind[handle] = 1.0

    def behind(self) -> list[float]:
        """One number for each call whose uploads the server used."""
        return [self._behind[handle] for handle in sorted(self._behind)]
