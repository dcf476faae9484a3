"""Forward passes without a gradient: what models say about a client's samples, and what that costs in loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.errors import UserError
from archipelago.strategies.parameters import Vector
from lightning_modules.base import FederatedModule
from lightning_modules.engines.objective import default_losses, follows_contract, outputs_of
from lightning_modules.features import seen_by
from lightning_modules.flat import FlatModel
from lightning_modules.samples import Samples

Index = npt.NDArray[np.int64]
TIE = (
    1e-3  # what probabilities weigh in a vote: they decide between classes of equally many votes, never more
)


def ballot(outputs: Tensor) -> Tensor:
    """A model's vote for its likeliest class, and a trace of its probabilities, which breaks ties.

    >>> votes = ballot(torch.tensor([[1.0, 0.0, 0.9]])) + ballot(torch.tensor([[0.0, 3.0, 0.0]]))
    >>> int(votes.argmax()), round(float(votes.sum()), 6)
    (1, 2.0)
    """
    each = torch.arange(outputs.shape[-1], device=outputs.device)
    chosen = (outputs.argmax(dim=-1, keepdim=True) == each).to(outputs.dtype)
    return (chosen + TIE * outputs.softmax(dim=-1)) / (1.0 + TIE)


@dataclass(frozen=True)
class Forward:
    """The live module of a block and the samples it is shown."""

    model: FlatModel
    samples: Samples
    classes: int | None

    def outputs(self, vector: Vector, index: Index) -> Tensor:
        """A model's outputs on some samples."""
        return outputs_of(self.model, self.samples, vector, index)

    def features(self, vector: Vector, index: Index, layer: str = "") -> Tensor:
        """(samples, d): what enters a model's classifier, or what one of its layers puts out, in evaluation mode."""
        if not len(index):
            raise UserError(
                "Expected samples to compute features of, got a client without any in this split.",
                code="no-samples",
            )
        with seen_by(self.model, layer) as seen, torch.no_grad(), self.model.autocast():
            self.model.load(vector)
            self.model.module.eval()
            chunks = []
            for x in self.samples.inputs(index):
                seen.clear()
                self.model.module(x)
                if not seen:
                    raise UserError(
                        f"Expected a layer that a forward pass goes through, got '{layer}': name another one.",
                        code="unused-layer", layer=layer,
                    )  # fmt: skip
                chunks.append(seen[-1].float().flatten(1))
        return torch.cat(chunks)

    def sum_of_outputs(self, vectors: list[Vector], index: Index) -> Tensor | None:
        """The outputs of several models, added; None if there are none."""
        total = None
        for vector in vectors:
            outputs = self.outputs(vector, index)
            total = outputs if total is None else total + outputs
        return total

    def combined(self, models: list[Vector | None], weights: Any, combine: str, index: Index) -> Tensor:
        """The prediction of several models, as `Prediction` says; a model that is None counts for nothing."""
        held = [(m, vector) for m, vector in enumerate(models) if vector is not None and weights[m] != 0.0]
        total: Tensor | None = None
        for m, vector in held:
            outputs = self.outputs(vector, index)
            # A regression has no probabilities: there, both are the mean of the outputs.
            if combine == "probability_mean" and self.classes is not None:
                outputs = outputs.softmax(dim=-1)
            elif combine == "vote" and self.classes is not None:
                outputs = ballot(outputs)
            term = outputs if weights[m] == 1.0 else outputs * float(weights[m])
            total = term if total is None else total + term
        if total is None:
            raise ValueError("there is no model to predict with")
        count = float(sum(weights[m] for m, _ in held))
        return total if combine == "logit_sum" or count == 1.0 else total / count

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One loss per sample, by the module's own loss."""
        module: Any = self.model.module
        if not follows_contract(module):
            raise UserError(
                f"Expected a module with loss(outputs, y, reduction), got {type(module).__name__} which has "
                "none: add it (see lightning_modules/base.py) to use methods that compare models by their loss.",
                code="incomplete-module", lacks="loss",
            )  # fmt: skip
        losses: Tensor = module.loss(outputs, y, reduction="none")
        return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses

    @property
    def never_negative(self) -> bool:
        """Whether the module's losses are at least 0: cross-entropy and squared error are, and what says so."""
        module = type(self.model.module)
        own = getattr(module, "loss", None) is FederatedModule.loss
        return own or bool(getattr(module, "loss_is_never_negative", False))

    def losses_of_prediction(self, outputs: Tensor, y: Tensor, combine: str) -> Tensor:
        """One loss per sample of what `combined` gave."""
        if combine in ("probability_mean", "vote") and self.classes is not None:
            return torch.nn.functional.nll_loss(outputs.clamp_min(1e-12).log(), y, reduction="none")
        if not callable(getattr(self.model.module, "loss", None)):  # a module that only has a training_step
            return default_losses(outputs, y, self.classes)
        return self.losses(outputs, y)
