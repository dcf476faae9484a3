"""What client functions see of clients that are computed together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from actors.client_views import LocalView
from actors.stacked_outputs import Places
from actors.stacking import Stacked, Uploads


class LossesOfAll:
    """Sample losses under models that a client function asks for: all clients' at the first call, one copy."""

    def __init__(
        self,
        clients: Sequence[int],
        arrays: Sequence[npt.NDArray[Any]],
        places: Callable[[Sequence[int], str], Places],
        uploads: Uploads,
        losses: Callable[[Stacked, Places], Tensor],
    ) -> None:
        self._arrays = arrays
        self._clients, self._places, self._uploads, self._losses = clients, places, uploads, losses
        self._known: dict[Hashable, npt.NDArray[np.float32]] = {}

    def of(self, at: int, models: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(samples, K) losses of the client at one position."""
        # Models that travelled beside the request are everybody's; any others are this client's own.
        values, key = (
            self._uploads.get(models) if self._is_shared(models) else (self._uploads.send(models), None)
        )
        shared = Stacked(values, None, key)
        if key is None:  # models that this client made for itself
            own = self._places([self._clients[at]], "train")
            return self._losses(shared, own).cpu().numpy()
        places = self._places(self._clients, "train")
        if key not in self._known:
            self._known[key] = self._losses(shared, places).cpu().numpy()
        start = int(places.starts[at])
        return self._known[key][start : start + int(places.sizes[at])].copy()

    def _is_shared(self, models: npt.NDArray[np.float32]) -> bool:
        return any(
            models.ctypes.data == each.ctypes.data and models.shape == each.shape for each in self._arrays
        )


class StackedView(LocalView):
    """A client as its own code sees it."""

    def __init__(self, plain: LocalView, together: LossesOfAll, at: int) -> None:
        self.__dict__.update(plain.__dict__)
        self._together, self._at = together, at

    def sample_losses(self, models: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(samples, K) training losses under each model."""
        self._work.forwards += self.size * len(models)
        return self._together.of(self._at, models)
