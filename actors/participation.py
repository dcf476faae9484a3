"""Who takes part in a round: a stream that depends on the seed and the round, and on no method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.core.settings import EvaluationSettings, LocalSettings, ParticipationSettings


@dataclass(frozen=True)
class Participants:
    """The clients of one round."""

    ids: npt.NDArray[np.int64]  # who trains and delivers, ascending
    step_share: dict[int, float]  # stragglers, and the share of their steps that they manage
    missing: npt.NDArray[np.int64]  # who was selected and never answered


def held_out(clients: int, share: float, seed: int) -> npt.NDArray[np.int64]:
    """Clients that never train: the test of what a method gives to new clients. At least one always trains."""
    count = min(int(np.floor(share * clients + 0.5)), clients - 1)
    return np.sort(generator(seed, "held-out clients").permutation(clients)[:count]).astype(np.int64)


def attackers(population: npt.NDArray[np.int64], share: float, seed: int) -> npt.NDArray[np.int64]:
    """The clients that attack whenever they take part, of those that may train. At least one is honest."""
    count = min(int(np.floor(share * len(population) + 0.5)), len(population) - 1)
    return np.sort(generator(seed, "attackers").permutation(population)[:count]).astype(np.int64)


def visited(
    settings: EvaluationSettings, clients: npt.NDArray[np.int64], seed: int, round: int, last: bool
) -> npt.NDArray[np.int64]:
    """The clients out of `clients` that the evaluation after a round visits, ascending; at least one of any."""
    if settings.clients is None or (last and settings.full_last) or not len(clients):
        return clients
    wanted = settings.clients * len(clients) if settings.clients < 1 else settings.clients
    count = min(max(1, int(np.floor(wanted + 0.5))), len(clients))
    rng = generator(seed, "evaluated clients", round=round if settings.redraw else 0)
    return np.sort(rng.permutation(clients)[:count]).astype(np.int64)


def selected(settings: ParticipationSettings, population: int) -> int:
    """How many clients a round selects out of those that may train."""
    return max(1, int(np.floor(settings.fraction * population + 0.5)))


def participants(
    settings: ParticipationSettings, population: npt.NDArray[np.int64], seed: int, round: int
) -> Participants:
    """The clients of round `round` out of those that may train; at least one delivers."""
    everyone = population
    count = selected(settings, len(everyone))
    chosen = generator(seed, "participation", round=round).permutation(everyone)[:count]
    lost = min(int(np.floor(settings.dropouts * count + 0.5)), count - 1)
    missing, present = chosen[:lost], np.sort(chosen[lost:])
    rng = generator(seed, "stragglers", round=round)
    slow = rng.permutation(present)[: int(np.floor(settings.stragglers * len(present) + 0.5))]
    shares = {int(client): float(share) for client, share in zip(slow, rng.random(len(slow)), strict=True)}
    return Participants(present.astype(np.int64), shares, np.sort(missing).astype(np.int64))


def trained_samples(
    local: LocalSettings, sizes: npt.NDArray[np.int64], share: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Samples of one local training of each client, a straggler doing a share of its steps.

    Whole passes, then batches of one more; a pass is over with a short batch (see `ClientBlock._batches`).

    >>> trained_samples(LocalSettings(steps=3, batch=4), np.array([6, 20]), np.ones(2))
    array([10, 12])
    """
    per_pass = -(-sizes // local.batch)
    steps = local.steps if local.epochs is None else local.epochs * per_pass
    steps = np.maximum(1, (steps * share).astype(np.int64))
    return steps // per_pass * sizes + np.minimum(steps % per_pass * local.batch, sizes)
