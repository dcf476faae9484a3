"""Settings of data and partitions with the options that data sets and partitions declare."""

from __future__ import annotations

from typing import Any

from archipelago.core.schema import composed
from archipelago.core.settings import DataSettings, PartitionSettings


def data_settings(**given: Any) -> Any:
    """`data_settings(name="synthetic", samples=50)`, as `data=synthetic data.samples=50` gives them."""
    return composed(DataSettings)(**given)


def partition_settings(**given: Any) -> Any:
    """`partition_settings(name="dirichlet", alpha=0.2)`."""
    return composed(PartitionSettings)(**given)
