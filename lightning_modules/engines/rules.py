"""Local steps by a rule (`archipelago/strategies/rules.py`), for engines that go through the module's training step.

The module asks its `local_objective` for a loss as always. Here that takes the gradients that the rule asks for, and
returns a loss whose gradient is what the rule said: so the optimizer, and a Trainer around it, notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archipelago.strategies.rules import Memory, Rule
from lightning_modules.engines.objective import LocalObjective
from lightning_modules.flat import FlatModel


@dataclass
class RuledObjective:
    """The objective of a job whose steps follow a rule."""

    rule: Rule
    objective: LocalObjective
    model: FlatModel
    batch: Callable[[int, int], tuple[Tensor, Tensor]]  # (step, number of one of its mini-batches)
    several: int  # mini-batches of a step
    steps: int
    memory: Memory = field(default_factory=dict)

    def __call__(self, module: Any, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        others = self.several - 1
        batches = [batch, *(self.batch(step, number) for number in range(1, self.several))]
        values: list[Tensor] = []
        here = self._parameters(module)

        def gradient(point: Tensor, number: int = 0) -> Tensor:
            self._load(module, point)
            place = step if number == 0 else self.steps + step * others + number - 1
            value = self.objective(module, batches[number], place)
            values.append(value.detach())
            return _gradient(module, value)

        found, memory = self.rule.step(here, self.memory, gradient)
        self.memory = {name: value.detach() for name, value in memory.items()}
        if self.rule.moves:
            self._load(module, found)
            # Nothing is left to the optimizer: a loss that no parameter has a part in.
            return values[0].clone().requires_grad_()
        self._load(module, here)
        live = torch.cat([parameter.reshape(-1) for parameter in module.parameters()])
        along = (live * found.detach()).sum()
        return values[0] + along - along.detach()

    def kept(self) -> dict[str, npt.NDArray[np.float32]]:
        """What becomes of the client's private models: parameters that the rule remembers, live buffers."""
        buffers = self.model.vector()[self.model.spec.parameters :]
        found = {}
        for name in self.rule.keeps:
            vector = np.concatenate([self.memory[name].cpu().numpy(), buffers])
            vector.flags.writeable = False
            found[name] = vector
        return found

    @staticmethod
    def _parameters(module: nn.Module) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])

    @staticmethod
    def _load(module: nn.Module, point: Tensor) -> None:
        with torch.no_grad():
            at = 0
            for parameter in module.parameters():
                parameter.copy_(point[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()


def _gradient(module: nn.Module, value: Tensor) -> Tensor:
    """The gradient of a value by all parameters, zero where they have no part in it."""
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    found = dict(zip(map(id, trained), torch.autograd.grad(value, trained, allow_unused=True), strict=True))
    parts = [found.get(id(parameter)) for parameter in parameters]
    return torch.cat(
        [
            torch.zeros_like(parameter).reshape(-1) if part is None else part.reshape(-1)
            for parameter, part in zip(parameters, parts, strict=True)
        ]
    )
