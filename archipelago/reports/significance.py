"""Whether two methods differ, paired over the partitions or seeds they share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import closest, nearest

TESTS = {
    "t": "paired t-test over {over}, two-sided",
    "wilcoxon": "Wilcoxon signed-rank test over {over}, two-sided",
}


def check_test(name: str) -> str:
    """The name of a test, or a sentence."""
    if name not in TESTS:
        raise UserError(
            f"Unknown test '{name}'. {nearest(name, TESTS)}",
            code="unknown-name", kind="test", name=name, nearest=closest(name, TESTS),
        )  # fmt: skip
    return name


def paired_p(one: Mapping[int, float], other: Mapping[int, float], test: str = "t") -> float | None:
    """The p-value of a paired test of two methods; None where it is not defined.

    A test needs two seeds that both have, and differences that are not all the same number: then nothing is
    known of how much they scatter.

    >>> round(paired_p({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 1.5, 2: 2.0}), 4)
    0.1181
    >>> paired_p({0: 1.0}, {0: 0.0}) is None
    True
    """
    seeds = sorted(set(one) & set(other))
    difference = np.array([one[seed] - other[seed] for seed in seeds], np.float64)
    if len(seeds) < 2 or not np.isfinite(difference).all() or np.ptp(difference) <= 1e-12:
        return None
    if test == "wilcoxon":
        from scipy import stats

        # method="auto" is exact for few seeds, unless there are ties or zeros
        return float(stats.wilcoxon(difference, zero_method="wilcox", method="auto").pvalue)
    from scipy.special import stdtr  # the distribution alone: scipy.stats takes seconds to import

    t = difference.mean() / (difference.std(ddof=1) / np.sqrt(len(seeds)))
    return 2 * float(stdtr(len(seeds) - 1, -abs(t)))


LEVEL = 0.95
_ENUMERATED = 5  # pairs up to which all resamples are gone through
# How often the interval of so few pairs holds the true difference, in percent, where differences are normal.
HELD = {2: 50, 3: 75, 4: 81, 5: 84}
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Paired:
    """How far a row is from another on the pairs that both have: mean, bootstrap interval, who was better how often."""

    mean: float
    low: float
    high: float
    wins: int
    losses: int
    pairs: int

    @property
    def told_apart(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.low > 0 or self.high < 0


def paired_difference(
    one: Mapping[int, float], other: Mapping[int, float], *, higher_is_better: bool = True
) -> Paired | None:
    """`one` minus `other`, paired, with the percentile bootstrap interval of its mean; None of fewer than two pairs.

    All resamples of up to five pairs are gone through, of more 10,000 are drawn from a generator of their own: the
    same numbers every time. Of three pairs the interval is their range; of so few it is too short (`HELD`).

    >>> paired_difference({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 2.5, 2: 2.0})
    Paired(mean=0.8333333333333334, low=-0.5, high=2.0, wins=2, losses=1, pairs=3)
    """
    pairs = sorted(set(one) & set(other))
    difference = np.array([one[each] - other[each] for each in pairs], np.float64)
    count = len(pairs)
    if count < 2 or not np.isfinite(difference).all():
        return None
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(
        difference[_resamples(count)].mean(axis=1), [tail, 100 - tail], method="inverted_cdf"
    )
    better = difference if higher_is_better else -difference
    wins, losses = int((better > 0).sum()), int((better < 0).sum())
    return Paired(float(difference.mean()), float(low), float(high), wins, losses, count)


@functools.cache
def _resamples(count: int) -> npt.NDArray[np.int64]:
    """Which pairs each resample has."""
    if count <= _ENUMERATED:
        return np.array(list(itertools.product(range(count), repeat=count)), np.int64)
    return generator(count, "bootstrap").integers(count, size=(_RESAMPLES, count))


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the k-th smallest of m p-values times m - k + 1, never falling, at most 1.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    largest, found = 0.0, {}
    ordered = sorted(values.items(), key=lambda item: item[1])
    for position, (name, value) in enumerate(ordered):
        largest = max(largest, min(1.0, value * (len(ordered) - position)))
        found[name] = largest
    return found
