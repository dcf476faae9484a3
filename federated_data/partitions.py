"""Partitions: which client holds which samples, as pure functions of labels, settings and a generator.

All of them are exact (largest remainder, no sample twice, none lost that the method can place), give a
client's test samples in the proportions of its training samples, and carry the planted groups along.
A partition of your own is one decorated function:

    @partition("mine", "what it is, in one line", needs_classes=True)
    def mine(labels: Labels, settings: PartitionSettings, clients: int, rng: Generator) -> Partition:
        ...
        return hand_out(labels.train, labels.test, counts, rng)     # counts: (classes, clients)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federated_data.apportion import Integers, apportion, apportion_at_least, apportion_rows
from foundation.errors import UserError
from foundation.registry import Registry
from foundation.settings import PartitionSettings

Shares = NDArray[np.float64]

# How often proportions are drawn again before the best draw is mended or refused.
REDRAWS = 20
# With more clients than this below the minimum in one draw, no redraw has a chance to help.
HOPELESS = 20
# A draw of groups counts as lopsided, and is repeated, while the smallest group holds less than this
# part of an even share (as in the published code of the cluster-wise partitions).
SMALLEST_GROUP = 0.3


@dataclass(frozen=True, eq=False)
class Labels:
    """All that a partition may look at: labels and planted sources, never the samples themselves."""

    name: str
    train: NDArray[Any]
    test: NDArray[Any]
    classes: int | None
    sources_train: Integers | None = None
    sources_test: Integers | None = None


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in the training and in the test set for each client, in ascending order.

    `groups` is the planted group of each client, where the partition plants any; `notes` are sentences
    about what had to give way.
    """

    train: tuple[Integers, ...]
    test: tuple[Integers, ...]
    groups: Integers | None = None
    notes: tuple[str, ...] = ()


PartitionFunction = Callable[[Labels, PartitionSettings, int, np.random.Generator], Partition]


@dataclass(frozen=True)
class Partitioner:
    """A registered partition: what it cannot do is refused before, what it must keep is checked after."""

    name: str
    split: PartitionFunction
    needs_classes: bool

    def __call__(
        self, labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator
    ) -> Partition:
        self._refuse_impossible(labels, settings, clients)
        partition = self.split(labels, settings, clients, rng)
        smallest = min(range(clients), key=lambda client: len(partition.train[client]))
        if len(partition.train[smallest]) < settings.min_size:
            raise UserError(
                f"partition={self.name} leaves client {smallest} of {clients} with "
                f"{len(partition.train[smallest])} training samples, fewer than partition.min_size="
                f"{settings.min_size}: ask for fewer clients or a smaller partition.min_size."
            )
        return partition

    def _refuse_impossible(self, labels: Labels, settings: PartitionSettings, clients: int) -> None:
        train, test = len(labels.train), len(labels.test)
        if self.needs_classes and labels.classes is None:
            others = [name for name, entry in PARTITIONS.items() if not entry.value.needs_classes]
            raise UserError(
                f"partition={self.name} divides samples by class, but the targets of '{labels.name}' are "
                f"real numbers: use partition={' or '.join(others)}."
            )
        if clients * settings.min_size > train:
            remedies = []
            if settings.min_size <= train:
                remedies.append(f"at most {train // settings.min_size} clients")
            if settings.min_size > 1:
                remedies.append("a smaller partition.min_size")
            raise UserError(
                f"clients={clients} with partition.min_size={settings.min_size} need "
                f"{clients * settings.min_size} training samples, but '{labels.name}' has {train}: ask for "
                f"{' or '.join(remedies)}."
            )
        if clients > test:
            raise UserError(
                f"clients={clients} need a test sample each, but '{labels.name}' has {test} of them: ask for "
                f"at most {test} clients."
            )


PARTITIONS: Registry[Partitioner] = Registry("partition")


def partition(
    name: str, about: str, *, needs_classes: bool
) -> Callable[[PartitionFunction], PartitionFunction]:
    """Decorator: register a partition function, with one line about it."""

    def add(split: PartitionFunction) -> PartitionFunction:
        PARTITIONS.register(name, about)(Partitioner(name, split, needs_classes))
        return split

    return add


def blocks(clients: int, groups: int) -> Integers:
    """The group of each client: consecutive blocks, as even as possible.

    >>> blocks(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    return np.arange(clients, dtype=np.int64) * groups // clients


def hand_out(
    train_strata: Integers,
    test_strata: Integers,
    counts: Integers,
    rng: np.random.Generator,
    *,
    groups: Integers | None = None,
    notes: tuple[str, ...] = (),
) -> Partition:
    """Deal samples so that client i trains on `counts[s, i]` random ones of stratum s (usually: class s).

    Test samples follow the same proportions (see `matching_test_counts`).
    """
    test_counts = matching_test_counts(counts, np.bincount(test_strata, minlength=len(counts)))
    unused = len(train_strata) - int(counts.sum())
    if unused:
        notes = (*notes, f"{unused} training samples of classes that no client holds are not used")
    return Partition(
        train=_deal(train_strata, counts, rng),
        test=_deal(test_strata, test_counts, rng),
        groups=groups,
        notes=notes,
    )


def _deal(strata: Integers, counts: Integers, rng: np.random.Generator) -> tuple[Integers, ...]:
    """Random samples of each stratum for each client, `counts[s, i]` of them; none twice."""
    rows, clients = counts.shape
    sizes = np.bincount(strata, minlength=rows)
    order = rng.permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    rank = np.arange(len(strata)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = order[rank < np.repeat(counts.sum(axis=1), sizes)]
    owner = np.repeat(np.tile(np.arange(clients), rows), counts.ravel())
    order = order[np.lexsort((order, owner))].astype(np.int64)
    ends = np.cumsum(counts.sum(axis=0))
    return tuple(order[end - size : end] for end, size in zip(ends, counts.sum(axis=0), strict=True))


def matching_test_counts(train: Integers, totals: Integers) -> Integers:
    """Test samples per stratum and client, in the proportions of the training samples: (strata, clients).

    A client is tested only on what it trains on. Where a stratum has a test sample for each of its owners,
    each gets one at least, so that label supports are equal; where it has not, its samples go first to
    clients that would have none at all (a maximum flow finds who), then by largest remainder.
    """
    owners = train > 0
    floor = owners & (totals >= owners.sum(axis=1))[:, None]
    bare = np.flatnonzero(~floor.any(axis=0))
    if bare.size:
        scarce = np.flatnonzero(~floor.any(axis=1) & owners.any(axis=1))
        floor[np.ix_(scarce, bare)] = _cover(owners[np.ix_(scarce, bare)], totals[scarce])
        bare = np.flatnonzero(~floor.any(axis=0))
    if bare.size:
        raise UserError(
            f"{bare.size} of {train.shape[1]} clients (client {bare[0]} first) would have no test sample of "
            "any class they train on: ask for fewer clients, a less skewed partition, or a larger test set."
        )
    counts = np.zeros_like(train)
    sizes = np.zeros(train.shape[1], dtype=np.int64)
    for row in np.flatnonzero(owners.any(axis=1)):
        counts[row] = apportion_at_least(
            int(totals[row]), train[row], floor[row].astype(np.int64), ties=sizes
        )
        sizes += counts[row]
    return counts


def _cover(owners: NDArray[np.bool_], totals: Integers) -> NDArray[np.bool_]:
    """One sample of an owned stratum for as many clients as the `totals` allow: (strata, clients)."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    rows, clients = owners.shape
    source, sink = rows + clients, rows + clients + 1
    row, client = np.nonzero(owners)
    tails = np.concatenate([np.full(rows, source), row, rows + np.arange(clients)])
    heads = np.concatenate([np.arange(rows), rows + client, np.full(clients, sink)])
    capacity = np.concatenate([totals, np.ones(len(row) + clients, dtype=np.int64)]).astype(np.int32)
    graph = csr_array((capacity, (tails, heads)), shape=(sink + 1, sink + 1), dtype=np.int32)
    flow = maximum_flow(graph, source, sink).flow.tocoo()
    covered = np.zeros(owners.shape, dtype=bool)
    used = (flow.data > 0) & (flow.row < rows)
    covered[flow.row[used], flow.col[used] - rows] = True
    return covered


@partition(
    "iid",
    "random samples, evenly; of one planted source per client where there are sources",
    needs_classes=False,
)
def iid(labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator) -> Partition:
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
                f"'{labels.name}' has {sources} planted sources and partition=iid gives a client samples of "
                f"one: ask for at least {sources} clients, not {clients}."
            )
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
    return hand_out(strata, test, counts, rng, groups=groups)


@partition(
    "dirichlet", "client-wise: each class is split over all clients by Dirichlet(alpha)", needs_classes=True
)
def dirichlet(
    labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator
) -> Partition:
    """For each class, shares of the clients drawn from a symmetric Dirichlet distribution."""
    totals = _class_totals(labels)
    counts, notes = _draw(
        lambda: _dirichlet(rng, settings.alpha, len(totals), clients), totals, settings.min_size, rng
    )
    return hand_out(labels.train, labels.test, counts, rng, notes=notes)


@partition(
    "cluster_dirichlet",
    "cluster-wise: classes over groups by Dirichlet(alpha), then over clients by Dirichlet(alpha_within)",
    needs_classes=True,
)
def cluster_dirichlet(
    labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator
) -> Partition:
    """Groups that differ (small alpha) of clients that are alike (large alpha_within)."""
    groups = _groups(settings, clients)
    totals = _class_totals(labels)
    members = [np.flatnonzero(groups == group) for group in range(settings.groups)]
    even_share = np.array([len(ids) for ids in members]) / clients

    def draw() -> Shares:
        best, best_size = np.empty(0), -1.0
        for _ in range(REDRAWS):
            over_groups = _dirichlet(rng, settings.alpha, len(totals), settings.groups)
            size = float((totals @ over_groups / totals.sum() / even_share).min())
            if size > best_size:
                best, best_size = over_groups, size
            if best_size >= SMALLEST_GROUP:
                break
        shares = np.empty((len(totals), clients))
        for group, ids in enumerate(members):
            within = _dirichlet(rng, settings.alpha_within, len(totals), len(ids))
            shares[:, ids] = best[:, [group]] * within
        return shares

    counts, notes = _draw(draw, totals, settings.min_size, rng)
    return hand_out(labels.train, labels.test, counts, rng, groups=groups, notes=notes)


@partition(
    "n_class", "client-wise: each client holds samples of `classes` random classes", needs_classes=True
)
def n_class(labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator) -> Partition:
    """Each client picks its classes; a class is split evenly over the clients that picked it."""
    totals = _class_totals(labels)
    present = np.flatnonzero(totals)
    _refuse_classes("partition.classes", settings.classes, len(present), f"classes of '{labels.name}'")

    def draw() -> Shares:
        owns = np.zeros((len(totals), clients), dtype=bool)
        owns[present] = _pick(rng, clients, len(present), settings.classes).T
        return owns / np.maximum(owns.sum(axis=1, keepdims=True), 1)

    counts = _draw_whole("n_class", draw, totals, settings.min_size)
    return hand_out(labels.train, labels.test, counts, rng)


@partition(
    "cluster_n_class",
    "cluster-wise: each group holds `classes` random classes, each client `classes_within` of those",
    needs_classes=True,
)
def cluster_n_class(
    labels: Labels, settings: PartitionSettings, clients: int, rng: np.random.Generator
) -> Partition:
    """A class is split evenly over the groups that hold it, then over the clients that picked it there."""
    groups = _groups(settings, clients)
    totals = _class_totals(labels)
    present = np.flatnonzero(totals)
    _refuse_classes("partition.classes", settings.classes, len(present), f"classes of '{labels.name}'")
    _refuse_classes(
        "partition.classes_within",
        settings.classes_within,
        settings.classes,
        "classes of a group (partition.classes)",
    )

    def draw() -> Shares:
        shares = np.zeros((len(totals), clients))
        for group, picked in enumerate(_pick(rng, settings.groups, len(present), settings.classes)):
            ids = np.flatnonzero(groups == group)
            owns = _pick(rng, len(ids), settings.classes, settings.classes_within).T
            shares[np.ix_(present[picked], ids)] = owns / np.maximum(owns.sum(axis=1, keepdims=True), 1)
        # Dividing by the number of groups in which somebody holds the class keeps all of it in use.
        return shares / np.maximum(shares.sum(axis=1, keepdims=True), 1)

    counts = _draw_whole("cluster_n_class", draw, totals, settings.min_size)
    return hand_out(labels.train, labels.test, counts, rng, groups=groups)


def _class_totals(labels: Labels) -> Integers:
    return np.bincount(labels.train, minlength=labels.classes or 0)


def _groups(settings: PartitionSettings, clients: int) -> Integers:
    if settings.groups > clients:
        raise UserError(
            f"partition.groups={settings.groups} is more than clients={clients}: every group needs a client."
        )
    return blocks(clients, settings.groups)


def _refuse_classes(key: str, given: int, most: int, of: str) -> None:
    if given > most:
        raise UserError(f"{key}={given} is more than the {most} {of}: ask for at most {most}.")


def _dirichlet(rng: np.random.Generator, alpha: float, rows: int, columns: int) -> Shares:
    # Beyond 1e12 the shares are equal to every digit that matters; near 1e305 NumPy's sum overflows.
    return rng.dirichlet(np.full(columns, min(alpha, 1e12)), size=rows)


def _pick(rng: np.random.Generator, pickers: int, things: int, each: int) -> NDArray[np.bool_]:
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


def _draw(
    draw: Callable[[], Shares], totals: Integers, minimum: int, rng: np.random.Generator
) -> tuple[Integers, tuple[str, ...]]:
    """Counts (classes, clients) from drawn shares: redrawn a bounded number of times, then topped up."""
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
        f"{short} of {len(counts[0])} clients drew fewer than partition.min_size={minimum} training samples: "
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


def _draw_whole(name: str, draw: Callable[[], Shares], totals: Integers, minimum: int) -> Integers:
    """As `_draw`, where it is fixed who holds what: every share must be worth a sample, or is refused."""
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
        why = f"some clients hold only {fewest} training samples (partition.min_size={minimum})"
    raise UserError(
        f"partition={name} with {shares.shape[1]} clients: {why}, and drawing again did not help: ask for "
        "fewer clients, other class numbers, or a smaller partition.min_size."
    )
