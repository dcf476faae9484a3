"""Which clients share an actor, so that no actor waits long for another one: pure arithmetic, no Ray.

A round is a sequence of stages (losses, training, evaluation), each of which is over when its slowest actor is. So
costs are a table with a row for every barrier and a column for every client, and a round takes the sum over rows of
the largest load in that row: balancing what clients cost in all is not enough. Where only some clients take part in a
round, every round has rows of its own; who takes part is known in advance, from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]  # (barriers, clients)
Layout = list[list[int]]

_POWER = 8  # of the norm that stands for the largest load while clients are dealt
_SWAPPED = 8  # with more barriers than this, dealing alone is left at
_ROUNDS = 1000  # of improvement


def loads(costs: Costs, layout: Sequence[Sequence[int]]) -> Costs:
    """(barriers, actors): what each actor has to do before each barrier.

    >>> loads(np.array([[1.0, 2.0, 4.0]]), [[0, 2], [1]]).tolist()
    [[5.0, 2.0]]
    """
    return np.stack([costs[:, list(block)].sum(axis=1) for block in layout], axis=1)


def makespan(costs: Costs, layout: Sequence[Sequence[int]]) -> float:
    """What all barriers together take: the slowest actor of each.

    >>> makespan(np.array([[1.0, 1.0], [3.0, 1.0]]), [[0], [1]])
    4.0
    """
    return float(loads(costs, layout).max(axis=1).sum())


def lower_bound(costs: Costs, actors: int) -> float:
    """What no layout can beat. For each barrier the largest of: an equal share of the work; the largest client; the
    two smallest of the `actors` + 1 largest clients, since two of those must share an actor.

    >>> lower_bound(np.array([[1.0, 1.0, 1.0], [6.0, 1.0, 1.0]]), 2)
    8.0
    """
    descending = -np.sort(-costs, axis=1)
    bounds = np.maximum(costs.sum(axis=1) / actors, descending[:, 0])
    if costs.shape[1] > actors:
        bounds = np.maximum(bounds, descending[:, actors - 1] + descending[:, actors])
    return float(bounds.sum())


def balanced(costs: Costs, actors: int) -> Layout:
    """Clients of each actor, none without any: dealt one by one, the largest first, then exchanged while that helps.

    >>> balanced(np.array([[4.0, 1.0, 1.0, 2.0]]), 2)
    [[0], [1, 2, 3]]
    >>> balanced(np.array([[1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 1.0, 1.0]]), 2)  # equal numbers, and the large ones apart
    [[0, 2], [1, 3]]
    """
    used = costs[costs.any(axis=1)]
    if not len(used):
        used = np.ones((1, costs.shape[1]))
    place = _dealt(used, actors)
    if len(used) <= _SWAPPED:
        _exchange(used, place, actors)
    return [np.flatnonzero(place == actor).tolist() for actor in range(actors)]


def _dealt(costs: Costs, actors: int) -> npt.NDArray[np.int64]:
    """The actor of each client: where it adds least to the sum over barriers of the loads' eighth powers."""
    ideal = np.maximum(costs.sum(axis=1) / actors, costs.max(axis=1))
    relative, weights = costs / ideal[:, None], ideal / ideal.sum()
    place = np.zeros(costs.shape[1], np.int64)
    load = np.zeros((len(costs), actors))
    members = np.zeros(actors, np.int64)
    for client in np.argsort(-(relative.max(axis=0) + relative.sum(axis=0)), kind="stable"):
        rows = np.flatnonzero(relative[:, client])
        before = load[rows]
        after = before + relative[rows, client][:, None]
        added = weights[rows] @ (after**_POWER - before**_POWER)
        # Nobody is left without clients, and who costs nothing goes where there are fewest.
        actor = int(np.lexsort((members, added, members > 0))[0] if members.min() == 0 else
                    np.lexsort((members, added))[0])  # fmt: skip
        place[client] = actor
        load[:, actor] += relative[:, client]
        members[actor] += 1
    return place


Change = tuple[int, int | None, int]  # (client, who comes in exchange, the client's new actor)


def _exchange(costs: Costs, place: npt.NDArray[np.int64], actors: int) -> None:
    """Move or swap clients of the actors that others wait for, in place, the best of them at a time."""
    load = np.zeros((len(costs), actors))
    np.add.at(load.T, place, costs.T)
    for _ in range(_ROUNDS):
        best, change = float(load.max(axis=1).sum()) * (1 - 1e-9), None
        for slow in sorted(set(load.argmax(axis=1).tolist())):
            for total, found in _changes(costs, place, load, slow):
                if total < best:
                    best, change = total, found
        if change is None:
            return
        client, swapped, target = change
        back = int(place[client])
        for moved, start, end in ((client, back, target), (swapped, target, back)):
            if moved is not None:
                place[moved] = end
                load[:, start] -= costs[:, moved]
                load[:, end] += costs[:, moved]


def _changes(
    costs: Costs, place: npt.NDArray[np.int64], load: Costs, slow: int
) -> Iterator[tuple[float, Change]]:
    """(what all barriers would take, the change): for each client of actor `slow`, its best move and its best swap."""
    others, members = np.flatnonzero(place != slow), np.flatnonzero(place == slow)
    rest = _largest_without(load, slow)
    for client in members.tolist():
        less = (load[:, slow] - costs[:, client])[:, None]
        if len(members) > 1:
            total = np.maximum(np.maximum(load + costs[:, [client]], less), rest).sum(axis=0)
            total[slow] = np.inf
            yield float(total.min()), (client, None, int(total.argmin()))
        if len(others):
            there = load[:, place[others]] - costs[:, others] + costs[:, [client]]
            total = np.maximum(np.maximum(there, less + costs[:, others]), rest[:, place[others]]).sum(axis=0)
            other = int(others[total.argmin()])
            yield float(total.min()), (client, other, int(place[other]))


def _largest_without(load: Costs, slow: int) -> Costs:
    """(barriers, actors): the largest load of all actors but `slow` and the one of the column."""
    rows, others = np.arange(len(load)), load.copy()
    others[:, slow] = -np.inf
    first = others.argmax(axis=1)
    found = np.repeat(others.max(axis=1)[:, None], load.shape[1], axis=1)
    others[rows, first] = -np.inf
    found[rows, first] = others.max(axis=1)
    return found


def barriers(
    stages: Mapping[str, npt.NDArray[np.float64]],
    rounds: Sequence[npt.NDArray[np.int64]],
    everyone: Sequence[str] = ("evaluate",),
) -> Costs:
    """A table of costs from each stage's cost of every client, and who takes part in each of some rounds.

    Stages in `everyone` ask all clients and not only those that take part. A stage that costs the same in all rounds
    is one row.

    >>> barriers({"train": np.array([1.0, 2.0]), "evaluate": np.array([1.0, 1.0])}, [np.array([0]), np.array([1])])
    array([[1., 0.],
           [0., 2.],
           [2., 2.]])
    """
    rows = []
    for stage, cost in stages.items():
        if stage in everyone:
            rows.append(cost * len(rounds))
            continue
        found: dict[bytes, Costs] = {}
        for ids in rounds:
            row = np.zeros(len(cost))
            row[ids] = cost[ids]
            key = ids.tobytes()
            found[key] = found[key] + row if key in found else row
        rows += found.values()
    return np.stack(rows)


def fitted(
    work: Costs, layouts: Sequence[Sequence[Sequence[int]]], seconds: Costs
) -> npt.NDArray[np.float64]:
    """Seconds of each client in a stage, from the seconds of blocks.

    `work[r]` is what each client had to do in round r (0: it took no part), `seconds[r]` what each block took. A client
    costs a constant and a multiple of its work, neither of them negative: the least squares over rounds and blocks.

    >>> seconds = np.array([[1.0 + 10.0, 2.0 + 30.0]])  # a second a client, and ten a unit of work
    >>> fitted(np.array([[1.0, 1.0, 2.0]]), [[[0], [1, 2]]], seconds).round(6).tolist()
    [11.0, 11.0, 21.0]
    """
    each = [
        (work[r, list(block)].sum(), np.count_nonzero(work[r, list(block)]))
        for r, layout in enumerate(layouts)
        for block in layout
    ]
    points, taken = np.array(each, float), seconds.reshape(-1)
    usual = work.sum(axis=0) / np.maximum((work > 0).sum(axis=0), 1)  # when it takes part
    usual = np.where(usual > 0, usual, usual[usual > 0].mean() if usual.any() else 0.0)
    best, error = np.zeros(2), np.inf
    for columns in ([0, 1], [0], [1]):
        solution = np.zeros(2)
        solution[columns] = np.linalg.lstsq(points[:, columns], taken, rcond=None)[0]
        missed = float(((points @ solution - taken) ** 2).sum())
        if (solution >= 0).all() and missed < error * (1 - 1e-9):
            best, error = solution, missed
    return best[0] * usual + best[1]
