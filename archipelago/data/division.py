"""A division: who trains, validates and tests on which samples, and the ground truth about it.

Made from labels and settings alone, in the same way everywhere, and kept under its content address
(`partition_cache.py`) so that equal experiments share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import PartitionSettings
from archipelago.data.apportion import Integers, ranks
from archipelago.data.partitions_core import PARTITIONS, Labels, Partition, Partitioner
from archipelago.data.partitions_dealing import set_aside, split_at
from archipelago.data.shifts import variants_of_clients, variants_of_samples

PARTS = ("train", "validation", "test")
_OPTIONAL = ("groups", "levels", "sources", "variants", "copy_of")


@dataclass(frozen=True, eq=False)
class ClientData:
    """Positions in the federation's array; no two clients share one (but see `Division.copy_of`)."""

    train: Integers
    validation: Integers
    test: Integers


@dataclass(frozen=True, eq=False)
class Division:
    """Positions refer to the data set's training samples followed by its test samples.

    `groups`, (clients,): ground-truth group of each client. `levels`, (levels, clients): nested ground-truth
    groups, coarsest first. `sources`, (samples,): the distribution that each sample comes from, -1 where nobody holds
    it. `variants`, (samples,): how each sample is shifted. `holdout`: one set of test samples, which no client
    has, per ground-truth distribution (source, or group). `copy_of`, (clients,): whom a client is a copy of (-1:
    nobody), only in published protocols that make copies. `notes`: sentences about what had to give way.
    """

    clients: tuple[ClientData, ...]
    groups: Integers | None = None
    levels: Integers | None = None
    sources: Integers | None = None
    variants: Integers | None = None
    holdout: tuple[Integers, ...] = ()
    copy_of: Integers | None = None
    notes: tuple[str, ...] = ()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As a handful of plain arrays; `from_arrays` is the way back.

        Per part, all positions one client after the other, and where each client ends.
        """
        found: dict[str, NDArray[Any]] = {}
        pieces = {part: [getattr(client, part) for client in self.clients] for part in PARTS}
        if self.holdout:
            pieces["holdout"] = list(self.holdout)
        for name, parts in pieces.items():
            found[name] = np.concatenate(parts)
            found[f"{name}_ends"] = np.cumsum([len(piece) for piece in parts], dtype=np.int64)
        found |= {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        if self.notes:
            found["notes"] = np.frombuffer(json.dumps(self.notes).encode(), dtype=np.uint8).copy()
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Division:
        """The inverse of `arrays`; a `ValueError` where they do not fit each other."""
        parts = [_pieces(arrays, part) for part in PARTS]
        optional = {n: np.asarray(arrays[n], dtype=np.int64) for n in _OPTIONAL if n in arrays}
        return cls(
            tuple(ClientData(*pieces) for pieces in zip(*parts, strict=True)),
            holdout=tuple(_pieces(arrays, "holdout")) if "holdout" in arrays else (),
            notes=tuple(json.loads(bytes(arrays["notes"]))) if "notes" in arrays else (),
            **optional,
        )


def _pieces(arrays: Mapping[str, NDArray[Any]], name: str) -> list[Integers]:
    ends = np.asarray(arrays[f"{name}_ends"], dtype=np.int64)
    flat = np.asarray(arrays[name], dtype=np.int64)
    if len(ends) == 0 or ends[-1] != len(flat) or (np.diff(ends, prepend=0) < 0).any():
        raise ValueError(f"the ends of the '{name}' indices do not fit them")
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Task:
    """All that a division depends on.

    `labels` are those of an official split. `variants` is how many shifts there are: a partition that mixes sources
    gives each of them a part of every source's samples, any other gives them to clients (`crossed`: inside each
    ground-truth group).
    """

    labels: Labels
    settings: PartitionSettings
    clients: int
    seed: int
    variants: int = 1
    crossed: bool = False


def divide(split: Partitioner, task: Task) -> Division:
    """Divide the samples among the clients."""
    labels, settings, seed, variants = task.labels, task.settings, task.seed, task.variants
    offset = len(labels.train)
    rng = generator(seed, "partition")
    variant_of_sample = None
    if variants > 1 and split.mixes:
        variant_of_sample = variants_of_samples(
            _strata(labels), variants, generator(seed, "shifts of samples")
        )
        labels = _with_sources(labels, variants, variant_of_sample)
    elif variants > 1 and settings.compat != "none":
        raise UserError(
            f"partition.compat={settings.compat} gives one sample to several clients, which cannot all see it shifted "
            "in their own way: leave out the shifts (data.rotations, ...), or partition.compat.",
            code="shared-samples", setting="data.rotations",
        )  # fmt: skip
    known = labels
    if settings.test_share is not None:
        labels, offset = _pooled(labels, settings.test_share), 0
    parts = split(labels, settings, task.clients, rng)
    groups, levels = parts.groups, parts.levels
    held = _client_data(parts, labels, settings, offset, seed)
    if variants > 1 and not split.mixes:
        variant, groups, crossing = variants_of_clients(groups, variants, task.clients, task.crossed)
        if crossing is not None:
            levels = crossing if levels is None else np.concatenate([levels, crossing[1:]])
        variant_of_sample = _by_holder(held, variant, len(known.train) + len(known.test), nobody=0)
    sources = _sources(known, held, variant_of_sample, variants, mixes=split.mixes)
    held, holdout = _hold_out(split, known, held, groups, sources, settings, seed)
    return Division(held, groups, levels, sources, variant_of_sample, holdout, parts.copy_of, parts.notes)


def _joint(one: NDArray[Any] | None, other: NDArray[Any] | None) -> Integers | None:
    return None if one is None or other is None else np.concatenate([one, other])


def _pooled(labels: Labels, share: float) -> Labels:
    """Training and test samples as one, of which each client keeps a share for testing."""
    y = np.concatenate([labels.train, labels.test])
    sources = _joint(labels.sources_train, labels.sources_test)
    owners = _joint(labels.owners_train, labels.owners_test)
    return Labels(labels.name, y, y, labels.classes, sources, sources, owners, owners, share)


def _strata(labels: Labels) -> Integers:
    """Numbers for what must be even when samples are divided: part, source and class."""
    count = len(labels.train) + len(labels.test)
    part = np.repeat([0, 1], [len(labels.train), len(labels.test)])
    sources = _joint(labels.sources_train, labels.sources_test)
    y = np.zeros(count, dtype=np.int64)
    if labels.classes is not None:
        y = np.concatenate([labels.train, labels.test])
    columns = np.stack([part, np.zeros(count, dtype=np.int64) if sources is None else sources, y])
    return np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _with_sources(labels: Labels, variants: int, variant: Integers) -> Labels:
    sources = _joint(labels.sources_train, labels.sources_test)
    sources = variant if sources is None else sources * variants + variant
    cut = len(labels.train)
    return Labels(
        labels.name, labels.train, labels.test, labels.classes, sources[:cut], sources[cut:],
        labels.owners_train, labels.owners_test,
    )  # fmt: skip


def _sources(
    labels: Labels, held: tuple[ClientData, ...], variant: Integers | None, variants: int, *, mixes: bool
) -> Integers | None:
    """The distribution of each sample that somebody holds, -1 for the others; None where there is no ground truth."""
    sources = _joint(labels.sources_train, labels.sources_test)
    if not mixes and variant is not None:
        sources = variant if sources is None else sources * variants + variant
    if sources is None:
        return None
    used = _by_holder(held, np.ones(len(held), dtype=np.int64), len(sources), nobody=0)
    return np.where(used == 1, sources, -1).astype(np.int64)


def _by_holder(held: tuple[ClientData, ...], values: Integers, samples: int, nobody: int) -> Integers:
    """For each sample, the value of the client that holds it."""
    sizes = [sum(len(getattr(client, part)) for part in PARTS) for client in held]
    found = np.full(samples, nobody, dtype=np.int64)
    positions = np.concatenate([getattr(client, part) for client in held for part in PARTS])
    found[positions] = np.repeat(values, sizes)
    return found


def _client_data(
    divided: Partition, labels: Labels, settings: PartitionSettings, offset: int, seed: int
) -> tuple[ClientData, ...]:
    """Positions in the joint array; with `validation`, a share of each class, one sample at least, goes there."""
    train, validation = divided.train, tuple(each[:0] for each in divided.train)
    if settings.validation > 0:
        number = min(range(len(train)), key=lambda client: len(train[client]))
        if len(train[number]) < 2:
            raise UserError(
                f"partition.validation={settings.validation} needs two training samples of every client, "
                f"but client {number} has {len(train[number])}: set partition.min_size=2, or no validation.",
                code="too-few-samples", setting="partition.validation", client=number,
            )  # fmt: skip
        strata = labels.train if labels.classes is not None else np.zeros(len(labels.train), dtype=np.int64)
        rng = generator(seed, "validation")
        train, validation = set_aside(train, strata, settings.validation, rng, floors=False)
    parts = zip(train, validation, divided.test, strict=True)
    return tuple(ClientData(to_train, kept, to_test + offset) for to_train, kept, to_test in parts)


def _hold_out(
    split: Partitioner,
    labels: Labels,
    held: tuple[ClientData, ...],
    groups: Integers | None,
    sources: Integers | None,
    settings: PartitionSettings,
    seed: int,
) -> tuple[tuple[ClientData, ...], tuple[Integers, ...]]:
    """Take a share of the test samples away from the clients, as one set per ground-truth distribution."""
    share = (0.5 if split.mixes else 0.0) if settings.holdout is None else settings.holdout
    if share == 0:
        return held, ()
    if settings.compat != "none":
        raise UserError(
            f"partition.holdout={share} cannot be combined with partition.compat={settings.compat}, where several "
            "clients may hold one test sample: leave one of them out.",
            code="shared-samples", setting="partition.holdout",
        )  # fmt: skip
    if groups is None:
        raise UserError(
            f"partition.holdout={share} keeps test samples of every ground-truth distribution, but "
            f"{split.name} has none: use {' or '.join(_mixing())}, a cluster-wise one or data.rotations, or none.",
            code="needs-groups", setting="partition.holdout",
        )  # fmt: skip
    test = np.concatenate([client.test for client in held])
    holder = np.repeat(np.arange(len(held)), [len(client.test) for client in held])
    kind = sources[test] if split.mixes and sources is not None else groups[holder]
    y = np.zeros(len(test), dtype=np.int64)
    if labels.classes is not None:
        y = np.concatenate([labels.train, labels.test])[test]
    free = _spare(holder, kind, y, split.mixes, generator(seed, "holdout"))
    taken = free[: round(share * len(test))]
    sets = tuple(np.unique(test[taken[kind[taken] == number]]) for number in range(int(kind.max()) + 1))
    if any(len(each) == 0 for each in sets):
        if settings.holdout is None:  # nobody asked for it: done without
            return held, ()
        raise UserError(
            f"partition.holdout={share} leaves no test sample to hold out of distribution "
            f"{next(n for n, each in enumerate(sets) if len(each) == 0)}: there are too few test samples for "
            f"{len(held)} clients: ask for fewer clients, a larger share, or partition.holdout=0.",
            code="too-few-samples", setting="partition.holdout",
        )  # fmt: skip
    stays = np.ones(len(test), dtype=bool)
    stays[taken] = False
    kept = split_at(test[stays], np.bincount(holder[stays], minlength=len(held)))
    clients = tuple(
        ClientData(client.train, client.validation, rest) for client, rest in zip(held, kept, strict=True)
    )
    return clients, sets


def _mixing() -> list[str]:
    return [name for name, entry in PARTITIONS.items() if entry.value.mixes]


def _spare(
    holder: Integers, kind: Integers, y: Integers, mixes: bool, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Which test samples may be held out, in the order in which they go.

    A client keeps one test sample at least of every class it is tested on; one of every source, if it mixes them. The
    sets of a mixture have the same number of each class, as far as there are any (FedSoft draws them so).
    """
    shuffled = rng.permutation(len(y))
    cells = np.stack([holder, kind, np.zeros_like(y) if mixes else y])
    order = shuffled[np.lexsort(cells[::-1, shuffled])]
    cell = cells[:, order]
    spare = np.zeros(len(y), dtype=bool)
    spare[order[1:]] = (cell[:, 1:] == cell[:, :-1]).all(axis=0)  # all but the first of each cell
    free = shuffled[spare[shuffled]]
    if mixes:  # one of each source and class in turn
        number = kind * (int(y.max()) + 1) + y
        free = free[np.argsort(number[free], kind="stable")]
        free = free[np.argsort(ranks(number[free]), kind="stable")]
    return free
