"""Partitions by label: IID, quantity skew, and the client-wise and cluster-wise settings of the papers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions
from archipelago.core.settings import PartitionSettings
from archipelago.data import partitions_fedbase as published
from archipelago.data.apportion import Integers, apportion, apportion_rows
from archipelago.data.partitions_core import (
    AlphaOptions,
    ClassesOptions,
    ClusterClassesOptions,
    ClusterDirichletOptions,
    Labels,
    Partition,
    partition,
)
from archipelago.data.partitions_dealing import Shares, blocks, ground_truth_groups, hand_out, refuse_classes

# How often proportions are drawn again before the best draw is mended or refused.
REDRAWS = 20
# With more clients than this below the minimum in one draw, no redraw has a chance to help.
HOPELESS = 20
# A draw of groups counts as lopsided, and is repeated, while the smallest group holds less than this
# part of an even share (as in the published code of the cluster-wise partitions).
SMALLEST_GROUP = 0.3


@partition(
    "iid",
    "random samples, evenly; of one ground-truth source per client where there are sources",
    needs_classes=False,
    cached=True,
)
def iid(
    labels: Labels, settings: PartitionSettings, options: NoOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """Training samples at random in equal numbers; client i of M draws from source i * S // M."""
    train = np.zeros(len(labels.train), dtype=np.int64) if labels.classes is None else labels.train
    test = np.zeros(len(labels.test), dtype=np.int64) if labels.classes is None else labels.test
    classes = labels.classes or 1
    groups = None
    sources, source_of_sample = 1, np.zeros(len(train), dtype=np.int64)
    if labels.sources_train is not None and labels.sources_test is not None:
        names, source_of_sample = np.unique(labels.sources_train, return_inverse=True)
        sources = len(names)
        if sources > clients:
            raise UserError(
                f"'{labels.name}' has {sources} ground-truth sources and partition=iid gives a client samples of "
                f"one: ask for at least {sources} clients, not {clients}.",
                code="too-few-clients", name=labels.name, sources=sources, clients=clients,
            )  # fmt: skip
        known = np.isin(labels.sources_test, names)
        test = np.searchsorted(names, labels.sources_test) * classes + test
        # Test samples of a source that nobody trains on go to a stratum of their own, which nobody gets.
        test = np.where(known, test, sources * classes)
        groups = blocks(clients, sources)
    strata = source_of_sample * classes + train
    counts = np.zeros((sources * classes + 1, clients), dtype=np.int64)
    for source in range(sources):
        members = np.arange(clients) if groups is None else np.flatnonzero(groups == source)
        samples = rng.permutation(np.flatnonzero(source_of_sample == source))
        np.add.at(counts, (strata[samples], members[np.arange(len(samples)) % len(members)]), 1)
    return hand_out(labels, counts, rng, strata=(strata, test), groups=groups)


@partition(
    "quantity",
    "quantity skew: sizes by Dirichlet(alpha) over clients, samples at random",
    needs_classes=False,
    cached=True,
)
def quantity(
    labels: Labels, settings: PartitionSettings, options: AlphaOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """Clients of very different size (Dirichlet(alpha) over clients) that all see the same distribution."""
    strata = (labels.train, labels.test)
    if labels.classes is None:
        strata = (np.zeros(len(labels.train), dtype=np.int64), np.zeros(len(labels.test), dtype=np.int64))
    total, minimum = np.array([len(labels.train)]), labels.smallest(settings.min_size)
    drawn, notes = draw_counts(
        lambda: dirichlet_shares(rng, options.alpha, 1, clients), total, minimum, settings.min_size, rng
    )
    owner = rng.permutation(np.repeat(np.arange(clients), drawn[0]))
    counts = np.zeros((labels.classes or 1, clients), dtype=np.int64)
    np.add.at(counts, (strata[0], owner), 1)
    return hand_out(labels, counts, rng, strata=strata, notes=notes)


@partition(
    "dirichlet",
    "client-wise: each class is split over all clients by Dirichlet(alpha)",
    needs_classes=True,
    cached=True,
    fedbase=published.published_dirichlet,
)
def dirichlet(
    labels: Labels, settings: PartitionSettings, options: AlphaOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """For each class, shares of the clients drawn from a symmetric Dirichlet distribution."""
    totals = labels.totals
    minimum = labels.smallest(settings.min_size)
    counts, notes = draw_counts(
        lambda: dirichlet_shares(rng, options.alpha, len(totals), clients),
        *(totals, minimum, settings.min_size, rng),
    )
    return hand_out(labels, counts, rng, notes=notes)


@partition(
    "cluster_dirichlet",
    "cluster-wise: classes over groups by Dirichlet(alpha), then over clients by Dirichlet(alpha_within)",
    needs_classes=True,
    cached=True,
    fedbase=published.published_cluster_dirichlet,
)
def cluster_dirichlet(
    labels: Labels,
    settings: PartitionSettings,
    options: ClusterDirichletOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """Groups that differ (small alpha) of clients that are alike (large alpha_within)."""
    groups = ground_truth_groups(options, clients)
    totals = labels.totals
    members = [np.flatnonzero(groups == group) for group in range(int(groups[-1]) + 1)]
    even_share = np.array([len(ids) for ids in members]) / clients
    # Skewed groups hold, in expectation, data in proportion to their clients.
    alpha = options.alpha * even_share * len(members) if options.group_sizes else options.alpha

    def draw() -> Shares:
        best, best_size = np.empty(0), -1.0
        for _ in range(REDRAWS):
            over_groups = dirichlet_shares(rng, alpha, len(totals), len(members))
            size = float((totals @ over_groups / totals.sum() / even_share).min())
            if size > best_size:
                best, best_size = over_groups, size
            if best_size >= SMALLEST_GROUP:
                break
        shares = np.empty((len(totals), clients))
        for group, ids in enumerate(members):
            within = dirichlet_shares(rng, options.alpha_within, len(totals), len(ids))
            shares[:, ids] = best[:, [group]] * within
        return shares

    minimum = labels.smallest(settings.min_size)
    counts, notes = draw_counts(draw, totals, minimum, settings.min_size, rng)
    return hand_out(labels, counts, rng, groups=groups, notes=notes)


@partition(
    "n_class",
    "client-wise: each client holds samples of `classes` random classes",
    needs_classes=True,
    cached=True,
    fedbase=published.published_n_class,
)
def n_class(
    labels: Labels,
    settings: PartitionSettings,
    options: ClassesOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """Each client picks its classes; a class is split evenly over the clients that picked it."""
    totals = labels.totals
    present = np.flatnonzero(totals)
    refuse_classes("partition.classes", options.classes, len(present), f"classes of '{labels.name}'")

    def draw() -> Shares:
        owns = np.zeros((len(totals), clients), dtype=bool)
        owns[present] = pick(rng, clients, len(present), options.classes).T
        return owns / np.maximum(owns.sum(axis=1, keepdims=True), 1)

    counts = _draw_whole("n_class", draw, totals, labels, settings)
    return hand_out(labels, counts, rng)


@partition(
    "cluster_n_class",
    "cluster-wise: each group holds `classes` random classes, each client `classes_within` of those",
    needs_classes=True,
    cached=True,
    fedbase=published.published_cluster_n_class,
)
def cluster_n_class(
    labels: Labels,
    settings: PartitionSettings,
    options: ClusterClassesOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """A class is split evenly over the groups that hold it, then over the clients that picked it there."""
    groups = ground_truth_groups(options, clients)
    totals = labels.totals
    present = np.flatnonzero(totals)
    refuse_classes("partition.classes", options.classes, len(present), f"classes of '{labels.name}'")
    refuse_classes(
        "partition.classes_within",
        options.classes_within,
        options.classes,
        "classes of a group (partition.classes)",
    )

    def draw() -> Shares:
        shares = np.zeros((len(totals), clients))
        for group, picked in enumerate(pick(rng, int(groups[-1]) + 1, len(present), options.classes)):
            ids = np.flatnonzero(groups == group)
            owns = pick(rng, len(ids), options.classes, options.classes_within).T
            # Skewed groups that hold the same class share it in proportion to their clients.
            weight = len(ids) if options.group_sizes else 1
            shares[np.ix_(present[picked], ids)] = (
                weight * owns / np.maximum(owns.sum(axis=1, keepdims=True), 1)
            )
        # Dividing by the groups in which somebody holds the class keeps all of it in use.
        return shares / np.maximum(shares.sum(axis=1, keepdims=True), 1)

    counts = _draw_whole("cluster_n_class", draw, totals, labels, settings)
    return hand_out(labels, counts, rng, groups=groups)


def dirichlet_shares(
    rng: np.random.Generator, alpha: float | NDArray[np.float64], rows: int, columns: int
) -> Shares:
    """(rows, columns) shares, each row drawn from a Dirichlet distribution (one alpha, or one per column)."""
    # Beyond 1e12 the shares are equal to every digit that matters; near 1e305 NumPy's sum overflows.
    return rng.dirichlet(np.minimum(np.broadcast_to(alpha, columns), 1e12), size=rows)


def pick(rng: np.random.Generator, pickers: int, things: int, each: int) -> NDArray[np.bool_]:
    """`each` random things for every picker, all of them picked where that can be: (pickers, things)."""
    picked = np.zeros((pickers, things), dtype=bool)
    np.put_along_axis(picked, rng.random((pickers, things)).argsort(axis=1)[:, :each], True, axis=1)
    for thing in np.flatnonzero(~picked.any(axis=0)):
        crowded = int(picked.sum(axis=0).argmax())
        holders = np.flatnonzero(picked[:, crowded])
        if len(holders) < 2:
            break
        giver = rng.choice(holders)
        picked[giver, crowded], picked[giver, thing] = False, True
    return picked


def draw_counts(
    draw: Callable[[], Shares], totals: Integers, minimum: int, min_size: int, rng: np.random.Generator
) -> tuple[Integers, tuple[str, ...]]:
    """Counts (classes, clients) from drawn shares: redrawn a bounded number of times, then topped up.

    `minimum` samples go to every client, so that it has `min_size` of them to train on.
    """
    best: tuple[int, Shares, Integers] | None = None
    for _ in range(REDRAWS):
        shares = draw()
        counts = apportion_rows(totals, shares)
        short = int((counts.sum(axis=0) < minimum).sum())
        if best is None or short < best[0]:
            best = short, shares, counts
        if short == 0 or short > HOPELESS:
            break
    assert best is not None
    short, shares, counts = best
    if short == 0:
        return counts, ()
    topped = _top_up(counts, shares, minimum, rng)
    moved = int(np.abs(topped - counts).sum()) // 2
    note = (
        f"{short} of {len(counts[0])} clients drew fewer than partition.min_size={min_size} training samples: "
        f"{moved} samples of larger clients were given to them"
    )
    return topped, (note,)


def _top_up(counts: Integers, shares: Shares, minimum: int, rng: np.random.Generator) -> Integers:
    """Bring every client to `minimum` samples, of the classes it drew most of, taken from larger clients.

    Always possible where there are `minimum` samples per client at all: what the larger clients can spare
    adds up to at least what is missing.
    """
    sizes = counts.sum(axis=0)
    spare = np.zeros_like(counts)
    for client in np.flatnonzero(sizes > minimum):
        spare[:, client] = apportion(int(sizes[client]) - minimum, counts[:, client])
    pool = spare.sum(axis=1)
    given = np.zeros_like(counts)
    for client in np.flatnonzero(sizes < minimum):
        missing = minimum - int(sizes[client])
        for row in np.lexsort((rng.random(len(pool)), -shares[:, client])):
            take = min(missing, int(pool[row]))
            given[row, client] += take
            pool[row] -= take
            missing -= take
            if missing == 0:
                break
    taken = np.stack(
        [apportion(int(total), row) for total, row in zip(given.sum(axis=1), spare, strict=True)]
    )
    return counts + given - taken


def _draw_whole(
    name: str, draw: Callable[[], Shares], totals: Integers, labels: Labels, settings: PartitionSettings
) -> Integers:
    """As `draw_counts`, where it is fixed who holds what: every share must be worth a sample, or is refused."""
    minimum = labels.smallest(settings.min_size)
    for _ in range(REDRAWS):
        shares = draw()
        counts = apportion_rows(totals, shares)
        small, lost = counts.sum(axis=0) < minimum, (counts == 0) & (shares > 0)
        short = int((small | lost.any(axis=0)).sum())
        if short == 0:
            return counts
        if short > HOPELESS:
            break
    if lost.any():
        worst = int(lost.sum(axis=1).argmax())
        why = (
            f"class {worst} has {totals[worst]} training samples for the "
            f"{int((shares[worst] > 0).sum())} clients that picked it"
        )
    else:
        fewest = int(counts.sum(axis=0).min())
        why = f"some clients hold only {fewest} training samples (partition.min_size={settings.min_size})"
    raise UserError(
        f"partition={name} with {shares.shape[1]} clients: {why}, and drawing again did not help: ask for "
        "fewer clients, other class numbers, or a smaller partition.min_size.",
        code="too-few-samples", partition=name,
    )  # fmt: skip
