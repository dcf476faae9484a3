"""One module for many models: forward passes and gradients of all clients of a device, as batched operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archipelago.strategies.penalties import Penalty, features_of
from archipelago.strategies.rules import Memory, Rule
from lightning_modules.engines.objective import follows_contract, training_loss
from lightning_modules.engines.stacked.layers import (
    BatchContext,
    batched_copy,
    count_dropouts,
    reason_against_layers,
)
from lightning_modules.engines.stacked.optimizers import reason_against_optimizer
from lightning_modules.engines.stacked.samples import DeviceSamples
from lightning_modules.features import classifier_of, inputs_of
from lightning_modules.flat import FlatModel

PASS = 65_536  # samples in a forward pass of one model at most
VALUES = 2**28  # numbers of the widest activation in a forward pass at most: 1 GB

Batch = dict[str, Tensor]  # what one step needs for each client, by name
Anchors = list[dict[str, tuple[Tensor, bool]]]  # of each penalty: a value, and whether all clients share it


def is_per_sample(penalty: Penalty) -> bool:
    """Whether a penalty of outputs is a mean over the samples of a batch, as it declares (`per_sample = True`)."""
    by_sample = penalty.outputs or features_of(penalty)
    return not by_sample or bool(getattr(penalty, "per_sample", False))


class BatchedModel:
    """The module of a block as a function of flat models, one for all rows or one for each client.

    `exact` samples to a pass, filled up, keep every shape that a kernel sees the same, whatever clients are in a block.
    """

    def __init__(
        self,
        model: FlatModel,
        samples: DeviceSamples,
        *,
        unfold: bool,
        bf16: bool = False,
        exact: int | None = None,
        compiles: bool = False,
    ) -> None:
        self.samples, self.device, self.spec = samples, model.device, model.spec
        self.parameters = model.spec.parameters
        self.context = BatchContext()
        self.module = batched_copy(model.module, self.context, unfold=unfold)
        # One model on many samples is an ordinary convolution.
        self._single = batched_copy(model.module, self.context, unfold=False) if unfold else self.module
        self._frozen = _frozen_columns(model)
        self._loss: Callable[..., Tensor] = self.module.loss  # type: ignore[assignment]
        self._training_loss = training_loss(self.module)
        self.augment = model.recipe.augment
        self.dropouts = count_dropouts(self.module)
        self.bf16, self.exact = bf16, exact is not None
        self._entries = model.spec.entries
        self._sizes = [entry.stop - entry.start for entry in self._entries]
        self._buffers = [entry.name for entry in self._entries if entry.kind == "buffer"]
        self.rows_of_a_pass = self._pass_size() if exact is None else exact
        self.compiles = compiles
        self._compiled: dict[
            tuple[str, ...] | None, Any
        ] = {}  # gradients without penalties, by form of the batch

    # --- forward ------------------------------------------------------------------------------------------

    def _tensors(self, theta: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """The tensors of one model by name, as views."""
        count = sum(entry.kind == "parameter" for entry in self._entries)
        pieces = list(theta.split(self._sizes[:count]))
        pieces += list(buffers.split(self._sizes[count:])) if self._buffers else []
        return {
            entry.name: piece.reshape(entry.shape) for entry, piece in zip(self._entries, pieces, strict=True)
        }

    def _outputs(self, theta: Tensor, buffers: Tensor, x: Tensor, single: bool = False) -> Tensor:
        module = self._single if single else self.module
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            outputs: Tensor = torch.func.functional_call(module, self._tensors(theta, buffers), (x,))
        return outputs.float()

    def _seen(self, theta: Tensor, buffers: Tensor, x: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        """(outputs, features): what comes out of the classifier, and what goes into it."""
        with inputs_of(classifier_of(self._single if single else self.module, self.spec)) as seen:
            outputs = self._outputs(theta, buffers, x, single)
        return outputs, seen[-1].float().flatten(1)

    def _forward(self, features: bool, single: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """A forward pass that gives outputs, or features."""
        if features:
            return lambda theta, buffers, x: self._seen(theta, buffers, x, single)[1]
        return lambda theta, buffers, x: self._outputs(theta, buffers, x, single)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, no padded rows to look out for, no graph."""
        context = self.context
        context.mask = context.length = context.keys = None
        self.module.eval()
        self._single.eval()
        with torch.no_grad():
            yield

    def forward_one(self, model: Tensor, rows: Tensor, features: bool = False) -> Tensor:
        """(N, outputs) of one model on some samples; or its features."""
        theta, buffers = model[: self.parameters], model[self.parameters :]
        step, found = self.rows_of_a_pass, []
        forward = self._forward(features, single=True)
        with self._evaluating():
            parts = [self._filled(rows[start : start + step]) for start in range(0, len(rows), step)]
            for number, part in enumerate(parts):
                x = self.samples.inputs(part)
                if number + 1 < len(parts):
                    self.samples.prepare(parts[number + 1])
                found.append(forward(theta, buffers, x)[: len(rows) - number * step])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _filled(self, rows: Tensor) -> Tensor:
        """Rows of a pass, the first one again and again where all passes have the same number."""
        missing = self.rows_of_a_pass - len(rows)
        return torch.cat([rows, rows[:1].expand(missing)]) if self.exact and missing > 0 else rows

    def forward_many(self, models: Tensor, rows: Tensor, features: bool = False) -> Tensor:
        """(n, L, outputs) of n models, each on its own L samples; or their features."""
        theta, buffers = models[:, : self.parameters], models[:, self.parameters :]
        step = max(1, self.rows_of_a_pass // max(len(models), 1))
        with self._evaluating():
            batched = torch.func.vmap(self._forward(features, single=False))
            found = [
                batched(theta, buffers, self.samples.inputs(rows[:, start : start + step]))
                for start in range(0, rows.shape[1], step)
            ]
        return torch.cat(found, dim=1)

    def losses(self, outputs: Tensor, y: Tensor, *, training: bool = False) -> Tensor:
        """One loss per sample: that of evaluations, or what local training minimises."""
        losses = (self._training_loss if training else self._loss)(outputs, y, reduction="none")
        return losses.reshape(len(losses), -1).mean(dim=1) if losses.dim() > 1 else losses

    def _pass_size(self) -> int:
        """Samples of a forward pass: as many as keep the widest activation below `VALUES` numbers."""
        widest = int(np.prod(self.samples.shape, dtype=np.int64))

        def look(layer: Any, given: Any, made: Any) -> None:
            nonlocal widest
            if isinstance(made, Tensor):
                widest = max(widest, made.numel())

        hooks = [layer.register_forward_hook(look) for layer in self._single.modules()]
        try:
            with self._evaluating():
                self._single(torch.zeros(1, *self.samples.shape, device=self.device))
        finally:
            for hook in hooks:
                hook.remove()
        return max(1, min(PASS, VALUES // max(widest, 1)))

    # --- gradients ----------------------------------------------------------------------------------------

    def objective(self, terms: Sequence[Penalty], training: bool = True) -> Callable[..., tuple[Tensor, Any]]:
        """The objective of one client on one batch: (value, (value, new buffers)), to be differentiated by theta."""

        def objective(
            theta: Tensor, buffers: Tensor, batch: Batch, anchors: list[dict[str, Tensor]]
        ) -> tuple[Tensor, Any]:
            context, weights = self.context, batch["weights"]
            context.mask, context.length = (weights > 0).to(weights.dtype), batch["length"]
            context.keys, context.updates, context.uses = batch.get("keys"), {}, {}
            features = None
            if any(features_of(term) for term in terms):
                own, features = self._seen(theta, buffers, batch["x"])
            else:
                own = self._outputs(theta, buffers, batch["x"])
            outputs = own + batch["frozen"] if "frozen" in batch else own
            outputs = outputs * batch["scale"] if "scale" in batch else outputs
            losses = self.losses(outputs, batch["y"], training=training)
            if "sample_weights" in batch:
                losses = losses * batch["sample_weights"]
            value = (losses * weights).sum()
            for number, (penalty, given) in enumerate(zip(terms, anchors, strict=True)):
                seen = {name: batch[f"{number}.{name}"] for name in (*penalty.outputs, *features_of(penalty))}
                live = (
                    {"own_outputs": own}
                    if features is None
                    else {"own_outputs": own, "own_features": features}
                )
                value = value + _penalty(penalty, theta, live, given, seen, weights)
            updates = [context.updates.get(name) for name in self._buffers]
            # Nothing of this batch stays behind: its tensors belong to the transforms around this function.
            context.mask = context.length = context.keys = None
            context.updates = {}
            return value, (value, self._new_buffers(buffers, updates))

        return objective

    def _new_buffers(self, buffers: Tensor, updates: list[Tensor | None]) -> Tensor:
        if all(update is None for update in updates):
            return buffers
        kept = buffers.split(self._sizes[len(self._sizes) - len(self._buffers) :])
        return torch.cat(
            [old if new is None else new.reshape(-1) for old, new in zip(kept, updates, strict=True)]
        )

    def gradient(
        self, terms: Sequence[Penalty], batch: Batch, anchors: Anchors, *, training: bool = True
    ) -> Callable[..., Any]:
        """All clients' gradients: (n, parameters), (n,) values, (n, buffers), for batches of this form."""
        dimensions = [{name: None if shared else 0 for name, (_, shared) in each.items()} for each in anchors]
        form = None if terms or not self.compiles else (str(training), *sorted(batch))
        batched = self._compiled.get(form)
        if batched is None:
            differentiated = torch.func.grad(self.objective(terms, training), has_aux=True)
            batched = torch.func.vmap(differentiated, in_dims=(0, 0, dict.fromkeys(batch, 0), dimensions))
        if form is not None and form not in self._compiled:
            # On a GPU this replays CUDA graphs: launching kernels is what a small network's step costs there.
            mode = "reduce-overhead" if self.device.type == "cuda" else None
            batched = self._compiled[form] = torch.compile(batched, mode=mode)
        values = [{name: value for name, (value, _) in each.items()} for each in anchors]

        def compute(theta: Tensor, buffers: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            with torch.no_grad():  # gradients come from torch.func; a second graph would only cost
                gradient, (value, new) = batched(theta, buffers, batch, values)
            return gradient, value.detach(), new.detach()

        return compute

    def ruled(
        self, rule: Rule, terms: Sequence[Penalty], batches: Sequence[Batch], anchors: Anchors
    ) -> Callable[..., Any]:
        """All clients' steps by a rule: (n, parameters), (n,) values, (n, buffers), and what it remembers then."""
        differentiated = torch.func.grad(self.objective(terms), has_aux=True)

        def one(theta: Tensor, buffers: Tensor, given: list[Batch], constants: Any, memory: Memory) -> Any:
            values: list[Tensor] = []
            statistics = [buffers]

            def gradient(point: Tensor, number: int = 0) -> Tensor:
                slope, (value, new) = differentiated(point, statistics[-1], given[number], constants)
                values.append(value)
                statistics.append(new)
                return self.of_trained(slope)

            found, then = rule.step(theta, memory, gradient)
            return found, values[0], statistics[-1], then

        dimensions = [{name: None if shared else 0 for name, (_, shared) in each.items()} for each in anchors]
        constants = [{name: value for name, (value, _) in each.items()} for each in anchors]
        batched = torch.func.vmap(
            one, in_dims=(0, 0, [dict.fromkeys(batch, 0) for batch in batches], dimensions, 0)
        )

        def compute(theta: Tensor, buffers: Tensor, memory: Memory) -> Any:
            with torch.no_grad():
                return batched(theta, buffers, list(batches), constants, memory)

        return compute

    def training(self, step: int, shortest: int = 2) -> None:
        """The next passes are those of a step of local training whose shortest batch has so many rows."""
        self.module.train()
        self.context.step, self.context.shortest = step, min(shortest, 2)

    def evaluating(self) -> None:
        """The next passes move no statistics and draw nothing."""
        self.module.eval()

    def columns_of(self, names: Sequence[str]) -> Tensor:
        """(1, parameters) True in the columns of these tensors."""
        chosen = [
            np.full(entry.stop - entry.start, entry.name in names)
            for entry in self._entries
            if entry.kind == "parameter"
        ]
        return torch.from_numpy(np.concatenate(chosen)).to(self.device)[None]

    def of_trained(self, gradient: Tensor) -> Tensor:
        """Gradients of parameters that are trained; zeros for the others, as torch has it."""
        return gradient if self._frozen is None else gradient.masked_fill(self._frozen, 0.0)


def _penalty(
    penalty: Penalty, theta: Tensor, live: Batch, anchors: dict[str, Tensor], seen: Batch, weights: Tensor
) -> Tensor:
    """A term of the objective; one of outputs is asked sample by sample, so that rows that fill up count nothing."""
    if not seen:
        return penalty.value(theta, {**anchors, **live})

    def of_sample(given: Batch) -> Tensor:
        rows = {name: value.unsqueeze(0) for name, value in given.items()}
        return penalty.value(theta, {**anchors, **rows})

    return (torch.func.vmap(of_sample)({**live, **seen}) * weights).sum()


# -- What cannot be batched -----------------------------------------------------------------------------------


def reason_against(model: FlatModel) -> str:
    """Why a module's clients cannot be trained as one batched model, as far as it can be read off; else empty."""
    if not follows_contract(model.module):
        return f"{type(model.module).__name__} has no per-sample loss"
    return (
        reason_against_optimizer(model)
        or reason_against_layers(model.module)
        or model.recipe.augment.why_not_batched()
    )


def frozen_and_augmented(model: FlatModel, *, frozen: bool) -> str:
    """Why a training beside frozen models cannot be batched: their outputs would be of other inputs; else empty."""
    if frozen and model.recipe.augment:
        return "frozen models see the augmented inputs of every step (local.augment)"
    return ""


def _frozen_columns(model: FlatModel) -> Tensor | None:
    """(parameters,) True for those that are not trained; None if all are."""
    moving = [(entry, tensor.requires_grad) for entry, tensor in model.tensors() if entry.kind == "parameter"]
    if all(moves for _, moves in moving):
        return None
    frozen = np.concatenate([np.full(entry.stop - entry.start, not moves) for entry, moves in moving])
    return torch.from_numpy(frozen).to(model.device)
