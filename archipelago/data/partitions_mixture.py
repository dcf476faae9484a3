"""Partitions that follow what the data knows of itself: FedSoft's mixtures of sources, and natural owners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions
from archipelago.core.settings import PartitionSettings, setting
from archipelago.data.apportion import Integers, apportion, ranks
from archipelago.data.datasets import sets_with
from archipelago.data.partitions_core import Labels, Partition, partition
from archipelago.data.partitions_dealing import Shares, deal, matching_test_counts, set_aside, split_at


@dataclass
class MixtureOptions:
    """`partition.mixture=30:70 partition.size_range=[100,200]`"""

    mixture: str = setting("10:90", "mixture: shares of the sources, as 10:90 or 30:70; linear; random")
    size_range: list[int] = setting(
        [], "mixture: training samples per client, drawn from [smallest,largest]", at_least=1
    )


@partition(
    "mixture",
    "FedSoft: every client mixes ground-truth sources, as partition.mixture says (10:90, 30:70, linear, random)",
    needs_classes=False,
    cached=True,
    mixes=True,
)
def mixture(
    labels: Labels,
    settings: PartitionSettings,
    options: MixtureOptions,
    clients: int,
    rng: np.random.Generator,
) -> Partition:
    """n_k samples for client k, of S sources in the proportions of its mixture, each source class-uniform.

    Ruan, Joe-Wong: "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022,
    experiments. The paper's n_k is uniform in 100..200 (`partition.size_range=[100,200]`); without a range all
    clients have the same size, the largest that the sources allow. Samples are drawn without replacement (the
    released code: with), so that no sample is in two places. The ground-truth group is the source of largest share.
    """
    if labels.sources_train is None or labels.sources_test is None:
        raise UserError(
            f"partition=mixture mixes ground-truth sources, but '{labels.name}' has none: use data="
            f"{' or '.join(sets_with('sources'))}, or make some with data.rotations=2, "
            "data.label_swaps=2, data.colours=2 or data.noises=2.",
            code="needs-groups", setting="partition=mixture",
        )  # fmt: skip
    names, source = np.unique(labels.sources_train, return_inverse=True)
    weights = mixture_weights(options.mixture, clients, len(names), rng)
    demand = _demand(labels, options, weights, np.bincount(source), rng)
    train = labels.train if labels.classes is not None else np.zeros(len(labels.train), dtype=np.int64)
    classes = labels.classes or 1
    counts = np.zeros((len(names) * classes, clients), dtype=np.int64)
    for s in range(len(names)):
        kinds = _evenly(train[source == s], int(demand[s].sum()), rng)
        np.add.at(counts, (s * classes + kinds, np.repeat(np.arange(clients), demand[s])), 1)
    held = deal(source * classes + train, counts, rng)
    left = len(train) - int(counts.sum())
    kind = "training samples" if labels.test_share is None else "samples"
    return Partition(
        *_tested(labels, names, source, held, demand, rng),
        groups=weights.argmax(axis=1).astype(np.int64),
        notes=(f"{left} {kind} that the mixtures have no use for are not used",) if left else (),
    )


def _tested(
    labels: Labels,
    names: Integers,
    source: Integers,
    held: tuple[Integers, ...],
    demand: Integers,
    rng: np.random.Generator,
) -> tuple[tuple[Integers, ...], tuple[Integers, ...]]:
    """What to train on and what to test on: in the same mixture of sources, of classes that the client trains on."""
    if labels.test_share is not None:
        return set_aside(held, source, labels.test_share, rng)
    assert labels.sources_test is not None
    # Test samples of a source that nobody trains on go to a stratum of their own, which nobody gets.
    strata = np.where(
        np.isin(labels.sources_test, names), np.searchsorted(names, labels.sources_test), len(names)
    )
    demand = np.concatenate([demand, np.zeros_like(demand[:1])])
    counts = matching_test_counts(demand, np.bincount(strata, minlength=len(demand)))
    if labels.classes is None:
        return held, deal(strata, counts, rng)
    return held, _deal_trained(labels, held, strata, counts, rng)


def _deal_trained(
    labels: Labels, held: tuple[Integers, ...], strata: Integers, counts: Integers, rng: np.random.Generator
) -> tuple[Integers, ...]:
    """Test samples of each source, `counts[s, i]` for client i, of all classes alike, but of none it never saw."""
    clients = np.arange(len(held))
    trained = np.zeros((len(held), labels.classes or 1), dtype=bool)
    trained[np.repeat(clients, [len(each) for each in held]), labels.train[np.concatenate(held)]] = True
    positions, owners = [], []
    for source, wanted in enumerate(counts):
        order = rng.permutation(np.flatnonzero(strata == source))
        order = order[np.argsort(labels.test[order], kind="stable")]
        y = labels.test[order]
        # Every class evenly from first to last: whoever takes a few in a row gets them in proportion.
        start = rng.random(len(trained[0]))[y]
        order = order[np.argsort((ranks(y) + start) / np.bincount(y)[y], kind="stable")][: wanted.sum()]
        owner = np.repeat(clients, wanted)
        positions.append(_exchanged(order, owner, labels.test, trained, rng))
        owners.append(owner)
    position, owner = np.concatenate(positions), np.concatenate(owners)
    return split_at(position[np.lexsort((position, owner))], np.bincount(owner, minlength=len(held)))


def _exchanged(
    order: Integers, owner: Integers, test: Integers, trained: NDArray[np.bool_], rng: np.random.Generator
) -> Integers:
    """Whoever got a sample of a class it does not train on exchanges it with somebody who does, if there is one."""
    y = test[order]
    for at in np.flatnonzero(~trained[owner, y]):
        if trained[owner[at], y[at]]:
            continue  # exchanged already
        others = np.flatnonzero(trained[owner[at], y] & trained[owner, y[at]])
        if len(others):
            other = others[rng.integers(len(others))]
            order[[at, other]], y[[at, other]] = order[[other, at]], y[[other, at]]
    return order


def mixture_weights(pattern: str, clients: int, sources: int, rng: np.random.Generator) -> Shares:
    """(clients, sources) shares.

    A ratio such as 10:90 goes to the first of as many blocks of clients as there are sources, and moves on by
    one source from block to block; linear goes from one source to the other; random cuts [0, 1] at uniform
    points.

    >>> mixture_weights("10:90", 4, 2, np.random.default_rng(0)).tolist()
    [[0.1, 0.9], [0.1, 0.9], [0.9, 0.1], [0.9, 0.1]]
    >>> mixture_weights("linear", 2, 2, np.random.default_rng(0)).tolist()
    [[0.25, 0.75], [0.75, 0.25]]
    """
    if pattern == "random":
        cuts = np.sort(rng.random((clients, sources - 1)), axis=1)
        return np.diff(cuts, axis=1, prepend=0.0, append=1.0)
    if pattern == "linear":
        if sources != 2:
            raise UserError(
                f"partition.mixture=linear goes from one source to another, but there are {sources}: use "
                "partition.mixture=random.",
                code="incompatible", settings=("partition.mixture", "data"), sources=sources,
            )  # fmt: skip
        first = (np.arange(clients) + 0.5) / clients
        return np.stack([first, 1 - first], axis=1)
    try:
        ratio = np.array([float(part) for part in pattern.split(":")])
    except ValueError:
        ratio = np.zeros(0)
    if len(ratio) != sources or not (np.isfinite(ratio).all() and (ratio >= 0).all() and ratio.sum() > 0):
        example = ":".join(["10"] * (sources - 1) + ["90"])
        raise UserError(
            f"Expected partition.mixture to be linear, random or a ratio of the {sources} sources, such as "
            f"{example}, got '{pattern}'.",
            code="wrong-form", setting="partition.mixture", given=pattern,
        )  # fmt: skip
    block = np.arange(clients) * sources // clients
    return np.stack([np.roll(ratio / ratio.sum(), g) for g in range(sources)])[block]


def _demand(
    labels: Labels, options: MixtureOptions, weights: Shares, stock: Integers, rng: np.random.Generator
) -> Integers:
    """Samples of each source that each client takes: (sources, clients)."""
    clients = len(weights)
    if options.size_range:
        if len(options.size_range) != 2 or options.size_range[0] > options.size_range[1]:
            raise UserError(
                "Expected partition.size_range to be a smallest and a largest number of training samples, as in "
                f"[100,200], got {options.size_range}.",
                code="wrong-form", setting="partition.size_range", given=options.size_range,
            )  # fmt: skip
        low, high = options.size_range
        sizes = rng.integers(labels.smallest(low), labels.smallest(high) + 1, size=clients)
        demand = _apportioned(sizes, weights)
        if (demand.sum(axis=1) > stock).any():
            worst = int((demand.sum(axis=1) - stock).argmax())
            raise UserError(
                f"{clients} clients of {low} to {high} training samples need {demand[worst].sum()} samples of source "
                f"{worst}, but '{labels.name}' has {stock[worst]}: ask for fewer clients, a smaller "
                "partition.size_range, or leave it out.",
                code="too-few-samples", partition="mixture", clients=clients, source=worst,
            )  # fmt: skip
        return demand
    wanted = weights.sum(axis=0)
    size = int(np.min(stock[wanted > 0] / wanted[wanted > 0])) + 1  # shares are floats: try one more
    while size > 0:
        demand = _apportioned(np.full(clients, size), weights)
        over = int(np.max((demand.sum(axis=1) - stock) / np.maximum(wanted, 1e-9)))
        if (demand.sum(axis=1) <= stock).all():
            return demand
        size -= max(over, 1)  # rounding up, client by client, may ask for a little more than there is
    raise UserError(
        f"partition=mixture of {clients} clients: '{labels.name}' has too few samples of a source to give every "
        "client its share: ask for fewer clients.",
        code="too-few-samples", partition="mixture", clients=clients,
    )  # fmt: skip


def _apportioned(sizes: Integers, weights: Shares) -> Integers:
    return np.stack([apportion(int(n), w) for n, w in zip(sizes, weights, strict=True)], axis=1)


def _evenly(classes: Integers, count: int, rng: np.random.Generator) -> Integers:
    """Classes of `count` of these samples: of each class the same number, as far as it lasts; in random order."""
    order = rng.permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    chosen = order[np.lexsort((rng.random(len(classes)), ranks(classes[order])))][:count]
    return rng.permutation(classes[chosen])


@partition(
    "natural",
    "every client is one natural owner of samples (a writer, a person), drawn at random if there are more",
    needs_classes=False,
    cached=True,
)
def natural(
    labels: Labels, settings: PartitionSettings, options: NoOptions, clients: int, rng: np.random.Generator
) -> Partition:
    """The samples of an owner, all of them; owners that are too small, or untested, are never drawn.

    Where training and test samples have different owners (CelebA's official split is by person), or for LEAF's
    protocol of 80 % and 20 % of each writer, set `partition.test_share=0.2`.
    """
    if labels.owners_train is None or labels.owners_test is None:
        raise UserError(
            f"partition=natural needs samples that belong to somebody, but '{labels.name}' does not say to whom: use "
            f"a data set with writers or persons ({', '.join(sets_with('owners'))}), or another partition.",
            code="needs-owners", name=labels.name,
        )  # fmt: skip
    pooled, needed = labels.test_share is not None, labels.smallest(settings.min_size)
    owners = int(max(labels.owners_train.max(), labels.owners_test.max())) + 1
    sizes = np.bincount(labels.owners_train, minlength=owners)
    test_sizes = np.bincount(labels.owners_test, minlength=owners)
    fit = np.flatnonzero((sizes >= needed) & (pooled | (test_sizes > 0)))
    if len(fit) < clients:
        there = int(((sizes > 0) | (test_sizes > 0)).sum())
        what = "" if pooled else " and a test sample"
        way_out = "" if pooled else ", or set partition.test_share=0.2 to split each owner's samples anew"
        few = f"ask for at most {len(fit)} clients" if len(fit) else "set a smaller partition.min_size"
        raise UserError(
            f"clients={clients} need an owner each with {needed} samples{what}, but of the {there} owners of "
            f"'{labels.name}' only {len(fit)} are such: {few}{way_out}.",
            code="too-few-owners", clients=clients, owners=there,
        )  # fmt: skip
    drawn = np.sort(rng.permutation(fit)[:clients])
    train = _of_owners(labels.owners_train, drawn)
    notes: tuple[str, ...] = ()
    left = len(labels.train) - int(sizes[drawn].sum())
    if left:
        notes = (f"{left} samples of owners that are no clients are not used",)
    if labels.test_share is not None:
        strata = labels.train if labels.classes is not None else np.zeros(len(labels.train), dtype=np.int64)
        return Partition(*set_aside(train, strata, labels.test_share, rng), notes=notes)
    return Partition(train, _of_owners(labels.owners_test, drawn), notes=notes)


def _of_owners(owners: NDArray[Any], drawn: Integers) -> tuple[Integers, ...]:
    """Positions of each drawn owner's samples."""
    position = np.full(int(max(owners.max(), drawn.max())) + 1, -1)
    position[drawn] = np.arange(len(drawn))
    client = position[owners]
    order = np.argsort(client, kind="stable")[int((client < 0).sum()) :]
    return split_at(order.astype(np.int64), np.bincount(client[client >= 0], minlength=len(drawn)))
