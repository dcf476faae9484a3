"""FeMAM's partitions: balanced Dirichlet, clusters of overlapping classes, and nested levels of groups.

Chen, Zhou, Long, Ma, Jiang, Zhang: "Multi-Level Additive Modeling for Structured Non-IID Federated Learning",
arXiv 2405.16472, and its released code. Two readings: the code divides the pool of training and test samples in
its client-wise setting (`partition.test_share` does), and seeds the split of a class with the class's number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.settings import PartitionSettings, setting
from archipelago.data.apportion import Integers, apportion, apportion_at_least
from archipelago.data.partitions_core import (
    AlphaOptions,
    AlphaWithinOptions,
    ClassesOptions,
    GroupOptions,
    Labels,
    Partition,
    partition,
)
from archipelago.data.partitions_dealing import Shares, ground_truth_groups, hand_out, refuse_classes
from archipelago.data.partitions_labels import REDRAWS, dirichlet_shares, draw_counts


@partition(
    "balanced_dirichlet",
    "client-wise Dirichlet(alpha) that gives no more to clients that have an even share already (FeMAM, FeSEM)",
    needs_classes=True,
    cached=True,
)
def balanced_dirichlet(
    labels: Labels, settings: PartitionSettings, options: AlphaOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """Class after class by Dirichlet(alpha), over the clients that hold less than N / clients samples so far."""
    totals = labels.totals
    even = len(labels.train) / clients

    def draw() -> Shares:
        shares = dirichlet_shares(rng, options.alpha, len(totals), clients)
        sizes = np.zeros(clients, dtype=np.int64)
        for row, total in enumerate(totals):
            shares[row] *= sizes < even
            if not shares[row].any():  # all that is left of the shares belongs to clients that are full
                shares[row] = sizes < even
            sizes += apportion(int(total), shares[row], ties=sizes)
        return shares

    minimum = labels.smallest(settings.min_size)
    counts, notes = draw_counts(draw, totals, minimum, settings.min_size, rng)
    return hand_out(labels, counts, rng, notes=notes)


@dataclass
class OverlapOptions(GroupOptions, AlphaWithinOptions, ClassesOptions):
    """`partition.groups=10 partition.classes=5 partition.alpha_within=10`"""


@partition(
    "femam_cluster",
    "FeMAM's cluster-wise (c, 5): groups of random size hold `classes` classes each, dealt so that they overlap",
    needs_classes=True,
    cached=True,
)
def femam_cluster(
    labels: Labels,
    settings: PartitionSettings,
    options: OverlapOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """Classes dealt to groups from a deck; a class is split over all clients of its groups by Dirichlet."""
    present = np.flatnonzero(labels.totals)
    refuse_classes("partition.classes", options.classes, len(present), f"classes of '{labels.name}'")
    if options.group_sizes:
        groups = ground_truth_groups(options, clients)
    else:
        groups = np.repeat(np.arange(options.groups), _uneven_sizes(options.groups, clients, rng))
    owns = np.zeros((len(labels.totals), clients), dtype=bool)
    for group, held in enumerate(_dealt(present, int(groups[-1]) + 1, options.classes, rng)):
        owns[np.ix_(held, np.flatnonzero(groups == group))] = True
    counts = _split_classes("femam_cluster", labels, settings, options, owns, rng)
    return hand_out(labels, counts, rng, groups=groups.astype(np.int64))


@dataclass
class LevelOptions(AlphaWithinOptions):
    """`partition.level_groups=[2,5,9] partition.level_classes=[19,7,3]`"""

    level_groups: list[int] = setting([2, 4], "multilevel: groups of each level, coarse to fine", at_least=1)
    level_classes: list[int] = setting(
        [1, 2], "multilevel: classes of a group's own at each level", at_least=1
    )


@partition(
    "multilevel",
    "FeMAM's nested levels: at every level a client's group gives it classes that no other group has",
    needs_classes=True,
    cached=True,
)
def multilevel(
    labels: Labels, settings: PartitionSettings, options: LevelOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """`level_groups` groups per level, coarse to fine, nested; each group of level l owns `level_classes[l]`.

    A client holds the classes of its groups at all levels. CIFAR-100: [2,5,9] with [19,7,3] ("259") or [3,6,11]
    with [14,6,2] ("3611"); Tiny ImageNet: [4,13,21] with [20,6,2] or [9,15,22] with [9,5,2].
    """
    present = np.flatnonzero(labels.totals)
    _refuse_levels(labels, options, clients, len(present))
    levels = _nested(options.level_groups, clients, rng)
    deck = rng.permutation(present)
    owns = np.zeros((len(labels.totals), clients), dtype=bool)
    for row, (count, each) in enumerate(zip(options.level_groups, options.level_classes, strict=True)):
        held, deck = deck[: count * each].reshape(count, each), deck[count * each :]
        owns[held[levels[row]].T, np.arange(clients)] = True
    counts = _split_classes("multilevel", labels, settings, options, owns, rng)
    return hand_out(labels, counts, rng, groups=levels[-1], levels=levels)


def _refuse_levels(labels: Labels, options: LevelOptions, clients: int, present: int) -> None:
    groups, classes = options.level_groups, options.level_classes
    if not groups or len(groups) != len(classes):
        raise UserError(
            "partition=multilevel needs partition.level_groups and partition.level_classes of one length, such as "
            f"[2,5,9] and [19,7,3], got {groups} and {classes}.",
            code="unequal-lengths", groups=groups, classes=classes,
        )  # fmt: skip
    if sorted(groups) != list(groups) or 2 * groups[-1] > clients:
        raise UserError(
            "partition.level_groups go from few to many groups, of at least two clients each, got "
            f"{groups} and clients={clients}.",
            code="out-of-range", setting="partition.level_groups", given=groups,
        )  # fmt: skip
    wanted = sum(count * each for count, each in zip(groups, classes, strict=True))
    if wanted > present:
        raise UserError(
            f"partition.level_groups={groups} with partition.level_classes={classes} take {wanted} classes (groups x "
            f"classes, added up), but '{labels.name}' has {present}: ask for fewer.",
            code="too-many", setting="partition.level_classes", given=wanted, most=present,
        )  # fmt: skip


def _nested(counts: list[int], clients: int, rng: np.random.Generator) -> Integers:
    """(levels, clients): nested groups of consecutive clients; the finest have at least two clients."""

    def cut(things: int, groups: int, least: int) -> Integers:
        extra = rng.multinomial(things - least * groups, np.full(groups, 1 / groups))
        return np.repeat(np.arange(groups, dtype=np.int64), least + extra)

    levels = [cut(clients, counts[-1], 2)]
    for finer, coarser in zip(counts[:0:-1], counts[-2::-1], strict=True):
        levels.append(cut(finer, coarser, 1)[levels[-1]])
    return np.stack(levels[::-1])


def _uneven_sizes(groups: int, clients: int, rng: np.random.Generator) -> Integers:
    """Clients per group: uniform numbers, smoothed by a moving average of three, at least two each."""
    if 2 * groups > clients:
        raise UserError(
            f"partition=femam_cluster gives every group two clients: ask for at least {2 * groups} clients, or at "
            f"most {clients // 2} groups.",
            code="too-few-clients",
        )
    drawn = np.convolve(np.pad(rng.random(groups), 1), np.full(3, 1 / 3), mode="valid")
    return apportion_at_least(clients, drawn, np.full(groups, 2))


def _dealt(classes: Integers, groups: int, each: int, rng: np.random.Generator) -> list[Integers]:
    """`each` different classes for every group, from a deck that is shuffled anew when it is used up."""
    hands: list[Integers] = []
    deck: list[int] = []
    for _ in range(groups):
        hand: list[int] = []
        while len(hand) < each:
            if not set(deck) - set(hand):
                deck += rng.permutation(classes).tolist()
            hand.append(deck.pop(next(i for i, name in enumerate(deck) if name not in hand)))
        hands.append(np.array(hand, dtype=np.int64))
    return hands


def _split_classes(
    name: str,
    labels: Labels,
    settings: PartitionSettings,
    options: AlphaWithinOptions,
    owns: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Integers:
    """Each class over the clients that own it by Dirichlet(alpha_within), one sample each at least if it can be."""
    minimum, totals = labels.smallest(settings.min_size), labels.totals
    fewest = 0
    for _ in range(REDRAWS):
        counts = np.zeros(owns.shape, dtype=np.int64)
        for row in np.flatnonzero(owns.any(axis=1)):
            ids = np.flatnonzero(owns[row])
            shares = dirichlet_shares(rng, options.alpha_within, 1, len(ids))[0]
            floor = np.full(len(ids), int(totals[row] >= len(ids)))
            counts[row, ids] = apportion_at_least(int(totals[row]), shares, floor)
        fewest = int(counts.sum(axis=0).min())
        if fewest >= minimum:
            return counts
    raise UserError(
        f"partition={name} with {owns.shape[1]} clients: some clients hold only {fewest} samples (partition.min_size="
        f"{settings.min_size}), and drawing again did not help: ask for fewer clients or a larger "
        "partition.alpha_within.",
        code="too-few-samples", partition=name,
    )  # fmt: skip
