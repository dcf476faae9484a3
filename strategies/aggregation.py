"""How the models of a cluster become one: the mean, or a rule that survives odd clients.

The mean is computed as partial sums where the models are; the other rules gather columns in pieces, in id
order and under a memory cap, because they need all values of a coordinate at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foundation.settings import AggregationSettings
from strategies.interface import Handle
from strategies.parameters import ModelSpec
from strategies.references import Indices, Models


def aggregate(
    theta: Handle,
    by: Indices,
    clusters: int,
    weights: npt.NDArray[np.float64],
    otherwise: Models,
    options: AggregationSettings,
    spec: ModelSpec,
) -> Models:
    """The aggregate of each cluster `by`; an empty one keeps `otherwise`."""
    return theta.average(by=by, weights=weights, clusters=clusters, otherwise=otherwise)
