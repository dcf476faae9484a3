"""How a client that never trained finds its cluster: with labels, as its method says, or without.

    holdout_clients=0.2 adoption=entropy                  ar.adopt(run, new_clients, adoption="entropy")

`labels` is the method's own protocol (the cluster of least loss, in most). `entropy` needs no label: of the cluster
models, the one whose predictions on the client's inputs are the surest, by the mean entropy of its probabilities (an
idea of test-time adaptation: Wang et al., "Tent", ICLR 2021; as a rule for assignment it is the platform's own).

A rule of your own is a subclass of `AdoptionRule` under `@ADOPTION.register`, or named by its import path. It sees the
strategy and the new clients, who answer what `fleet.describe` asks of their views; one that needs no labels
(`needs_labels = False`) asks `client.unlabelled()`. A method that knows better (by descriptors, say) overrides
`ClusteredModels.adopt_unlabelled`, which `entropy` leaves to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import Registry
from archipelago.strategies.interface import ClientView, FleetView
from archipelago.strategies.references import Indices

if TYPE_CHECKING:
    from archipelago.strategies.base import ClusteredModels


class AdoptionRule:
    """Gives new clients a cluster of a method that has finished a round."""

    needs_labels: ClassVar[bool] = True

    def assign(self, method: ClusteredModels, fleet: FleetView) -> Indices:
        """The cluster of each client of `fleet`, none of which ever trained."""
        raise NotImplementedError(f"{type(self).__name__} has no assign")


ADOPTION: Registry[type[AdoptionRule]] = Registry("adoption rule", base=AdoptionRule)


@ADOPTION.register("labels", "by the method's own protocol, with labels: the cluster of least loss, in most")
class ByMethod(AdoptionRule):
    """`adopt` of the method."""

    def assign(self, method: ClusteredModels, fleet: FleetView) -> Indices:
        return method.adopt(fleet)


@ADOPTION.register("entropy", "without labels: the cluster model that is surest of its predictions, unless the "
                   "method has a way of its own")  # fmt: skip
class ByEntropy(AdoptionRule):
    """argmin_k mean_x H(softmax(f_k(x))); ties to the lowest."""

    needs_labels = False

    def assign(self, method: ClusteredModels, fleet: FleetView) -> Indices:
        return method.adopt_unlabelled(fleet)


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
    client = client.unlabelled()
    added: Any = 0.0 if under is None else client.outputs(under).astype(np.float64)
    return np.array([_entropy(client.outputs(model).astype(np.float64) + added) for model in models])


def _entropy(logits: npt.NDArray[np.float64]) -> float:
    """
    >>> round(_entropy(np.array([[0.0, 0.0], [50.0, 0.0]])), 4)  # half of log 2
    0.3466
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    each = -(np.exp(logs) * logs).sum(axis=1)
    return float(np.where(np.isfinite(each), each, np.inf).mean())
