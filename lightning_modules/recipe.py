"""What `local.*` says of a step of local training, beside its optimizer: augmented inputs, clipped gradients.

An engine asks for both (`Engine.batch`, `Engine.clip`) and declares that it does (`recipe = ("augment", "clip")`);
an engine that does not is refused beside these settings. The learning rate of a round and the loss with smoothed labels
reach every engine, through the module's own optimizer and training step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from archipelago.core.settings import LocalSettings
from lightning_modules.augmentations import Augmentations


@dataclass(frozen=True)
class Recipe:
    """The parts of a step that an engine does itself."""

    augment: Augmentations = field(default_factory=partial(Augmentations, LocalSettings()))
    clip: float | None = None  # what gradients are limited to
    clip_by: str = "norm"  # of the whole gradient, or of each number (value)

    @classmethod
    def of(cls, local: Any, mean: Any, std: Any) -> Recipe:
        """What some settings say."""
        return cls(Augmentations(local, mean, std), local.clip, local.clip_by)


def asked_of_engines(local: LocalSettings) -> dict[str, str]:
    """{part of a recipe that an engine must do: the setting that asks for it}."""
    return {
        **({"augment": "local.augment"} if local.augment else {}),
        **({"clip": "local.clip"} if local.clip is not None else {}),
    }
