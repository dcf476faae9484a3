"""How the models of a cluster become one: the mean, or a rule that survives odd clients.

    mean              sum_i w_i theta_i / sum_i w_i, as partial sums where the models are
    trimmed_mean      per coordinate, a share cut from each side (Yin et al., "Byzantine-Robust Distributed
                      Learning: Towards Optimal Statistical Rates", ICML 2018)
    median            per coordinate (the same paper)
    median_of_means   per coordinate, over the weighted means of bootstrap batches of clients (Brunet-Saumard et
                      al., "K-bMOM", CSDA 2022; Xie et al., "Robust Clustered Federated Learning with Bootstrap
                      Median-of-Means", APWeb-WAIM 2022)
    matched           the mean after neurons were matched (`archipelago/strategies/matching.py`)

The coordinate rules need all values of a coordinate at once: they gather columns in pieces, in id order and under
a memory cap.

A rule is a function of `Uploads` that is registered, or named by its import path: `aggregation=my_module.my_rule`.

    def middle(uploads: Uploads) -> Models:
        return uploads.by_coordinate(lambda values: np.quantile(values, 0.4, axis=0))

Readings

What a client counts for
    paper   trimmed mean and median: every machine has as many samples
    here    one each under trimmed mean and median, whatever `weights` says: a size is what a faulty client claims. The
            mean, and the batches of median of means, count by `weights`
A cluster too small for the share that is cut
    here    loses nobody; of one or two clients: their mean
    option  aggregation.trim
How many clients a bootstrap batch draws
    paper   a fixed number, with replacement
    here    ceil(members / batches), so that all batches together draw about as many clients as there are; it survives
            as long as most batches drew no odd client, so more batches survive more of them
    option  aggregation.batches
Clients that did not arrive, or weigh nothing
    here    count nowhere; a cluster without any keeps its model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import Registry
from archipelago.core.settings import AggregationSettings, setting
from archipelago.strategies.interface import Handle
from archipelago.strategies.parameters import Matrix, ModelSpec
from archipelago.strategies.references import Indices, Models

Values = Matrix | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Uploads:
    """What a rule sees: the models that clients made in a round, and the cluster that each counts for."""

    theta: Handle
    by: Indices  # a cluster for each client of `theta`; negative: none
    weights: npt.NDArray[np.float64]
    otherwise: Models  # one model for each cluster: what a cluster without clients keeps
    spec: ModelSpec
    seed: int = 0
    round: int = 0
    options: Any = None  # of the rule

    @property
    def members(self) -> list[Indices]:
        """Of each cluster, the rows of `theta` that arrived and weigh something."""
        counts = self.theta.arrived & (self.weights > 0)
        return [np.flatnonzero((self.by == k) & counts) for k in range(len(self.otherwise))]

    def by_coordinate(self, rule: Callable[[Values], Values]) -> Models:
        """`rule` turns the (m, columns) values of a cluster into (columns,); it sees a piece of the model at a time."""
        values, members = self.otherwise.values.copy(), self.members
        for columns, table in self.theta.chunks():
            for k, rows in enumerate(members):
                if len(rows):
                    values[k, columns] = rule(table[rows])
        return Models(values)

    def by_cluster(self, rule: Callable[[int, Indices], Values]) -> Models:
        """`rule` gives the whole model of cluster k from the rows of its members."""
        values = self.otherwise.values.copy()
        for k, rows in enumerate(self.members):
            if len(rows):
                values[k] = rule(k, rows)
        return Models(values)


AGGREGATION: Registry[Callable[[Uploads], Models]] = Registry("aggregation rule", section="aggregation")


@dataclass(frozen=True)
class Rule:
    """A rule with its options, and what it declares: `mean`, `reorders` and `check` where it is registered."""

    name: str
    apply: Callable[[Uploads], Models]
    options: Any = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def chosen(cls, settings: AggregationSettings) -> Rule:
        """The rule that `aggregation=...` names."""
        entry = AGGREGATION.entry(settings.name)
        return cls(entry.name, entry.value, entry.options_from(settings), entry.capabilities)

    def __call__(self, uploads: Uploads) -> Models:
        return self.apply(replace(uploads, options=self.options))

    @property
    def mean(self) -> bool:
        """Whether it is the weighted mean, for which partial sums will do."""
        return bool(self.capabilities.get("mean", False))

    @property
    def reorders(self) -> bool:
        """Whether it may put neurons into another order."""
        return bool(self.capabilities.get("reorders", False))

    def check(self, spec: ModelSpec) -> None:
        """Refuse a network that the rule cannot work with, before the first round."""
        if "check" in self.capabilities:
            self.capabilities["check"](spec)


def refuse_reordering(settings: AggregationSettings, beside: str, why: str) -> None:
    """Refuse a rule that puts neurons into another order, where something does not follow."""
    rule = Rule.chosen(settings)
    if rule.reorders:
        names = [name for name, entry in AGGREGATION.items() if not entry.capabilities.get("reorders", False)]
        raise UserError(
            f"Expected aggregation={', '.join(names[:-1])} or {names[-1]} with {beside}, got {rule.name}: {why}; use "
            "one of those.",
            code="aggregation", rule=rule.name,
        )  # fmt: skip


@AGGREGATION.register("mean", "the mean, weighted as `weights` says", label="mean", mean=True)
def mean(uploads: Uploads) -> Models:
    """sum_i w_i theta_i / sum_i w_i."""
    clusters, otherwise = len(uploads.otherwise), uploads.otherwise
    found = uploads.theta.average(
        by=uploads.by, weights=uploads.weights, clusters=clusters, otherwise=otherwise
    )
    assert isinstance(found, Models)
    return found


@dataclass
class TrimmedMeanOptions:
    """`aggregation.trim=...`"""

    trim: float = setting(0.2, "trimmed_mean: share cut from each side", at_least=0, below=0.5)


@AGGREGATION.register(
    "trimmed_mean",
    "per coordinate, a share cut from each side (Yin et al. 2018)",
    label="trimmed mean",
    options=TrimmedMeanOptions,
)
def trimmed_means(uploads: Uploads) -> Models:
    """The trimmed mean of each coordinate."""
    return uploads.by_coordinate(lambda values: trimmed_mean(values, uploads.options.trim))


@AGGREGATION.register("median", "per coordinate (Yin et al. 2018)", label="median")
def medians(uploads: Uploads) -> Models:
    """The median of each coordinate."""
    return uploads.by_coordinate(lambda values: trimmed_mean(values, 0.5))


@dataclass
class MedianOfMeansOptions:
    """`aggregation.batches=...`"""

    batches: int = setting(10, "median_of_means: number of bootstrap batches", at_least=1)


@AGGREGATION.register(
    "median_of_means",
    "per coordinate, over means of bootstrap batches of clients (Xie et al. 2022)",
    label="median of means",
    options=MedianOfMeansOptions,
)
def medians_of_means(uploads: Uploads) -> Models:
    """The median of the weighted means of bootstrap batches."""

    def of_cluster(k: int, rows: Indices) -> Values:
        rng = generator(uploads.seed, "median of means", round=uploads.round, client=k)
        batches = bootstrap(rows, uploads.weights, uploads.options.batches, rng)
        return trimmed_mean(uploads.theta.combine(batches).values, 0.5)

    return uploads.by_cluster(of_cluster)


def trimmed_mean(values: Values, share: float) -> npt.NDArray[np.float64]:
    """The mean of each column without the `share` lowest and highest of its values; 0.5 is the median.

    >>> trimmed_mean(np.array([[9.0], [1.0], [2.0], [3.0], [-9.0]]), 0.2).tolist()
    [2.0]
    >>> trimmed_mean(np.array([[1.0], [4.0]]), 0.5).tolist()
    [2.5]
    """
    count = len(values)
    # The small term: 0.29 * 100 is a little less than 29 in floating point.
    cut = min(int(share * count + 1e-9), (count - 1) // 2)
    kept = np.sort(values, axis=0)[cut : count - cut] if cut else values
    return kept.mean(axis=0, dtype=np.float64)


def bootstrap(
    rows: Indices, weights: npt.NDArray[np.float64], batches: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """(batches, n) weights: each batch draws its clients out of `rows` with replacement.

    >>> bootstrap(np.array([2]), np.array([1.0, 1.0, 5.0]), 2, generator(0, "example")).tolist()
    [[0.0, 0.0, 5.0], [0.0, 0.0, 5.0]]
    """
    size = -(-len(rows) // batches)
    drawn = rng.choice(rows, (batches, size))
    counts = np.zeros((batches, len(weights)))
    np.add.at(counts, (np.arange(batches)[:, None], drawn), 1.0)
    return counts * weights
