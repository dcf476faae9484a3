"""The protocol that published the numbers of the CAM paper and the thesis: `partition.compat=fedbase`.

Ma et al., "Structured Federated Learning through Clustered Additive Modeling" (NeurIPS 2023), and Ma's thesis
"Clustered Federated Learning" used the package fedbase. For comparison with their tables only: proportions are floored
to two decimals, which loses samples (0.6.9 and later), or rounded to as many decimals as a label has digits of test
samples (`fedbase-0.6.8`, which their older rows fit: shares may add up to more than one, and the last clients then get
less); clients with five test samples or fewer are dropped; what is then missing is filled up with copies of other
clients. One thing is not repeated: where a second draw leaves more clients than were asked for, the surplus is dropped,
since an experiment says how many it has.
"""

from __future__ import annotations

import math

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.settings import PartitionSettings
from archipelago.data.apportion import Integers
from archipelago.data.partitions_core import (
    AlphaOptions,
    ClassesOptions,
    ClusterClassesOptions,
    ClusterDirichletOptions,
    GroupOptions,
    Labels,
    Partition,
)
from archipelago.data.partitions_dealing import Shares, ground_truth_groups, refuse_classes, split_at

FEWEST_TESTED = 5  # a client needs more test samples than this
SMALLEST_CLUSTER = 0.3  # of an even share of the test samples
DRAWS = 200  # where the published code would never stop

ROUNDED = "fedbase-0.6.8"

Part = tuple[Integers, Integers]  # positions to train and to test on
Kind = tuple[float | None, int | None]  # Dirichlet's alpha, or a number of classes


def published_dirichlet(
    labels: Labels, settings: PartitionSettings, options: AlphaOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """Client-wise Dirichlet(alpha)."""
    between = (options.alpha, None)
    return _finish(
        labels, settings.compat, *_split(labels, _everything(labels), clients, between, settings.compat, rng)
    )


def published_n_class(
    labels: Labels,
    settings: PartitionSettings,
    options: ClassesOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """Client-wise, `classes` classes each."""
    _refuse(labels, options.classes)
    between = (None, options.classes)
    return _finish(
        labels, settings.compat, *_split(labels, _everything(labels), clients, between, settings.compat, rng)
    )


def published_cluster_dirichlet(
    labels: Labels,
    settings: PartitionSettings,
    options: ClusterDirichletOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """Cluster-wise Dirichlet (alpha, alpha_within)."""
    kinds = (options.alpha, None), (options.alpha_within, None)
    return _clusters(labels, options, clients, kinds, settings.compat, rng)


def published_cluster_n_class(
    labels: Labels,
    settings: PartitionSettings,
    options: ClusterClassesOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """Cluster-wise, `classes` classes for a cluster and `classes_within` of them for a client."""
    _refuse(labels, options.classes)
    refuse_classes("partition.classes_within", options.classes_within, options.classes, "classes of a group")
    kinds = (None, options.classes), (None, options.classes_within)
    return _clusters(labels, options, clients, kinds, settings.compat, rng)


def _refuse(labels: Labels, classes: int) -> None:
    refuse_classes("partition.classes", classes, len(np.unique(labels.train)), f"classes of '{labels.name}'")


def _everything(labels: Labels) -> Part:
    return np.arange(len(labels.train), dtype=np.int64), np.arange(len(labels.test), dtype=np.int64)


def _clusters(
    labels: Labels,
    options: GroupOptions,
    clients: int,
    kinds: tuple[Kind, Kind],
    compat: str,
    rng: np.random.Generator,
) -> Partition:
    between, within = kinds
    groups = ground_truth_groups(options, clients)
    count = int(groups[-1]) + 1
    for _ in range(DRAWS):
        clusters, _ = _split(labels, _everything(labels), count, between, compat, rng)
        if min(len(test) for _, test in clusters) > SMALLEST_CLUSTER * len(labels.test) / count:
            break
    else:
        raise UserError(
            _sentence(f"{count} clusters of {SMALLEST_CLUSTER:g} of an even share or more"),
            code="too-few-samples",
        )
    parts: list[Part] = []
    copies: list[int] = []
    for group, cluster in enumerate(clusters):
        made, copied = _split(labels, cluster, int((groups == group).sum()), within, compat, rng)
        copies += [-1 if of < 0 else of + len(parts) for of in copied]
        parts += made
    return _finish(labels, compat, parts, copies, groups)


def _split(
    labels: Labels,
    part: Part,
    nodes: int,
    kind: Kind,
    compat: str,
    rng: np.random.Generator,
) -> tuple[list[Part], list[int]]:
    """Divide a part among nodes; (their parts, whom each is a copy of)."""
    (train, test), (alpha, classes) = part, kind
    kinds = np.union1d(labels.train[train], labels.test[test])
    decimals = round(math.log10(max(len(test) / len(kinds), 1))) if compat == ROUNDED else None
    kept: list[Part] = []
    for _ in range(DRAWS):
        shares = (
            _proportions(alpha, len(kinds), nodes, decimals, rng)
            if alpha is not None
            else _indicators(classes or 1, len(kinds), nodes, rng)
        )
        pieces = [
            _slices(values, at, kinds, shares) for values, at in ((labels.train, train), (labels.test, test))
        ]
        kept += [(a, b) for a, b in zip(*pieces, strict=True) if len(b) > FEWEST_TESTED and len(a)]
        if len(kept) > nodes / 2:
            break
    else:
        raise UserError(
            _sentence(f"{nodes} clients of more than {FEWEST_TESTED} test samples"), code="too-few-samples"
        )
    kept = kept[:nodes]
    copies = [-1] * len(kept)
    while len(kept) < nodes:
        for drawn in np.unique(rng.integers(len(kept), size=nodes - len(kept))):
            copies.append(int(drawn) if copies[drawn] < 0 else copies[drawn])
            kept.append(kept[drawn])
    return kept, copies


def _proportions(
    alpha: float, kinds: int, nodes: int, decimals: int | None, rng: np.random.Generator
) -> Shares:
    """Shares of each label, rounded to `decimals`, or floored to two where none are given."""
    drawn = rng.dirichlet(np.full(nodes, min(alpha, 1e12)), size=kinds)
    return np.floor(drawn * 100) / 100 if decimals is None else np.round(drawn, decimals)


def _indicators(classes: int, kinds: int, nodes: int, rng: np.random.Generator) -> Shares:
    owns = np.zeros((kinds, nodes))
    picked = rng.random((nodes, kinds)).argsort(axis=1)[:, : min(classes, kinds)]
    owns[picked, np.arange(nodes)[:, None]] = 1
    return owns / np.maximum(owns.sum(axis=1, keepdims=True), 1)


def _slices(values: Integers, at: Integers, kinds: Integers, shares: Shares) -> tuple[Integers, ...]:
    """Consecutive, unshuffled slices of every label, in rounded sizes, for each node."""
    nodes = shares.shape[1]
    held, owners = [], []
    for row, kind in enumerate(kinds):
        mine = at[values[at] == kind]
        ends = np.cumsum(np.rint(len(mine) * shares[row]).astype(np.int64))
        held.append(mine)
        owners.append(
            np.searchsorted(ends, np.arange(len(mine)), side="right")
        )  # `nodes`: beyond the last slice
    position, owner = np.concatenate(held), np.concatenate(owners)
    order = np.lexsort((position, owner))[: int((owner < nodes).sum())]
    return split_at(position[order], np.bincount(owner[owner < nodes], minlength=nodes))


def _finish(
    labels: Labels, compat: str, parts: list[Part], copies: list[int], groups: Integers | None = None
) -> Partition:
    train, test = zip(*parts, strict=True)
    times = np.bincount(np.concatenate(train), minlength=len(labels.train))
    note = (
        f"partition.compat={compat} repeats a published protocol, for comparison only: "
        f"{sum(of >= 0 for of in copies)} of {len(parts)} clients are copies of others, {int((times == 0).sum())} of "
        f"{len(times)} training samples are not used, {int((times > 1).sum())} are held more than once"
    )
    return Partition(train, test, groups, (note,), copy_of=np.array(copies, dtype=np.int64))


def _sentence(wanted: str) -> str:
    return (
        f"partition.compat=fedbase found no {wanted} in {DRAWS} draws: ask for fewer clients or groups, a less "
        "skewed partition, or leave partition.compat out."
    )
