"""How samples are dealt out to clients, once it is known how many of which kind each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.data.apportion import Integers, apportion_at_least, apportion_groups, ranks
from archipelago.data.partitions_core import GroupOptions, Labels, Partition

Shares = NDArray[np.float64]


def blocks(clients: int, groups: int) -> Integers:
    """The group of each client: consecutive blocks, as even as possible.

    >>> blocks(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    return np.arange(clients, dtype=np.int64) * groups // clients


def ground_truth_groups(options: GroupOptions, clients: int) -> Integers:
    """The group of each client: blocks of `group_sizes` clients where they are given, else even ones."""
    sizes = options.group_sizes
    if sizes:
        if sum(sizes) != clients:
            raise UserError(
                f"partition.group_sizes={sizes} add up to {sum(sizes)}, but clients={clients}: set "
                f"clients={sum(sizes)}, or other sizes.",
                code="does-not-add-up", setting="partition.group_sizes", given=sizes, clients=clients,
            )  # fmt: skip
        return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    if options.groups > clients:
        raise UserError(
            f"partition.groups={options.groups} is more than clients={clients}: every group needs a client.",
            code="too-few-clients", clients=clients, groups=options.groups,
        )  # fmt: skip
    return blocks(clients, options.groups)


def refuse_classes(key: str, given: int, most: int, of: str) -> None:
    """A `UserError` if more classes are asked for than there are."""
    if given > most:
        raise UserError(
            f"{key}={given} is more than the {most} {of}: ask for at most {most}.",
            code="too-many", setting=key, given=given, most=most,
        )  # fmt: skip


def hand_out(
    labels: Labels,
    counts: Integers,
    rng: np.random.Generator,
    *,
    strata: tuple[Integers, Integers] | None = None,
    groups: Integers | None = None,
    levels: Integers | None = None,
    notes: tuple[str, ...] = (),
) -> Partition:
    """Deal samples so that client i gets `counts[s, i]` random training samples of stratum s.

    A stratum is a class, unless `strata` gives those of training and test samples. Test samples follow the
    same proportions (see `matching_test_counts`), or are a share of what the client got (`test_share`).
    """
    train_strata, test_strata = (labels.train, labels.test) if strata is None else strata
    unused = len(train_strata) - int(counts.sum())
    if unused:
        kind = "training samples" if labels.test_share is None else "samples"
        notes = (*notes, f"{unused} {kind} of classes that no client holds are not used")
    if labels.test_share is not None:
        held = deal(train_strata, counts, rng)
        train, test = set_aside(held, train_strata, labels.test_share, rng)
    else:
        test_counts = matching_test_counts(counts, np.bincount(test_strata, minlength=len(counts)))
        train, test = deal(train_strata, counts, rng), deal(test_strata, test_counts, rng)
    return Partition(train, test, groups, notes, levels)


def deal(strata: Integers, counts: Integers, rng: np.random.Generator) -> tuple[Integers, ...]:
    """Random samples of each stratum for each client, `counts[s, i]` of them; none twice."""
    rows, clients = counts.shape
    order = rng.permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    order = order[ranks(strata[order]) < counts.sum(axis=1)[strata[order]]]
    owner = np.repeat(np.tile(np.arange(clients), rows), counts.ravel())
    order = order[np.lexsort((order, owner))].astype(np.int64)
    return split_at(order, counts.sum(axis=0))


def split_at(positions: Integers, sizes: Integers) -> tuple[Integers, ...]:
    """Consecutive pieces of the given sizes."""
    ends = np.cumsum(sizes)
    return tuple(positions[end - size : end] for end, size in zip(ends, sizes, strict=True))


def set_aside(
    held: Sequence[Integers],
    strata: NDArray[Any],
    share: float,
    rng: np.random.Generator,
    *,
    floors: bool = True,
) -> tuple[tuple[Integers, ...], tuple[Integers, ...]]:
    """Each client's samples in two, to train and to test on: of every stratum in both, where the share allows.

    Without `floors` in the proportions of its strata as near as can be, and exactly the share of its samples.
    """
    samples, sizes = np.concatenate(held), np.array([len(each) for each in held], dtype=np.int64)
    owner = np.repeat(np.arange(len(held)), sizes)
    order = rng.permutation(len(samples))
    order = order[np.lexsort((strata[samples[order]], owner[order]))]
    # A cell is what one client holds of one stratum, its samples in random order.
    kind = np.stack([owner, strata[samples]])[:, order]
    cell = np.cumsum((np.diff(kind, axis=1, prepend=kind[:, :1]) != 0).any(axis=0))
    in_cell, first = np.bincount(cell), np.unique(cell, return_index=True)[1]
    client = kind[0, first]
    wanted = np.clip(np.rint(share * sizes).astype(np.int64), 1, sizes - 1)
    ties = rng.random(len(in_cell))  # no stratum is preferred, at every client, for its number
    away = (_given_away if floors else _in_proportion)(in_cell, client, wanted, ties)
    goes = np.zeros(len(samples), dtype=bool)
    goes[order[ranks(cell) < away[cell]]] = True
    counts = np.bincount(owner[goes], minlength=len(held))
    return split_at(samples[~goes], sizes - counts), split_at(samples[goes], counts)


def _in_proportion(in_cell: Integers, client: Integers, wanted: Integers, ties: Shares) -> Integers:
    """How many samples of each cell go, so that `wanted[i]` of client i's do."""
    return apportion_groups(wanted, in_cell, client, ties)


def _given_away(in_cell: Integers, client: Integers, wanted: Integers, ties: Shares) -> Integers:
    """How many samples of each cell go, so that `wanted[i]` of client i's do and one of each cell stays."""
    spare, clients = in_cell - 1, len(wanted)
    most = np.bincount(client, weights=spare, minlength=clients).astype(np.int64)
    wanted = np.minimum(wanted, most)
    away = apportion_groups(wanted, spare, client, ties)
    floor = (spare > 0).astype(np.int64)
    floor *= (np.bincount(client, weights=floor, minlength=clients) <= wanted)[client]
    missing = np.maximum(floor - away, 0)
    due = np.bincount(client, weights=missing, minlength=clients).astype(np.int64)
    away += missing - apportion_groups(due, np.maximum(away - floor, 0), client, ties)
    # Whoever has nothing but single samples is tested on one of them all the same.
    away[np.unique(client, return_index=True)[1][most == 0]] = 1
    return away


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
            "any class they train on: ask for fewer clients, a less skewed partition, or a larger test set.",
            code="too-few-samples",
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
