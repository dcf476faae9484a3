"""Parts of a network that methods keep with a client, or train alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from archipelago.strategies.parameters import ModelEntry, ModelSpec
from archipelago.strategies.references import Indices


def last_layers(spec: ModelSpec, layers: int | None = None) -> list[ModelEntry]:
    """The tensors of the head, or of the last `layers` layers, running statistics included.

    >>> spec = ModelSpec((ModelEntry("conv.weight", (2,), 0, 2, "parameter", "backbone"),
    ...                   ModelEntry("fc1.weight", (1,), 2, 3, "parameter", "head"),
    ...                   ModelEntry("fc2.weight", (1,), 3, 4, "parameter", "head"),
    ...                   ModelEntry("fc2.bias", (1,), 4, 5, "parameter", "head")))
    >>> columns_of(last_layers(spec)).tolist(), columns_of(last_layers(spec, 1)).tolist()
    ([2, 3, 4], [3, 4])
    """
    if layers is None:
        return [entry for entry in spec.entries if entry.part == "head"]
    named = [_layer(entry) for entry in spec.entries if entry.kind == "parameter"]
    last = list(dict.fromkeys(named))[-layers:]
    return [entry for entry in spec.entries if _layer(entry) in last]


def batch_norms(spec: ModelSpec) -> list[ModelEntry]:
    """The tensors of layers that keep running statistics: scale, shift, mean and variance.

    >>> spec = ModelSpec((ModelEntry("conv.weight", (2,), 0, 2, "parameter", "backbone"),
    ...                   ModelEntry("bn.weight", (1,), 2, 3, "parameter", "backbone"),
    ...                   ModelEntry("bn.running_mean", (1,), 3, 4, "buffer", "backbone")))
    >>> [entry.name for entry in batch_norms(spec)]
    ['bn.weight', 'bn.running_mean']
    """
    statistics = ("running_mean", "running_var")
    found = {_layer(entry) for entry in spec.entries if entry.name.rpartition(".")[2] in statistics}
    return [entry for entry in spec.entries if _layer(entry) in found]


def columns_of(entries: Sequence[ModelEntry]) -> Indices:
    """The columns of some tensors."""
    columns = [np.arange(entry.start, entry.stop) for entry in entries]
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def trained_names(entries: Sequence[ModelEntry]) -> list[str]:
    """The names of those tensors that training moves."""
    return [entry.name for entry in entries if entry.kind == "parameter"]


def _layer(entry: ModelEntry) -> str:
    return entry.name.rpartition(".")[0]
