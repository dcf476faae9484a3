"""What a method promises in plain situations, as data beside it: `expects = Expectations(...)` on its class.

    class Mine(ClusteredModels):
        expects = Expectations(
            below_fedavg=0.02, ari=0.9, cost=Cost(down=K, trainings=1),
            known=(Known("accuracy", "iid", "each of K models learns from a part of the clients", limit=0.06),),
        )

`python -m benchmarks behaviour` runs every registered base, and every base with each add-on that fits, in every
situation of `SITUATIONS`, and holds each run against these. What is left out has a default by the kind of method: one
that finds clusters has to find the ground-truth ones, one that says how many there are must not split clients that are
alike, one that adds models up must use them all. An add-on declares what it changes: its own cost, on top of the
base's, and what it is known for.

A shortfall that cannot be mended (the paper's own, or a consequence of what the method is) is declared as `Known`, with
the reason: the suite shows it as such and not as a failure, up to its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both declare what is defined here
    from archipelago.strategies.addon import Addon
    from archipelago.strategies.base import Strategy

# By name: what is unusual about it. How each is made of settings is in `benchmarks/behaviour/situations.py`.
SITUATIONS = {
    "iid": "IID clients: no groups",
    "rotations": "two groups, upright and rotated digits; K = 2, as there are groups",
    "dirichlet": "two groups by cluster-wise Dirichlet: other classes in each",
    "participation": "20% of the clients in each round",
    "slow": "a learning rate ten times smaller",
    "fast": "a learning rate ten times larger",
    "one_cluster": "K = 1",
    "twice_clusters": "K = 4, twice as many as there are groups",
    "sizes": "clients of very different sizes",
    "one_class": "one client has samples of one class only",
    "stragglers": "half of the clients manage a random part of their steps",
    "batchnorm": "a network with BatchNorm",
}
# By name: what is looked at.
CHECKS = {
    "accuracy": "not more than `below_fedavg` below FedAvg of the same situation and seed",
    "splits": "one cluster where clients are alike",
    "groups": "finds the ground-truth groups (adjusted Rand index; homogeneity where K is larger than their number)",
    "parts": "every model of a sum has learned, and changes the prediction",
    "oscillation": "neither accuracy nor clusters go back and forth in the second half of the run",
    "progress": "still improving, or converged; never worse again, no client dropped",
    "cost": "models down and up and local trainings of a round, per participant, as declared",
}
ALL = "*"


@dataclass(frozen=True)
class Times:
    """A number that may grow with the number of clusters: `fixed + per_cluster * K`.

    >>> (2 + 3 * K).at(4), Times.of(2).at(4)
    (14.0, 2.0)
    """

    fixed: float = 0.0
    per_cluster: float = 0.0

    @staticmethod
    def of(value: float | Times) -> Times:
        """A plain number does not grow."""
        return value if isinstance(value, Times) else Times(float(value))

    def at(self, clusters: int) -> float:
        """Its value for K = `clusters`."""
        return float(self.fixed + self.per_cluster * clusters)

    def __add__(self, other: float | Times) -> Times:
        more = Times.of(other)
        return Times(self.fixed + more.fixed, self.per_cluster + more.per_cluster)

    def __mul__(self, factor: float) -> Times:
        return Times(self.fixed * factor, self.per_cluster * factor)

    __radd__, __rmul__ = __add__, __mul__


K = Times(per_cluster=1.0)  # the number of clusters


@dataclass(frozen=True)
class Cost:
    """What the dearest round takes of a participant: models it receives and sends, local trainings.

    >>> (Cost(down=K) + Cost(down=1, up=1, trainings=1)).at(2)
    {'down': 3.0, 'up': 1.0, 'trainings': 1.0}
    """

    down: float | Times = 0.0
    up: float | Times = 0.0
    trainings: float | Times = 0.0  # samples that went backward, in those of FedAvg's round

    def __add__(self, other: Cost) -> Cost:
        trainings = Times.of(self.trainings) + other.trainings
        return Cost(Times.of(self.down) + other.down, Times.of(self.up) + other.up, trainings)

    def at(self, clusters: int) -> dict[str, float]:
        """The numbers for K = `clusters`."""
        found = {"down": self.down, "up": self.up, "trainings": self.trainings}
        return {name: Times.of(value).at(clusters) for name, value in found.items()}


@dataclass(frozen=True)
class Known:
    """A shortfall with its reason: in which check, where, why, and how far it may go.

    `limit` is of the check's own number: how far below FedAvg (`accuracy`), the adjusted Rand index or homogeneity
    (`groups`), the clusters of clients that are alike (`splits`), how far accuracy falls back or which share of clients
    moves or of results is not finite (`oscillation`, `progress`), the loss that a dead model of a sum changes
    (`parts`), models or trainings (`cost`). What an add-on is known for with `grows=True` is so on bases that begin
    with one cluster alone.
    """

    check: str
    situations: str | tuple[str, ...]
    why: str
    limit: float
    grows: bool = False

    def __post_init__(self) -> None:
        named = (self.situations,) if isinstance(self.situations, str) else self.situations
        unknown = [name for name in named if name != ALL and name not in SITUATIONS]
        if self.check not in CHECKS or unknown or not named:
            raise ValueError(
                f"expected a check of {', '.join(CHECKS)} and situations of {', '.join(SITUATIONS)} (or {ALL!r}), "
                f"got {self.check!r} and {self.situations!r}: name those"
            )
        if not self.why.strip():
            raise ValueError(f"expected the reason of a known shortfall in {self.check!r}, got none: say why")

    def covers(self, check: str, situation: str) -> bool:
        """Whether it is about this check in this situation."""
        named = (self.situations,) if isinstance(self.situations, str) else self.situations
        return check == self.check and (ALL in named or situation in named)


# What no method is held to: a rate at which FedAvg stays at chance is not one to train with.
EVERYBODY = tuple(
    Known(check, "fast", "at ten times the learning rate FedAvg itself learns nothing", limit)
    for check, limit in (("groups", -0.1), ("oscillation", 0.45), ("progress", 0.7), ("parts", 1.0))
)


@dataclass(frozen=True)
class Expectations:
    """What a method is held to. None: the default of its kind, or, of a cost, no promise."""

    below_fedavg: float = 0.03  # accuracy
    ari: float | None = None  # 1: exactly the ground-truth groups; 0: none are looked for
    splits_iid: bool | None = None  # whether clients that are alike may be split
    falls_back: float = 0.05  # of accuracy, in the second half of a run: oscillation
    length: int = (
        1  # how many times as long as FedAvg's its runs must be (it works in stages, one after the other)
    )
    cost: Cost | None = None
    known: tuple[Known, ...] = ()

    def excuse(self, check: str, situation: str) -> Known | None:
        """What is known of a check in a situation: the widest limit of those declared."""
        found = [known for known in self.known if known.covers(check, situation)]
        towards = min if check == "groups" else max
        return towards(found, key=lambda known: known.limit, default=None)


def of_kind(method: type[Strategy]) -> Expectations:
    """What a base's class expects, with the defaults of its kind for what it leaves open."""
    declared: Expectations = method.expects
    finds = method.clustered and not method.fixed
    return replace(
        declared,
        ari=(0.8 if finds else 0.0) if declared.ari is None else declared.ari,
        splits_iid=not method.grows if declared.splits_iid is None else declared.splits_iid,
        known=(*declared.known, *EVERYBODY),
    )


def expected(base: type[Strategy], addons: Sequence[type[Addon[Any]]] = ()) -> Expectations:
    """What a base with add-ons is held to: the base's, the add-ons' costs on top, and all that is known of them."""
    found = of_kind(base)
    for addon in addons:
        more: Expectations = addon.expects
        cost = None if found.cost is None or more.cost is None else found.cost + more.cost
        dearer = max((more.cost or Cost()).at(1).values())
        known = [
            replace(each, limit=each.limit + dearer) if each.check == "cost" else each for each in found.known
        ]
        more = replace(more, known=tuple(each for each in more.known if base.grows or not each.grows))
        found = replace(found, cost=cost, known=(*known, *more.known, *_sums(found, more)))
    return found


def _sums(base: Expectations, addon: Expectations) -> list[Known]:
    """Where both a base and an add-on are known to cost accuracy, they cost what both do."""
    pairs = [(each, base.excuse("accuracy", each), addon.excuse("accuracy", each)) for each in SITUATIONS]
    return [
        Known("accuracy", each, f"{one.why}; {other.why}", one.limit + other.limit)
        for each, one, other in pairs
        if one is not None and other is not None
    ]
