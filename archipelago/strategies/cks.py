"""CKS: knowledge sharing between clusters, by a pull of every cluster towards what all have in common.

Ma, "Clustered Federated Learning", PhD thesis, University of Technology Sydney, chapters 5 and 6.

    min l(theta_i) + (lambda / 2) S
    S = ||theta_i - Theta_g||^2,  Theta_g = sum_k w_k Theta_k              (5.6), the default
    S = sum over k' != c(i) of w_k' ||theta_i - Theta_k'||^2               (5.5), `cks.form=pairwise`

    w_k   share of the data of all clients that cluster k held after the last round

Readings

Theta_g
    paper   the mean of all clients' models, (5.2)
    code    to 0.8: of what clients hold in mid-round; from 0.9: of the models at its start
    here    the weighted mean of the cluster models at the start of the round, which is the same
Its gradient
    code    from 0.9: none, the term is built from detached numbers
    here    it is differentiated
Parameters of the term
    paper   all (5.6); beside the contrast on the head only the backbone (6.1a)
    code    from 0.9: the backbone, BatchNorm's buffers included, lambda without 1/2
    here    as the paper; no buffers
    option  cks.form=pairwise is (5.5)
Weights
    paper   (5.4) has 1/m beside psi_i
    here    a misprint: weights act at aggregation; before the first assignment every cluster weighs the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.errors import UserError
from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import ClusteredModels, Strategy, bases_of
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector, normalised_rows, weighted_sums
from archipelago.strategies.penalties import Penalty, part
from archipelago.strategies.references import Indices, Models, PerClient, Reference


@dataclass
class CKSOptions:
    """`cks.lam=...`"""

    lam: float = setting(0.1, "strength of the sharing term", at_least=0)
    form: str = setting(
        "global",
        "pull to the global mean (5.6), or to every other cluster (5.5)",
        choices=("global", "pairwise"),
    )


@ADDONS.register(
    "cks", "knowledge sharing: a pull towards the mean of all clusters (thesis ch. 5)", label="CKS"
)
class CKS(Addon[ClusteredModels]):
    """(lambda / 2) S in the local objective."""

    expects = Expectations(
        cost=Cost(down=1),
        known=(
            Known(
                "groups",
                ("participation", "batchnorm", "sizes"),
                "models pulled together are hard to tell apart",
                -0.06,
            ),
            Known("accuracy", "batchnorm", "running statistics are not pulled together", limit=0.04),
            Known("oscillation", "batchnorm", "running statistics are not pulled together", limit=0.08),
            Known(
                "progress",
                "participation",
                "clients go back and forth between models that are alike",
                limit=0.04,
            ),
            Known("progress", "batchnorm", "running statistics are not pulled together", limit=0.05),
            Known(
                "cost",
                "participation",
                "the mean is sent to all clients that are asked in one round, too",
                limit=10.0,
            ),
            Known(
                "cost",
                ALL,
                "the mean is sent for every training of a round, of which CFL may have three",
                5.0,
            ),
        ),
    )

    Options = CKSOptions

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if not issubclass(base, ClusteredModels):
            return f"it shares between cluster models, which this base does not have; use {bases_of(ClusteredModels)}."
        return None

    def setup(self, base: ClusteredModels, fleet: FleetView) -> None:
        if not len(self.columns(fleet)):
            raise UserError(
                f"cks beside {' and '.join(self.on_heads)} shares the backbone of a model, and this one has none "
                "(every layer is fully connected): use a convolutional model, or leave one of them out.",
                code="needs-backbone", setting="method",
            )  # fmt: skip

    @property
    def on_heads(self) -> list[str]:
        """Add-ons that want the head to themselves (chapter 6: a contrast of parameters)."""
        return [addon.name for addon in self.beside if addon.claims == "head"]

    def columns(self, fleet: FleetView) -> npt.NDArray[np.int64]:
        """What is shared: all parameters, or the backbone where another add-on acts on the head."""
        return fleet.spec.columns("backbone" if self.on_heads else "parameters")

    def penalties(self, base: ClusteredModels, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        if not self.options.lam or c is None:
            return []
        columns = self.columns(fleet)
        shares = cluster_shares(base, fleet)
        if self.options.form == "global":
            mean = weighted_sums(list(base.clusters.values), shares[None])[0]  # Theta_g of (5.2)
            return [SharedPull(self.options.lam, columns, mean)]
        weights = np.repeat(shares[None], len(c), axis=0)
        weights[np.arange(len(c)), c] = 0.0  # k' != k
        return [PairwisePull(self.options.lam, columns, base.clusters, PerClient(weights))]


def cluster_shares(base: ClusteredModels, fleet: FleetView) -> npt.NDArray[np.float64]:
    """w_k: the share of all assigned data in each cluster; equal shares before the first assignment."""
    everyone = fleet.everyone
    assert base.assignment is not None
    labels = base.assignment[everyone.ids]
    known = labels >= 0
    if not known.any():
        return np.full(base.K, 1.0 / base.K)
    sizes = np.bincount(labels[known], weights=base.client_weights(everyone)[known], minlength=base.K)
    return normalised_rows(sizes[None])[0]


@dataclass(frozen=True)
class SharedPull:
    """(5.6)."""

    lam: float
    columns: npt.NDArray[np.int64]
    mean: Vector

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"mean": self.mean}

    @property
    def outputs(self) -> dict[str, Reference]:
        return {}

    def value(self, parameters: Tensor, anchors: dict[str, Tensor]) -> Tensor:
        away = part(parameters, self.columns) - part(anchors["mean"], self.columns)
        return 0.5 * self.lam * away.square().sum()

    def gradient(self, parameters: Tensor, anchors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        away = part(parameters, self.columns) - part(anchors["mean"], self.columns)
        gradient = torch.zeros_like(parameters)
        gradient[torch.as_tensor(self.columns)] = self.lam * away
        return 0.5 * self.lam * away.square().sum(), gradient


@dataclass(frozen=True)
class PairwisePull:
    """(5.5)."""

    lam: float
    columns: npt.NDArray[np.int64]
    models: Models
    weights: PerClient

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"models": self.models, "weights": self.weights}

    @property
    def outputs(self) -> dict[str, Reference]:
        return {}

    def value(self, parameters: Tensor, anchors: dict[str, Tensor]) -> Tensor:
        own, models = part(parameters, self.columns), part(anchors["models"], self.columns)
        away = (own.unsqueeze(0) - models).square().sum(dim=-1)
        return 0.5 * self.lam * (anchors["weights"].to(away.dtype) * away).sum()
