"""The LightningModule that every client trains.

The contract of a federated module: `forward(x)` gives logits, `loss(outputs, y, reduction="none")` one loss
per sample, `head_modules()` says which submodules are the head. The platform's own module wraps a network.
A foreign LightningModule that only has `training_step`, `forward` and `configure_optimizers` works with the
methods that need no more (no additive models, no penalties, no per-client losses; it is evaluated by
cross-entropy or squared error), and is refused by the others with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import lightning
import torch
from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.randomness import seeded_globals
from archipelago.core.registry import closest, nearest
from archipelago.core.settings import LocalSettings, ModelSettings
from archipelago.core.targets import construct, load_class
from lightning_modules.engines.objective import default_losses
from lightning_modules.flat import derived_head
from lightning_modules.initialisation import initialise
from lightning_modules.networks import build_network
from lightning_modules.optimizers import make_optimizer


class FederatedModule(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    channels_last = (
        True  # images may come pixel by pixel in memory (see samples.py): no `view` in the networks
    )

    def __init__(self, network: nn.Module, *, classes: int | None, local: LocalSettings) -> None:
        super().__init__()
        self.network = network
        self.classes = classes
        self.local = local
        # What a client minimises in one local training; the engine sets it, None means the plain loss.
        self.local_objective: Callable[[Any, Any, int], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits, or predictions of a regression."""
        return self.network(x)

    def loss(self, outputs: Tensor, y: Tensor, reduction: str = "none") -> Tensor:
        """Cross-entropy, or squared error where there are no classes."""
        return default_losses(outputs, y, self.classes, reduction)

    @property
    def training_loss(self) -> Callable[..., Tensor]:
        """What local training minimises: `loss`, with smoothed labels where `local.label_smoothing` says so."""
        if not self.local.label_smoothing or type(self).loss is not FederatedModule.loss:
            return self.loss  # a loss of one's own smooths as it likes
        return self._smoothed_loss

    def _smoothed_loss(self, outputs: Tensor, y: Tensor, reduction: str = "none") -> Tensor:
        return default_losses(outputs, y, self.classes, reduction, self.local.label_smoothing)

    def head_modules(self) -> tuple[str, ...]:
        """Names of the submodules that the papers call the head (the fully-connected layers)."""
        return tuple(f"network.{name}" for name in self._head())

    def classifier_module(self) -> str:
        """Name of the last layer, whose weight matrix the papers cluster on."""
        return "".join(f"network.{name}" for name in self._head()[-1:])

    def _head(self) -> tuple[str, ...]:
        """What the network says, else its fully-connected layers at the end."""
        said = getattr(self.network, "head", None)
        return said if isinstance(said, tuple) else derived_head(self.network)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """One step's objective: the mean loss, with what the method adds to it."""
        if self.local_objective is not None:
            return self.local_objective(self, batch, batch_idx)
        x, y = batch
        return self.training_loss(self(x), y).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that `local.*` describes."""
        return make_optimizer(self.local, self.parameters())


def load_target(target: str) -> type[lightning.LightningModule]:
    """The class behind `model.target=package.module.Class`."""
    return load_class("model.target", target, lightning.LightningModule)


def build_module(
    model: ModelSettings, local: LocalSettings, input_shape: tuple[int, ...], classes: int | None, seed: int
) -> lightning.LightningModule:
    """The module an experiment asks for, initialised from `seed` and from nothing else."""
    with seeded_globals(seed):
        if model.target is not None:
            module = _build_target(model.target, local=local, input_shape=input_shape, classes=classes)
        else:
            network = build_network(model, input_shape, classes)
            module = FederatedModule(network, classes=classes, local=local)
        if model.init != "default":  # what the module drew itself
            initialise(module, model.init)
    if model.head:
        module.chosen_head = checked_head(module, model.head)  # type: ignore[assignment]  # read by FlatModel
    return module


def checked_head(module: nn.Module, names: list[str]) -> tuple[str, ...]:
    """Full names of the submodules in `model.head`; those of a registered network need no prefix."""
    known = dict(module.named_modules())
    full = tuple(f"network.{name}" if f"network.{name}" in known else name for name in names)
    for name, given in zip(full, names, strict=True):
        if name not in known or not name:
            there = [each.removeprefix("network.") for each in known if each]
            raise UserError(
                f"Unknown submodule '{given}' in model.head. {nearest(given, there)}",
                code="unknown-name", kind="submodule", name=given, nearest=closest(given, there),
            )  # fmt: skip
    if not isinstance(getattr(known[full[-1]], "weight", None), Tensor):
        raise UserError(
            f"Expected the last of model.head to be the classifier, a layer with a weight, got '{names[-1]}': name "
            "that layer last.",
            code="no-classifier",
        )
    return full


def _build_target(target: str, **context: Any) -> lightning.LightningModule:
    return construct("model.target", target, load_target(target), **context)
