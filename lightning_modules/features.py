"""What goes into a model's classifier, or comes out of one of its layers, while it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.registry import closest, nearest
from archipelago.strategies.parameters import ModelSpec
from lightning_modules.flat import FlatModel


def classifier_of(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """The last layer of a module, whose inputs are its features."""
    last = [entry.name.removesuffix(".weight") for entry in spec.entries if entry.classifier]
    if not last:
        raise UserError(
            f"Expected a module with a classifier, got {type(module).__name__} without one: name a layer, or set "
            "model.head.",
            code="no-classifier",
        )
    return module.get_submodule(last[0])


@contextmanager
def inputs_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What goes into a layer, as a part of the graph, in every forward pass in this context."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def seen_by(model: FlatModel, layer: str) -> Iterator[list[Tensor]]:
    """What goes into the classifier (no `layer`), or comes out of a layer, in every forward pass in this context."""
    module, seen = model.module, []
    known = {name: each for name, each in module.named_modules() if name}
    if not layer:
        last = classifier_of(module, model.spec)
        hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    else:
        full = f"network.{layer}" if f"network.{layer}" in known else layer
        if full not in known:
            there = [name.removeprefix("network.") for name in known]
            raise UserError(
                f"Unknown layer '{layer}'. {nearest(layer, there)}",
                code="unknown-name", kind="layer", name=layer, nearest=closest(layer, there),
            )  # fmt: skip
        hook = known[full].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    try:
        yield seen
    finally:
        hook.remove()
