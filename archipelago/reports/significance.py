"""Whether two methods differ, paired over the seeds they share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.registry import nearest

TESTS = {
    "t": "paired t-test over seeds, two-sided",
    "wilcoxon": "Wilcoxon signed-rank test over seeds, two-sided",
}


def check_test(name: str) -> str:
    """The name of a test, or a sentence."""
    if name not in TESTS:
        raise UserError(f"Unknown test '{name}'. {nearest(name, TESTS)}")
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
