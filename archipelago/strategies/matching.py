"""Matched averaging: the mean of models whose neurons were first put in one order.

FeSEM-MA (Long, Xie et al., section 5.1), after Wang et al., "Federated Learning with Matched Averaging", ICLR 2020
(FedMA). Two networks are the same function when the neurons of a layer, and the next layer's inputs with
them, stand in another order; averaging index by index then averages neurons that have nothing in common.

Layer by layer: the layer's inputs are put in the order found for the layer before, then each client's
neurons (weights, bias, normalisation's scale and shift) are assigned to the neurons of the running weighted mean
of the clients so far, by the Hungarian method, at the least sum of squared distances. More `sweeps` assign each
client again, to the mean of the others, until nothing moves. Where a convolution meets a linear layer, all positions
of a channel move together. The outputs of the last layer are classes: they are never put in another order.

Only chains of layers can be followed: convolutions, linear layers, and normalisation with one value per
channel. The chain is read off the names and shapes of the model's tensors. Named modules inside a block, names
that speak of shortcuts and shapes that do not fit one after the other are refused; a network that adds
outputs of layers in its `forward` without any of these signs cannot be distinguished from a chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

from archipelago.core.errors import UserError
from archipelago.core.settings import setting
from archipelago.strategies.aggregation import AGGREGATION, Uploads
from archipelago.strategies.interface import Handle
from archipelago.strategies.parameters import Matrix, ModelEntry, ModelSpec
from archipelago.strategies.references import Indices, Models

SHORTCUTS = re.compile(r"shortcut|downsample|skip|residual", re.IGNORECASE)
PLAIN = re.compile(r"[A-Za-z_]\w*(\.\d+)*|(\d+\.)*\d+")  # fc1, or layers.3 of a Sequential


@dataclass(frozen=True)
class Layer:
    """A layer of a chain: its weight, and the vectors with one value for each of its neurons."""

    weight: ModelEntry
    vectors: tuple[ModelEntry, ...]
    inputs: int  # neurons of the layer before; input columns of one neuron stand together

    @property
    def neurons(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> Indices:
        """The columns of the weight, then of each vector."""
        return np.concatenate([np.arange(e.start, e.stop) for e in (self.weight, *self.vectors)])

    def split(self, table: Matrix) -> tuple[Matrix, Matrix]:
        """(m, neurons, inputs, rest) weights and (m, neurons, vectors) of m models' `columns`."""
        size = self.weight.stop - self.weight.start
        weights = table[:, :size].reshape(len(table), self.neurons, self.inputs, -1)
        vectors = table[:, size:].reshape(len(table), len(self.vectors), self.neurons)
        return weights, vectors.transpose(0, 2, 1)


def chain(spec: ModelSpec) -> list[Layer]:
    """The layers of a model one after the other, or a sentence about why they are no chain."""
    modules: dict[str, list[ModelEntry]] = {}
    for entry in spec.entries:
        modules.setdefault(entry.name.rpartition(".")[0], []).append(entry)
    root = _common_root(list(modules))
    layers: list[Layer] = []
    for name, entries in modules.items():
        tensors = {entry.name.rpartition(".")[2]: entry for entry in entries}
        weight = tensors.get("weight")
        own = name[len(root) :]
        if SHORTCUTS.search(own) or not PLAIN.fullmatch(own):
            raise _refusal(f"'{name}' is a part of a block")
        if weight is None:
            raise _refusal(f"'{name}' has no weight of its own")
        vectors = tuple(entry for entry in entries if entry is not weight)
        if len(weight.shape) == 1:
            vectors, weight = tuple(entries), None
        if any(len(entry.shape) != 1 for entry in vectors):
            raise _refusal(f"'{name}' is neither a convolution, nor a linear layer, nor a normalisation")
        if weight is not None:
            before = layers[-1] if layers else None
            layers.append(Layer(weight, (), _inputs(weight, before)))
        if not layers:
            raise _refusal(f"'{name}' comes before the first layer")
        last = layers[-1]
        for entry in vectors:
            if entry.shape[0] != last.neurons:
                raise _refusal(f"'{entry.name}' has {entry.shape[0]} values after {last.neurons} neurons")
        layers[-1] = Layer(last.weight, (*last.vectors, *vectors), last.inputs)
    return layers


def _inputs(weight: ModelEntry, before: Layer | None) -> int:
    """How many neurons feed this layer: those of the layer before, or the sample's own features."""
    width = weight.shape[1]
    if before is None:
        return width
    flattened = len(weight.shape) == 2 and len(before.weight.shape) > 2 and width % before.neurons == 0
    if (width == before.neurons and len(weight.shape) in (2, len(before.weight.shape))) or flattened:
        return before.neurons
    raise _refusal(
        f"'{weight.name}' takes {width} inputs after the {before.neurons} of '{before.weight.name}'"
    )


def _common_root(names: Sequence[str]) -> str:
    """The dotted prefix that all modules share (a wrapper's name), with its dot.

    >>> _common_root(["network.fc1", "network.fc2"]), _common_root(["layer"])
    ('network.', '')
    """
    parents = [name.split(".")[:-1] for name in names]
    shared = 0
    while parents and all(len(p) > shared and p[shared] == parents[0][shared] for p in parents):
        shared += 1
    return "".join(f"{part}." for part in parents[0][:shared]) if parents else ""


def _refusal(why: str) -> UserError:
    return UserError(
        "aggregation=matched expects a network whose layers follow one after the other (convolutions, linear layers, "
        f"BatchNorm), but {why}: choose another model, or another aggregation such as mean or median.",
        code="unfit-model", setting="aggregation",
    )  # fmt: skip


@dataclass
class MatchedOptions:
    """`aggregation.sweeps=...`"""

    sweeps: int = setting(2, "matched: passes over the clients", at_least=1)


@AGGREGATION.register(
    "matched",
    "the mean after neurons were matched (FedMA, Wang et al. 2020)",
    label="matched averaging",
    options=MatchedOptions,
    reorders=True,
    check=chain,
)
def matched(uploads: Uploads) -> Models:
    """The mean of models whose neurons were first put in one order (FeSEM-MA, after FedMA).

    Readings

    Where members of a cluster start
        paper   FeSEM-MA: from models of their own, which need not have their neurons in one order
        code    no released code joins it with FeSEM's clusters
        here    from their cluster's model, as in FeSEM. Then neurons keep their places: at usual learning rates none of
                24,000 moved, and FeSEM-MA equals FeSEM. It matters for clients that start apart, as in FedMA
    Widths
        paper   FedMA opens new neurons where none fits
        code    so too
        here    fixed: others would change the architecture, and the vectors that K-means compares
    The last layer
        paper   FedMA weighs it by class frequencies
        here    the mean like the others: the server does not know the classes
    Between layers
        paper   FedMA: clients retrain
        here    they do not
    Order of the neurons
        here    that of the cluster's first client
    BatchNorm
        here    running statistics move with their channel and have no say in the matching
    """
    values = uploads.otherwise.values.copy()
    matched_means(
        values, uploads.theta, uploads.members, uploads.weights, uploads.spec, uploads.options.sweeps
    )
    return Models(values)


def matched_means(
    values: Matrix,
    theta: Handle,
    members: Sequence[Indices],
    weights: npt.NDArray[np.float64],
    spec: ModelSpec,
    sweeps: int,
) -> None:
    """Write the matched mean of each cluster's members into its row of `values`; rows without members stay."""
    layers = chain(spec)
    orders: dict[int, Indices] = {}  # cluster -> (members, neurons) of the layer before
    for layer in layers:
        table = theta.gather(layer.columns)  # one layer of all clients at a time, not whole models
        for k, rows in enumerate(members):
            if not len(rows):
                continue
            share = weights[rows] / weights[rows].sum()
            inner, vectors = layer.split(table[rows])
            if k in orders:
                inner = np.take_along_axis(inner, orders[k][:, None, :, None], axis=2)
            if layer is not layers[-1]:
                orders[k] = match(_neurons(layer, inner, vectors), share, sweeps)
                inner = np.take_along_axis(inner, orders[k][:, :, None, None], axis=1)
                vectors = np.take_along_axis(vectors, orders[k][:, :, None], axis=1)
            flat = np.concatenate(
                [inner.reshape(len(rows), -1), vectors.transpose(0, 2, 1).reshape(len(rows), -1)], axis=1
            )
            mean = np.zeros(flat.shape[1])
            for weight, model in zip(share, flat, strict=True):
                mean += weight * model
            values[k, layer.columns] = mean


def _neurons(layer: Layer, inner: Matrix, vectors: Matrix) -> npt.NDArray[np.float64]:
    """(m, neurons, d): what the matching compares."""
    trained = [v for v, entry in enumerate(layer.vectors) if entry.kind == "parameter"]
    flat = inner.reshape(*inner.shape[:2], -1)
    return np.concatenate([flat, vectors[:, :, trained]], axis=2).astype(np.float64)


def match(
    neurons: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], sweeps: int
) -> npt.NDArray[np.int64]:
    """(m, neurons): the order that brings each model's neurons closest to the weighted mean of the others.

    >>> a = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    >>> match(np.stack([a, a[[2, 0, 1]]]), np.ones(2), sweeps=1).tolist()
    [[0, 1, 2], [1, 2, 0]]
    """
    count, width = neurons.shape[:2]
    orders = np.tile(np.arange(width), (count, 1))
    with threadpool_limits(limits=1):  # the same products, and so the same order, on any machine
        total = weights[0] * neurons[0]
        for j in range(1, count):
            orders[j] = _closest(total, neurons[j])
            total += weights[j] * neurons[j, orders[j]]
        for _ in range(sweeps - 1):
            before = orders.copy()
            for j in range(1, count):
                total -= weights[j] * neurons[j, orders[j]]
                orders[j] = _closest(total, neurons[j])
                total += weights[j] * neurons[j, orders[j]]
            if np.array_equal(orders, before):
                break
    return orders


def _closest(mean: npt.NDArray[np.float64], own: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The order of `own` with the least sum of squared distances: norms do not change, products do."""
    return linear_sum_assignment(mean @ own.T, maximize=True)[1]
