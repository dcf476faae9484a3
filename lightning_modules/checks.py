"""What is refused of a network before anything is started: one that cannot be imported, made, or held in memory."""

from __future__ import annotations

import re

from archipelago.core.causes import USERS, cause_of, refuse_end
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings


def check_target(config: ExperimentSettings) -> None:
    """A module of the user's own must be importable here, before anything is started elsewhere."""
    target = config.model.target
    if target is None:
        return
    if config.model.name != "auto":
        raise UserError(
            f"Expected model.name or model.target, got both ('{config.model.name}' and '{target}'): "
            "leave one of them out.",
            code="either-or", settings=("model.name", "model.target"),
        )  # fmt: skip
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
        raise UserError(
            f"Expected model.target as package.module.Class, got '{target}': write where it is defined.",
            code="wrong-form", setting="model.target", given=target,
        )  # fmt: skip
    import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)
    from lightning_modules.base import load_target

    load_target(target)


def check_module(config: ExperimentSettings, input_shape: tuple[int, ...], classes: int | None) -> None:
    """Whether a user's module can be made, trained and sent as a model value, only the module itself can say.

    What it does with the samples is its own affair.
    """
    from archipelago.core.randomness import seeded_globals
    from lightning_modules.base import build_module
    from lightning_modules.flat import FlatModel

    target = config.model.target
    try:
        module = build_module(config.model, config.local, input_shape, classes, config.seed)
        with seeded_globals(config.seed):
            FlatModel(module)
    except UserError:
        raise
    except USERS as error:  # whatever the user's own code raises
        refuse_end(error)
        raise UserError(
            f"model.target={target} cannot be used: {cause_of(error)}.", code="cannot-be-made", name=target
        ) from error


def check_size(parameters: int) -> None:
    """Refuse a network that this machine could not hold three times over: its values, gradients and momentum."""
    import psutil

    needed, here = 12 * parameters, psutil.virtual_memory().total
    if needed > here:
        raise UserError(
            f"Expected a network that fits into memory, got one of {parameters:,} parameters: it needs "
            f"{needed / 1e9:,.0f} GB with its gradients and momentum, and this machine has {here / 1e9:,.0f} GB; "
            "choose a smaller model.",
            code="too-large", setting="model", parameters=parameters,
        )  # fmt: skip
