"""Every random draw of the platform comes from here: a generator derived from what it is for.

The same (seed, purpose, slot, round, client) gives the same draws wherever, whenever and in whatever
order they are asked for, which is what makes a run independent of actors, packing, kills and resumes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def _words(text: str) -> list[int]:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]


def _sequence(seed: int, purpose: str, slot: str, round: int, client: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, *_words(purpose), *_words(slot), round, client])


def generator(
    seed: int, purpose: str, *, slot: str = "", round: int = 0, client: int = 0
) -> np.random.Generator:
    """A NumPy generator for one purpose.

    >>> bool(generator(1, "batches", client=3).random() == generator(1, "batches", client=3).random())
    True
    >>> bool(generator(1, "batches", client=3).random() == generator(1, "batches", client=4).random())
    False
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, slot, round, client)))


def torch_seed(seed: int, purpose: str, *, slot: str = "", round: int = 0, client: int = 0) -> int:
    """A 63-bit seed for a torch generator, derived like `generator`."""
    return int(_sequence(seed, purpose, slot, round, client).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Fork torch's global generator, seed it, and put it back afterwards.

    For code that insists on the global generator (initialisers, Dropout), and for nothing else.
    """
    import torch

    if torch.cuda.is_initialized():
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            torch.random.manual_seed(seed)
            yield
        return
    # torch.random.manual_seed would also note, with a stack trace, how to seed devices that nobody uses: it
    # takes 300 microseconds, and this runs once per client and round.
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """`seeded_torch`, and the same for the global generators of NumPy and of Python.

    For code of users, who may draw from any of them. It takes 0.1 ms, which is why it is not the rule.
    """
    import random

    before, numpy_before = random.getstate(), np.random.get_state()  # noqa: NPY002  (the state that users draw from)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        with seeded_torch(seed):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)  # noqa: NPY002
