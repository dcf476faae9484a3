"""Who takes part in a round: a stream that depends on the seed and the round, and on no method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foundation.randomness import generator
from foundation.settings import ParticipationSettings


@dataclass(frozen=True)
class Participants:
    """The clients of one round."""

    ids: npt.NDArray[np.int64]  # who trains and delivers, ascending
    step_share: dict[int, float]  # stragglers, and the share of their steps that they manage
    missing: npt.NDArray[np.int64]  # who was selected and never answered


def participants(settings: ParticipationSettings, clients: int, seed: int, round: int) -> Participants:
    """The clients of round `round`; at least one delivers."""
    everyone = np.arange(clients)
    count = max(1, int(np.floor(settings.fraction * clients + 0.5)))
    selected = generator(seed, "participation", round=round).permutation(everyone)[:count]
    lost = min(int(np.floor(settings.dropouts * count + 0.5)), count - 1)
    missing, present = selected[:lost], np.sort(selected[lost:])
    rng = generator(seed, "stragglers", round=round)
    slow = rng.permutation(present)[: int(np.floor(settings.stragglers * len(present) + 0.5))]
    shares = {int(client): float(share) for client, share in zip(slow, rng.random(len(slow)), strict=True)}
    return Participants(present.astype(np.int64), shares, np.sort(missing).astype(np.int64))
