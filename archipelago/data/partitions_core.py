"""What all partitions share: their types, their registry and the options that several of them have.

Partitions are exact (largest remainder, no sample twice, none lost that the method can place), give a
client's test samples in the proportions of its training samples, and carry the ground-truth groups along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions, Registry, read_options
from archipelago.core.settings import PartitionSettings, setting
from archipelago.data.apportion import Integers
from archipelago.data.options import options_of


@dataclass(frozen=True, eq=False)
class Labels:
    """All that a partition may look at: labels, ground-truth sources and natural owners, never the samples.

    With `test_share`, `train` and `test` are one and the same: all samples of the data set, of which each
    client keeps that share for testing. Without, they are the data set's official split.
    """

    name: str
    train: NDArray[Any]
    test: NDArray[Any]
    classes: int | None
    sources_train: Integers | None = None
    sources_test: Integers | None = None
    owners_train: Integers | None = None
    owners_test: Integers | None = None
    test_share: float | None = None

    def smallest(self, min_size: int) -> int:
        """How many samples of `train` a client needs to train on `min_size`: more, where it gives some away.

        >>> nothing = np.zeros(0)
        >>> Labels("x", nothing, nothing, 2).smallest(4)
        4
        >>> Labels("x", nothing, nothing, 2, test_share=0.5).smallest(4)
        8
        """
        if self.test_share is None:
            return min_size
        size = min_size + 1
        while size - tested(size, self.test_share) < min_size:
            size += 1
        return size

    @property
    def totals(self) -> Integers:
        """Training samples of each class."""
        return np.bincount(self.train, minlength=self.classes or 0)


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in `Labels.train` and `Labels.test` for each client, in ascending order.

    `groups` is the ground-truth group of each client, where the partition makes any. `levels` (levels, clients)
    are nested ground-truth groups, coarsest first and ending in `groups`. `notes` are sentences about what had to
    give way. `copy_of` says which clients are copies of an earlier one (-1: none), in published protocols
    that make some.
    """

    train: tuple[Integers, ...]
    test: tuple[Integers, ...]
    groups: Integers | None = None
    notes: tuple[str, ...] = ()
    levels: Integers | None = None
    copy_of: Integers | None = None


def tested(size: int, share: float) -> int:
    """How many of a client's `size` samples are for testing: about `share`, one at least, and one stays.

    >>> [tested(size, 0.2) for size in (2, 5, 8, 100)]
    [1, 1, 2, 20]
    """
    return min(max(round(share * size), 1), size - 1)


PartitionFunction = Callable[[Labels, PartitionSettings, Any, int, np.random.Generator], Partition]
_SIGNATURE = ("labels", "settings", "options", "clients", "rng")


@dataclass(frozen=True)
class Partitioner:
    """A registered partition: what it cannot do is refused before, what it must keep is checked after.

    `options` is the dataclass that `split` is given besides the settings of all partitions. The rest: see `partition`.
    """

    name: str
    split: PartitionFunction
    needs_classes: bool = False
    mixes: bool = False
    fedbase: PartitionFunction | None = None
    cached: bool = False
    options: type = NoOptions

    @property
    def origin(self) -> PartitionFunction:
        """The function that was registered, by which its import path is recognised."""
        return self.split

    def __call__(
        self, labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator
    ) -> Partition:
        if settings.compat != "none":
            return self._published(labels, settings, clients, rng)
        self._refuse_impossible(labels, settings, clients)
        partition = self.split(labels, settings, read_options(self.options, settings), clients, rng)
        self._refuse_incomplete(partition, clients)
        smallest = min(range(clients), key=lambda client: len(partition.train[client]))
        if len(partition.train[smallest]) < settings.min_size:
            raise UserError(
                f"partition={self.name} leaves client {smallest} of {clients} with "
                f"{len(partition.train[smallest])} training samples, fewer than partition.min_size="
                f"{settings.min_size}: ask for fewer clients or a smaller partition.min_size.",
                code="too-few-samples", partition=self.name, clients=clients,
            )  # fmt: skip
        return partition

    def _published(
        self, labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator
    ) -> Partition:
        if self.fedbase is None:
            known = [name for name, entry in PARTITIONS.items() if entry.value.fedbase is not None]
            raise UserError(
                f"partition.compat={settings.compat} repeats a published protocol that has no partition={self.name}: "
                f"use {' or '.join(known)}, or leave partition.compat out.",
                code="incompatible", settings=("partition.compat", "partition"),
            )  # fmt: skip
        if labels.test_share is not None:
            raise UserError(
                f"partition.compat={settings.compat} divides the official training and test samples: leave "
                "partition.test_share out.",
                code="incompatible", settings=("partition.compat", "partition.test_share"),
            )  # fmt: skip
        self._refuse_regression(labels)
        return self.fedbase(labels, settings, read_options(self.options, settings), clients, rng)

    def _refuse_incomplete(self, made: Partition, clients: int) -> None:
        if not isinstance(made, Partition):
            raise UserError(
                f"Expected partition={self.name} to return an archipelago.data.Partition, got {type(made).__name__}: "
                "return one (`hand_out` makes it).",
                code="wrong-result", name=self.name,
            )  # fmt: skip
        if not len(made.train) == len(made.test) == clients:
            raise UserError(
                f"Expected partition={self.name} to give samples to clients={clients}, got {len(made.train)} to train "
                f"and {len(made.test)} to test on: return as many of each as there are clients.",
                code="wrong-result", name=self.name, clients=clients,
            )  # fmt: skip

    def _refuse_regression(self, labels: Labels) -> None:
        if self.needs_classes and labels.classes is None:
            others = [name for name, entry in PARTITIONS.items() if not entry.value.needs_classes]
            raise UserError(
                f"partition={self.name} divides samples by class, but the targets of '{labels.name}' are "
                f"real numbers: use partition={' or '.join(others)}.",
                code="needs-classes", setting=f"partition={self.name}",
            )  # fmt: skip

    def _refuse_impossible(self, labels: Labels, settings: PartitionSettings, clients: int) -> None:
        self._refuse_regression(labels)
        train, test, each = len(labels.train), len(labels.test), labels.smallest(settings.min_size)
        if clients * each > train:
            remedies = []
            if each <= train:
                remedies.append(f"at most {train // each} clients")
            if settings.min_size > 1:
                remedies.append("a smaller partition.min_size")
            share = f" and partition.test_share={labels.test_share}" if labels.test_share is not None else ""
            kind = "" if share else "training "
            raise UserError(
                f"clients={clients} with partition.min_size={settings.min_size}{share} need "
                f"{clients * each} {kind}samples, but '{labels.name}' has {train}: ask for "
                f"{' or '.join(remedies) or 'fewer clients'}.",
                code="too-few-samples", clients=clients, samples=train,
            )  # fmt: skip
        if clients > test:
            raise UserError(
                f"clients={clients} need a test sample each, but '{labels.name}' has {test} of them: ask for "
                f"at most {test} clients, or for partition.test_share=0.2, which tests on samples of the "
                "training part too.",
                code="too-few-samples", clients=clients, samples=test,
            )  # fmt: skip


class Partitions(Registry[Partitioner]):
    """All partitions."""

    def adopt(self, path: str, about: str, found: Any) -> None:
        partition(path, about)(found)


PARTITIONS = Partitions("partition", section="partition")


def partition(
    name: str,
    about: str,
    *,
    label: str = "",
    needs_classes: bool = False,
    mixes: bool = False,
    fedbase: PartitionFunction | None = None,
    cached: bool = False,
) -> Callable[[PartitionFunction], PartitionFunction]:
    """Decorator: register a function `(labels, settings, options, clients, rng)`, with one line about it.

    `needs_classes`: it divides by class, and is refused for a regression. `mixes`: its clients hold samples of several
    ground-truth sources (else a client's samples are all of one kind, and feature shifts go by client). `fedbase`: the
    published protocol that `compat=fedbase` stands for. `cached`: what it made may be read from the partition cache,
    which does not see that the code has changed. `label` is what tables call it.
    """

    def add(split: PartitionFunction) -> PartitionFunction:
        options = options_of(f"partition '{name}'", split, _SIGNATURE)
        made = Partitioner(name, split, needs_classes, mixes, fedbase, cached, options)
        PARTITIONS.register(name, about, label=label, options=options)(made)
        return split

    return add


# Options that several partitions share ----------------------------------------------------------------------


@dataclass
class AlphaOptions:
    """`partition.alpha=...`"""

    alpha: float = setting(
        0.1, "Dirichlet concentration: over clients, or over groups in cluster-wise partitions", above=0
    )


@dataclass
class AlphaWithinOptions:
    """`partition.alpha_within=...`"""

    alpha_within: float = setting(10.0, "Dirichlet concentration inside a group (cluster-wise)", above=0)


@dataclass
class ClassesOptions:
    """`partition.classes=...`"""

    classes: int = setting(2, "classes per client, or per group in cluster-wise partitions", at_least=1)


@dataclass
class GroupOptions:
    """`partition.groups=...` or `partition.group_sizes=...`"""

    groups: int = setting(4, "ground-truth groups of clients (cluster-wise)", at_least=1)
    group_sizes: list[int] = setting(
        [], "clients of each ground-truth group, instead of even `groups`, as [10,10,30]", at_least=1
    )


@dataclass
class ClusterDirichletOptions(GroupOptions, AlphaWithinOptions, AlphaOptions):
    """`partition.groups=10 partition.alpha=0.1 partition.alpha_within=10`"""


@dataclass
class ClusterClassesOptions(GroupOptions, ClassesOptions):
    """`partition.groups=10 partition.classes=3 partition.classes_within=2`"""

    classes_within: int = setting(2, "classes per client inside a group (cluster-wise)", at_least=1)
