"""Terms of the local objective beyond the data loss. Torch only.

A penalty must change the gradient: it is a differentiable function of the client's live parameters (one flat
tensor of the trainable columns) or of its live outputs on the batch, never of detached copies.

A penalty is a frozen dataclass. `anchors` names the fields that are references: they are resolved for each
client and held constant. `outputs` names the fields that are models whose outputs on the batch are
needed; those arrive in `anchors` as (samples, outputs) or, for K models, (samples, K, outputs), and with them
"own_outputs", the live outputs of the client's own model. `features`, which a penalty need not have, is the same for
what enters the classifier: the fields whose features are needed arrive as (samples, d), and "own_features" with them.
One that is a mean over the samples says so
(`per_sample = True`): then clients can be trained together, with batches that are filled up. A penalty travels to the
clients as it is, with encoded references in these fields.

One that looks at parameters alone may have `gradient(parameters, anchors)`, too: its value and its gradient with the
bits of autograd's, for an engine that has no autograd (`compiled`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from archipelago.strategies.references import Reference


class Penalty(Protocol):
    """One term of the local objective."""

    @property
    def anchors(self) -> dict[str, Reference]: ...

    @property
    def outputs(self) -> dict[str, Reference]: ...

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The term for one client, a scalar."""


def features_of(penalty: Penalty) -> dict[str, Reference]:
    """The fields of a penalty that are models whose features on the batch are needed."""
    return dict(getattr(penalty, "features", {}))


def knows_gradient(penalty: Penalty) -> bool:
    """Whether a penalty has its gradient in closed form: of the class that says its value, not of one it inherits."""
    said = [
        next((c for c in type(penalty).__mro__ if name in vars(c)), None) for name in ("gradient", "value")
    ]
    return said[0] is not None and said[0] is said[1]


def part(values: torch.Tensor, columns: npt.NDArray[np.int64]) -> torch.Tensor:
    """Some columns of the last dimension; neighbours, as all layers of a head are, without a copy."""
    if len(columns) and columns[-1] - columns[0] + 1 == len(columns) and (np.diff(columns) == 1).all():
        return values[..., int(columns[0]) : int(columns[-1]) + 1]
    return values.index_select(-1, torch.as_tensor(columns, device=values.device))


class _OfParameters:
    """A penalty that looks at parameters alone."""

    @property
    def outputs(self) -> dict[str, Reference]:
        return {}


@dataclass(frozen=True)
class Proximal(_OfParameters):
    """(mu / 2) ||theta - anchor||^2 over the trainable parameters."""

    mu: float
    anchor: Reference

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"anchor": self.anchor}

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.5 * self.mu * (parameters - anchors["anchor"]).square().sum()

    def gradient(
        self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        away = parameters - anchors["anchor"]
        return 0.5 * self.mu * away.square().sum(), self.mu * away


@dataclass(frozen=True)
class ProximalToMixture(_OfParameters):
    """(lam / 2) sum_s u_s ||theta - c_s||^2 over the trainable parameters; FedSoft (4).

    `centres` are S models, `importance` is u: S numbers for each client.
    """

    lam: float
    centres: Reference
    importance: Reference

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"centres": self.centres, "importance": self.importance}

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        u = anchors["importance"].to(parameters.dtype)
        return 0.5 * self.lam * (u * (parameters - anchors["centres"]).square().sum(dim=-1)).sum()

    def gradient(
        self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u, away = anchors["importance"].to(parameters.dtype), parameters - anchors["centres"]
        value = 0.5 * self.lam * (u * away.square().sum(dim=-1)).sum()
        return value, (0.5 * self.lam * u.unsqueeze(-1) * (2.0 * away)).sum(dim=0)


@dataclass(frozen=True)
class Linear(_OfParameters):
    """coefficient * <slope, theta - origin>: adds coefficient * slope to the gradient, wherever theta is."""

    coefficient: float
    slope: Reference
    origin: Reference

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"slope": self.slope, "origin": self.origin}

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.coefficient * (anchors["slope"] * (parameters - anchors["origin"])).sum()

    def gradient(
        self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.value(parameters, anchors), self.coefficient * anchors["slope"]
