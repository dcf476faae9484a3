"""Terms of the local objective beyond the data loss. Torch only.

A penalty must change the gradient: it is a differentiable function of the client's live parameters (one flat
tensor of the trainable columns), never of detached copies. Its anchors are references that are resolved
per client and held constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from strategies.references import Reference


class Penalty(Protocol):
    """One term; `anchors` names what has to be resolved for each client."""

    @property
    def anchors(self) -> dict[str, Reference]: ...

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The term for one client, a scalar."""


@dataclass(frozen=True)
class Proximal:
    """(mu / 2) ||theta - anchor||^2 over the trainable parameters."""

    mu: float
    anchor: Reference

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"anchor": self.anchor}

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.5 * self.mu * (parameters - anchors["anchor"]).square().sum()
