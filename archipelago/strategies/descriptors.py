"""What a client is known by where clients are clustered: parts of its model, its update, or a descriptor of its data.

A descriptor is a function `(client, model)` of a `ClientView` and a model that the client is sent, registered or named
by its import path: `method=fesem fesem.features=my_module.my_descriptor`. It runs where the client lives, on the model
that the run started from, once for each state of its data, and the vector that it returns is counted as sent. It is
registered with `labels=False` where it reads no labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import Registry
from archipelago.strategies.interface import ClientView, FleetView, Handle
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Indices, Models, Reference

Descriptor = Callable[..., npt.NDArray[np.floating[Any]]]
DESCRIPTORS: Registry[Descriptor] = Registry("descriptor")

PARTS = ("classifier", "head", "parameters")  # of a trained model
UPDATES = "updates"  # trained minus received, over the trainable parameters
DIRECTIONS = "directions"  # where a trained model lies from the mean of all clusters, whatever the round it was seen in
FEATURES = (*PARTS, UPDATES, DIRECTIONS)


@DESCRIPTORS.register(
    "label_shares", "share of each class among a client's samples", label="label shares", labels=True
)
def label_shares(client: ClientView, model: Vector) -> npt.NDArray[np.float64]:
    """(classes,), adding up to 1."""
    counts = client.label_counts()
    return counts / max(int(counts.sum()), 1)


@DESCRIPTORS.register(
    "moments",
    "mean and deviation of what enters the classifier; no labels",
    label="feature moments",
    labels=False,
)
def moments(client: ClientView, model: Vector) -> npt.NDArray[np.float64]:
    """(2 d,): of every feature under the model that the client was sent."""
    features = client.features(model).astype(np.float64)
    return np.concatenate([features.mean(axis=0), features.std(axis=0)])


def check_features(features: str) -> None:
    """Refuse what is neither a part of a model nor a descriptor."""
    if features not in FEATURES:
        DESCRIPTORS.find(features)


def reads_labels(features: str) -> bool:
    """Whether clients need labels to be known by this: all parts of trained models do, a descriptor says so."""
    return features in FEATURES or bool(DESCRIPTORS.entry(features).capabilities.get("labels", True))


def updates(theta: Handle, received: Models, c: Indices, parameters: int) -> npt.NDArray[np.float32]:
    """(n, parameters): what each client's training added to the model of its cluster c."""
    return theta.gather(np.arange(parameters)) - received.values[c, :parameters]


def directions(theta: Handle, clusters: Models, in_use: Indices, parameters: int) -> npt.NDArray[np.float32]:
    """(n, parameters) of length 1: where trained models lie from the mean of the clusters `in_use`."""
    away = theta.gather(np.arange(parameters)) - clusters.values[in_use, :parameters].mean(axis=0)
    return away / np.maximum(np.linalg.norm(away, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def described(fleet: FleetView, name: str, model: Reference) -> npt.NDArray[np.float64]:
    """(n, d): what a descriptor says of each client of `fleet`, with the model that is sent for it."""
    return np.stack(fleet.describe(DESCRIPTORS.find(name), stage="descriptors", model=model)).astype(
        np.float64
    )


def described_unlabelled(fleet: FleetView, name: str, model: Reference) -> npt.NDArray[np.float64]:
    """(n, d): the same of clients whose labels nobody may see."""
    found = fleet.describe(without_labels, stage="adopting new clients", model=model, name=name)
    return np.stack(found).astype(np.float64)


def without_labels(client: ClientView, model: Vector, name: str) -> npt.NDArray[np.floating[Any]]:
    """What a descriptor says of a client by its samples alone."""
    return DESCRIPTORS.find(name)(client.unlabelled(), model)
