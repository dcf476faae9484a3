"""How the models of a cluster become one: the mean, or a rule that survives odd clients.

    mean              sum_i w_i theta_i / sum_i w_i, as partial sums where the models are
    trimmed_mean      per coordinate, a share cut from each side (Yin et al., "Byzantine-Robust Distributed
                      Learning: Towards Optimal Statistical Rates", ICML 2018)
    median            per coordinate (the same paper)
    median_of_means   per coordinate, over the weighted means of bootstrap batches of clients (Brunet-Saumard et
                      al., "K-bMOM", CSDA 2022; Xie et al., "Robust Clustered Federated Learning with Bootstrap
                      Median-of-Means", APWeb-WAIM 2022)
    matched           the mean after neurons were matched (`archipelago/strategies/matching.py`)

Readings. Trimmed mean and median count every client once, whatever `weights` says: a size is what a faulty
client claims. A cluster too small for the share loses nobody (one or two clients: their mean). Median of
means: each of the `batches` batches draws ceil(members / batches) clients with replacement, so that all batches
together draw about as many clients as there are; it survives as long as most batches drew no odd client, so
more batches survive more of them. Clients that did not arrive, or weigh nothing, count nowhere; a cluster
without any keeps its model.

The coordinate rules need all values of a coordinate at once: they gather columns in pieces, in id order and under
a memory cap.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator
from archipelago.core.settings import AggregationSettings
from archipelago.strategies.interface import Handle
from archipelago.strategies.matching import chain, matched_means
from archipelago.strategies.parameters import Matrix, ModelSpec
from archipelago.strategies.references import Indices, Models


def check_rule(options: AggregationSettings, spec: ModelSpec) -> None:
    """Refuse a rule that cannot work with this network, before the first round."""
    if options.name == "matched":
        chain(spec)


def aggregate(
    theta: Handle,
    by: Indices,
    clusters: int,
    weights: npt.NDArray[np.float64],
    otherwise: Models,
    options: AggregationSettings,
    spec: ModelSpec,
    *,
    seed: int = 0,
    round: int = 0,
) -> Models:
    """The aggregate of each cluster `by`; an empty one keeps `otherwise`."""
    if options.name == "mean":
        return theta.average(by=by, weights=weights, clusters=clusters, otherwise=otherwise)
    counts = theta.arrived & (weights > 0)
    members = [np.flatnonzero((by == k) & counts) for k in range(clusters)]
    values = otherwise.values.copy()
    if options.name == "matched":
        matched_means(values, theta, members, weights, spec, options.sweeps)
    elif options.name == "median_of_means":
        for k, rows in enumerate(members):
            if len(rows):
                rng = generator(seed, "median of means", round=round, client=k)
                batches = bootstrap(rows, weights, options.batches, rng)
                values[k] = trimmed_mean(theta.combine(batches).values, 0.5)
    else:
        share = 0.5 if options.name == "median" else options.trim
        for columns, table in theta.chunks():
            for k, rows in enumerate(members):
                if len(rows):
                    values[k, columns] = trimmed_mean(table[rows], share)
    values.flags.writeable = False
    return Models(values)


def trimmed_mean(values: Matrix | npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
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
