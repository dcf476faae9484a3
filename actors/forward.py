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
from lightning_modules.flat import FlatModel
from lightning_modules.samples import Samples

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Forward:
    """The live module of a block and the samples it is shown."""

    model: FlatModel
    samples: Samples
    classes: int | None

    def outputs(self, vector: Vector, index: Index) -> Tensor:
        """A model's outputs on some samples."""
        return outputs_of(self.model, self.samples, vector, index)

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
                outputs = torch.nn.functional.one_hot(outputs.argmax(dim=-1), outputs.shape[-1]).float()
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
                "none: add it (see lightning_modules/base.py) to use methods that compare models by their loss."
            )
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


class ClientView:
    """A client as its own code sees it: its samples' losses and nothing of the others."""

    def __init__(self, client: int, index: Index, forward: Forward) -> None:
        self.id, self._index, self._forward = client, index, forward
        self.forwards = 0  # samples that went through a model

    @property
    def size(self) -> int:
        """n_i."""
        return len(self._index)

    def sample_losses(self, models: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(samples, K) training losses under each model."""
        forward, index = self._forward, self._index
        y = forward.samples.targets(index)
        self.forwards += len(index) * len(models)
        columns = [forward.losses(forward.outputs(models[k], index), y) for k in range(len(models))]
        return torch.stack(columns, dim=1).cpu().numpy()
