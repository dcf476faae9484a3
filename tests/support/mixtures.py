"""FedSoft's synthetic experiment by hand: clients whose samples come from several linear models, in known shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.session import InProcessSession
from archipelago.data import ClientData, Division, Federation, load_dataset
from archipelago.experiments.config import load_config
from archipelago.experiments.plan import make_plan

TEST_SAMPLES = 10


def mixed_federation(config: object, shares: npt.NDArray[np.float64], samples: int) -> Federation:
    """Client k trains on `samples` samples of which `shares[k, s]` come from source s; none is used twice."""
    dataset = load_dataset(config.data, config.seed)
    train = [list(np.flatnonzero(dataset.sources_train == s)) for s in range(shares.shape[1])]
    test = [list(np.flatnonzero(dataset.sources_test == s)) for s in range(shares.shape[1])]
    clients = []
    for row in shares:
        held = [_taken(pools, row, count) for pools, count in ((train, samples), (test, TEST_SAMPLES))]
        nothing = np.zeros(0, np.int64)
        clients.append(ClientData(held[0], nothing, held[1] + len(dataset.x_train)))
    groups = np.argmax(shares, axis=1).astype(np.int64)
    return Federation.made_of(dataset, Division(tuple(clients), groups))


def _taken(pools: list[list[int]], shares: Sequence[float], count: int) -> npt.NDArray[np.int64]:
    found: list[int] = []
    for pool, share in zip(pools, shares, strict=True):
        wanted = round(share * count)
        found += [pool.pop() for _ in range(wanted)]
    return np.sort(np.array(found, np.int64))


def ten_ninety(clients: int) -> npt.NDArray[np.float64]:
    """FedSoft's 10:90 split: the first half holds 10% of source A, the second half 90%."""
    shares = np.tile([0.1, 0.9], (clients, 1))
    shares[clients // 2 :] = [0.9, 0.1]
    return shares


def mixed_session(shares: npt.NDArray[np.float64], *overrides: str, samples: int = 60) -> InProcessSession:
    """A session on FedSoft's synthetic data with the given (clients, sources) shares."""
    total = 2 * (samples + TEST_SAMPLES) * len(shares)
    config = load_config(
        None,
        [
            f"clients={len(shares)}",
            f"clusters={shares.shape[1]}",
            "data=synthetic",
            f"data.sources={shares.shape[1]}",
            f"data.samples={total}",
            "fleet.backend=in_process",
            *overrides,
        ],
    )
    return InProcessSession(make_plan(config, mixed_federation(config, shares, samples)))


def error_up_to_permutation(found: npt.NDArray[np.float64], truth: npt.NDArray[np.float64]) -> float:
    """The mean absolute difference of two (clients, 2) tables of weights, whichever of the two is called first."""
    return min(float(np.abs(found - truth).mean()), float(np.abs(found[:, ::-1] - truth).mean()))
