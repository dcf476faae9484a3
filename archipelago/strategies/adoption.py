"""How a client that never trained finds its cluster: with labels, as its method says, or without.

    holdout_clients=0.2 adoption=entropy                  ar.adopt(run, new_clients, adoption="entropy")

`labels` is the method's own protocol (the cluster of least loss, in most). `entropy` needs no label: of the cluster
models, the one whose predictions on the client's inputs are the surest, by the mean entropy of its probabilities (an
idea of test-time adaptation: Wang et al., "Tent", ICLR 2021; as a rule for assignment it is the platform's own).

Methods with soft clusters (FedSoft, FedEM, FedRC) take the entropy of a prediction for the loss of its sample, which
is what a model expects its loss to be, and find their weights as they do from losses.

A rule of your own is a subclass of `AdoptionRule` under `@ADOPTION.register`, or named by its import path. It sees the
strategy and the new clients, who answer what `fleet.describe` asks of their views; one that needs no labels
(`needs_labels = False`) asks `client.unlabelled()`. Of soft clusters it gives a client one, unless it says otherwise
(`weigh`). A method that knows better (by descriptors, say) overrides `adopt_unlabelled`, which `entropy` leaves to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.registry import Registry
from archipelago.strategies.interface import ClientView, FleetView
from archipelago.strategies.references import Indices

if TYPE_CHECKING:
    from archipelago.strategies.base import ClusteredModels
    from archipelago.strategies.mixtures import MixtureModels


class AdoptionRule:
    """Gives new clients a cluster of a method that has finished a round."""

    needs_labels: ClassVar[bool] = True

    def assign(self, method: ClusteredModels | MixtureModels, fleet: FleetView) -> Indices:
        """The cluster of each client of `fleet`, none of which ever trained."""
        raise NotImplementedError(f"{type(self).__name__} has no assign")

    def weigh(self, method: MixtureModels, fleet: FleetView) -> npt.NDArray[np.float64]:
        """(n, K): how much of each soft cluster is in each client; all of it is in the one that `assign` says."""
        return np.eye(method.K)[self.assign(method, fleet)]


ADOPTION: Registry[type[AdoptionRule]] = Registry("adoption rule", base=AdoptionRule)


@ADOPTION.register("labels", "by the method's own protocol, with labels: the cluster of least loss, in most")
class ByMethod(AdoptionRule):
    """`adopt` of the method."""

    def assign(self, method: ClusteredModels | MixtureModels, fleet: FleetView) -> Indices:
        return method.adopt(fleet)

    def weigh(self, method: MixtureModels, fleet: FleetView) -> npt.NDArray[np.float64]:
        return method.measure(fleet)


@ADOPTION.register("entropy", "without labels: the cluster model that is surest of its predictions, unless the "
                   "method has a way of its own")  # fmt: skip
class ByEntropy(AdoptionRule):
    """argmin_k mean_x H(softmax(f_k(x))); ties to the lowest."""

    needs_labels = False

    def assign(self, method: ClusteredModels | MixtureModels, fleet: FleetView) -> Indices:
        return method.adopt_unlabelled(fleet)

    def weigh(self, method: MixtureModels, fleet: FleetView) -> npt.NDArray[np.float64]:
        return method.measure_unlabelled(fleet)


def surest(method: ClusteredModels, fleet: FleetView) -> Indices:
    """The model of least mean entropy for each client, among the clusters that are open."""
    under = {} if method.underlay is None else {"under": method.underlay}
    found = fleet.describe(entropies, stage="adopting new clients", models=method.clusters, **under)
    table = np.where(method.open_clusters, np.stack(found), np.inf)
    return np.argmin(table, axis=1).astype(np.int64)


def entropies(
    client: ClientView, models: npt.NDArray[np.float32], under: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float64]:
    """(K,) mean entropy of each model's probabilities on a client's inputs; labels are not looked at."""
    return sample_entropies(client, models, under).mean(axis=0)


def sample_entropies(
    client: ClientView, models: npt.NDArray[np.float32], under: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float64]:
    """(n, K): of each model's probabilities on each input; infinite where a model's output is not finite."""
    if client.classes is None:
        raise UserError(
            "Expected data with classes beside adoption=entropy, got a regression, whose predictions have no entropy: "
            "adopt by labels.",
            code="needs-classes", setting="adoption",
        )  # fmt: skip
    client = client.unlabelled()
    added: Any = 0.0 if under is None else client.outputs(under).astype(np.float64)
    return np.stack([_entropy(client.outputs(model).astype(np.float64) + added) for model in models], axis=1)


def _entropy(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """
    >>> _entropy(np.array([[0.0, 0.0], [50.0, 0.0]])).round(4).tolist()  # log 2, and none
    [0.6931, 0.0]
    """
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        each = -(np.exp(logs) * logs).sum(axis=1)
    return np.where(np.isfinite(each), each, np.inf)
