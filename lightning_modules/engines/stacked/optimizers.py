"""Optimizers over slabs: the parameters of all clients are one (clients, parameters) tensor, and so is each state.

The same arithmetic as torch's, element by element, with two additions: a client that is not active in a step keeps
everything, and Adam's counters are each client's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_modules.flat import FlatModel, OptimizerState

Slabs = dict[str, Tensor]  # states of all clients, by name


def reason_against_optimizer(model: FlatModel) -> str:
    """Why an optimizer cannot step all clients at once; empty if it can."""
    optimizer = model.optimizer
    kind, groups = type(optimizer), optimizer.param_groups
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return f"the optimizer {kind.__name__} is neither SGD nor Adam nor AdamW"
    if len(groups) != 1:
        return f"the optimizer has {len(groups)} groups of parameters"
    for option in ("maximize", "dampening", "amsgrad", "differentiable"):
        if groups[0].get(option):
            return f"the optimizer has {option}={groups[0][option]}"
    return ""


@dataclass(frozen=True)
class Counters:
    """How many steps each client has taken before this training, and what Adam makes of it, step by step."""

    steps: npt.NDArray[np.int64]  # (n,)
    table: Tensor | None  # (steps, 2, n): step size, root of the second bias correction
    rate: float = 1.0  # what the learning rate is multiplied with in this round

    def at(self, step: int, first: int) -> tuple[Tensor, Tensor]:
        """(first, 1) step sizes and roots."""
        assert self.table is not None
        return self.table[step, 0, :first, None], self.table[step, 1, :first, None]


class SlabOptimizer:
    """Steps all clients at once; reads its options from the module's own optimizer."""

    def __init__(self, model: FlatModel) -> None:
        self._options: dict[str, Any] = model.optimizer.param_groups[0]
        self._recipe = model.recipe
        self.is_adam = not isinstance(model.optimizer, torch.optim.SGD)
        self._decoupled = isinstance(model.optimizer, torch.optim.AdamW) or self._options.get(
            "decoupled_weight_decay", False
        )
        by_tensor = {id(tensor): entry for entry, tensor in model.tensors()}
        # Where each parameter of the optimizer stands in the vector: its states are kept under its number.
        self.entries = [by_tensor[id(parameter)] for parameter in self._options["params"]]
        self.width = model.spec.parameters
        covered = sum(entry.stop - entry.start for entry in self.entries)
        self._mask: Tensor | None = None
        self._moving = [p.requires_grad for p in self._options["params"]]
        if covered < self.width or not all(self._moving):
            mask = torch.zeros(self.width)
            for entry, moves in zip(self.entries, self._moving, strict=True):
                mask[entry.start : entry.stop] = float(moves)
            self._mask = mask.to(model.device)

    @property
    def names(self) -> tuple[str, ...]:
        """Which states there are."""
        if self.is_adam:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._options["momentum"] else ()

    def counters(
        self,
        steps: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        device: torch.device,
        rate: float = 1.0,
    ) -> Counters:
        """What a training of (n, S) batches needs to know of clients that have taken `steps` before it."""
        if not self.is_adam:
            return Counters(steps, None, rate)
        first, second = self._options["betas"]
        taken = steps[:, None] + np.cumsum(lengths > 0, axis=1)  # (n, S), after each step
        taken = np.maximum(taken, 1).astype(np.float64)
        sizes = float(self._options["lr"]) * rate / (1.0 - first**taken)
        roots = np.sqrt(1.0 - second**taken)
        table = np.stack([sizes, roots]).transpose(2, 0, 1).astype(np.float32)
        sent = torch.from_numpy(np.ascontiguousarray(table)).to(device, non_blocking=True)
        return Counters(steps, sent, rate)

    def step(
        self,
        theta: Tensor,
        gradient: Tensor,
        slabs: Slabs,
        active: Tensor | None,
        counters: Counters,
        step: int,
    ) -> None:
        """One step of all clients, in place; `active` is (n, 1), (1, parameters) or both, None if everything is."""
        options = self._options
        decay, rate = options["weight_decay"], options["lr"] * counters.rate
        before = theta.clone() if active is not None else theta
        held = {name: slab.clone() for name, slab in slabs.items()} if active is not None else {}
        if self._mask is not None:
            gradient = gradient * self._mask
        gradient = self._limited(gradient)
        if decay and self._decoupled:
            theta.mul_(1.0 - rate * decay if self._mask is None else 1.0 - rate * decay * self._mask)
        elif decay:
            pull = theta if self._mask is None else theta * self._mask
            gradient = gradient.add(pull, alpha=decay)
        if self.is_adam:
            self._adam(theta, gradient, slabs, *counters.at(step, len(theta)))
        else:
            self._sgd(theta, gradient, slabs, rate)
        if active is not None:
            torch.where(active, theta, before, out=theta)
            for name, slab in slabs.items():
                torch.where(active, slab, held[name], out=slab)

    def _limited(self, gradient: Tensor) -> Tensor:
        """Gradients clipped as the recipe says, each client's by itself."""
        recipe = self._recipe
        if recipe.clip is None:
            return gradient
        if recipe.clip_by == "value":
            return gradient.clamp(-recipe.clip, recipe.clip)
        norm = gradient.square().sum(dim=1, keepdim=True).sqrt()
        return gradient * (recipe.clip / (norm + 1e-6)).clamp(max=1.0)

    def _sgd(self, theta: Tensor, gradient: Tensor, slabs: Slabs, rate: float) -> None:
        momentum = self._options["momentum"]
        if momentum:
            # A buffer of zeros makes the first step what torch's first step is: the gradient itself.
            buffer = slabs["momentum_buffer"].mul_(momentum).add_(gradient)
            gradient = gradient.add(buffer, alpha=momentum) if self._options["nesterov"] else buffer
        theta.add_(gradient, alpha=-rate)

    def _adam(self, theta: Tensor, gradient: Tensor, slabs: Slabs, sizes: Tensor, roots: Tensor) -> None:
        first, second = self._options["betas"]
        mean = slabs["exp_avg"].lerp_(gradient, 1.0 - first)
        square = slabs["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        length = square.sqrt().div_(roots).add_(self._options["eps"])
        theta.addcmul_(mean / length, sizes, value=-1.0)

    # --- one client's states, as they stand in checkpoints ------------------------------------------------

    def to_state(self, rows: dict[str, npt.NDArray[np.float32]], steps: int) -> OptimizerState:
        """A client's rows of the slabs in the form that all engines share: by number of the parameter."""
        state: OptimizerState = {}
        for number, entry in enumerate(self.entries):
            if not self._moving[number]:
                continue
            if self.is_adam:
                state[f"{number}.step"] = np.asarray(float(steps), np.float32)
            for name in self.names:
                state[f"{number}.{name}"] = rows[name][entry.start : entry.stop].reshape(entry.shape)
        return state

    def from_state(self, state: OptimizerState, name: str, out: npt.NDArray[np.float32]) -> None:
        """The inverse of `to_state` for one state, into a row of zeros."""
        for number, entry in enumerate(self.entries):
            value = state.get(f"{number}.{name}")
            if value is not None:
                out[entry.start : entry.stop] = np.asarray(value, np.float32).reshape(-1)

    def steps_of(self, state: OptimizerState) -> int:
        """How many steps a state is from."""
        counts = [int(value) for name, value in state.items() if name.endswith(".step")]
        return counts[0] if self.is_adam and counts else 0
