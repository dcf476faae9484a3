"""Whether clients can be trained as one batched model: a step is tried, beside the module's own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_modules.engines.stacked.batched import Batch, BatchedModel
from lightning_modules.engines.stacked.layers import DROPOUTS
from lightning_modules.flat import FlatModel

PROBE = 1e-3  # relative difference of two steps that are the same but for rounding


def probe(model: FlatModel, batched: BatchedModel) -> str:
    """Why clients cannot be trained as one batched model, found by trying a step; else empty.

    A step of two clients with rows that only fill up must give what the module's own training step gives without
    them: its gradients, and its buffers afterwards. So whatever a module does that this engine does not know of (a
    training step or a layer of its own, a loss with parameters, rows that change each other) sends it to `loop`.
    """
    samples, module = batched.samples, batched.module
    rows = torch.from_numpy(np.arange(min(3, len(samples)), dtype=np.int32)).to(samples.rows_device)
    start = model.flat.detach().clone()
    compiles, bf16 = batched.compiles, batched.bf16
    batched.compiles = batched.bf16 = False  # the arithmetic is compared, not how it is done
    last = ["", ""]
    hooks = [
        layer.register_forward_pre_hook(functools.partial(_entered, last, name))
        for name, layer in module.named_modules()
        if name
    ]
    try:
        for copy in (model.module, batched.module):
            _quiet(copy, training=True)
        expected = _step_of_module(model, samples.inputs(rows), samples.targets(rows))
        found = _step_of_batched(batched, start, rows)
        batched.forward_many(start.expand(2, -1), rows.expand(2, -1))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the module raises under vmap is the reason, and is reported as such
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        where = f"layer '{last[0]}' ({last[1]})" if last[0] else f"{type(module).__name__}.forward"
        return f"torch cannot batch {where}: {said}"
    finally:
        batched.compiles, batched.bf16 = compiles, bf16
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        with torch.no_grad():
            model.flat.copy_(start)
        model.touch()
    return _difference(expected, found)


def _entered(last: list[str], name: str, layer: Any, given: Any) -> None:
    last[:] = [name, type(layer).__name__]


def _quiet(module: torch.nn.Module, *, training: bool) -> None:
    """Training mode without draws: these cannot be compared."""
    module.train(training)
    for layer in module.modules():
        if isinstance(layer, DROPOUTS):
            layer.eval()


Step = tuple[Tensor | None, Tensor]  # (gradients, None if a parameter has none; buffers afterwards)


def _step_of_module(model: FlatModel, x: Tensor, y: Tensor) -> Step:
    """What the module's own training step does to some rows."""
    module: Any = model.module
    model.zero_grad()
    loss = module.training_step((x, y), 0)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    loss.backward()
    parts = []
    for entry, tensor in model.tensors():
        if entry.kind == "parameter" and tensor.requires_grad:
            if tensor.grad is None:
                return None, model.flat
            parts.append(tensor.grad.reshape(-1))
        elif entry.kind == "parameter":
            parts.append(torch.zeros_like(tensor).reshape(-1))
    model.vector()  # buffers that were replaced come back
    return torch.cat(parts), model.flat[model.spec.parameters :].detach().clone()


def _step_of_batched(batched: BatchedModel, start: Tensor, rows: Tensor) -> Step:
    """The same as the second of two clients, with a row that does not count."""
    samples, real = batched.samples, len(rows)
    index = torch.cat([rows, rows[:1]]).expand(2, -1)
    device = batched.device
    weights = torch.full((2, real + 1), 1.0 / real, device=device)
    weights[:, real] = 0.0
    x = samples.inputs(index)
    x[:, real] += 1.0  # not even what it has in common with a real row may count
    batch: Batch = {
        "x": x,
        "y": samples.targets(index),
        "weights": weights,
        "length": torch.full((2,), float(real), device=device),
    }
    if batched.dropouts:
        batch["keys"] = torch.zeros(2, batched.dropouts, dtype=torch.int64, device=device)
    models = start.expand(2, -1)
    theta, buffers = models[:, : batched.parameters].clone(), models[:, batched.parameters :].clone()
    _quiet(batched.module, training=True)
    batched.context.step, batched.context.shortest = 0, min(real, 2)
    gradient, _, new = batched.gradient([], batch, [])(theta, buffers, batch)
    return batched.of_trained(gradient)[1], new[1]


def _difference(expected: Step, found: Step) -> str:
    """Why two steps are not the same; empty if they are."""
    if expected[0] is None:
        return "a parameter has no part in the loss"
    for what, own, other in (("gradients", expected[0], found[0]), ("buffers", expected[1], found[1])):
        assert other is not None
        scale = float(own.abs().max()) if own.numel() else 0.0
        if not torch.allclose(own, other, rtol=PROBE, atol=PROBE * scale + 1e-7, equal_nan=True):
            return (
                f"a batched step has other {what} than the module's own training step (a training step, layer or loss "
                "of its own, or rows of a batch that change each other)"
            )
    return ""
