"""How a client makes a step, for methods whose step is not along the gradient at the model itself. Torch only.

A rule is a frozen dataclass that travels to the clients as a penalty does. `fleet.train(rule=...)` asks it for every
local step: it is given the model, what it remembers of the client, and a function for the gradient of the local
objective (penalties included) at any point, on one of the step's mini-batches.

    @dataclass(frozen=True)
    class LookAhead:
        passes = (1, 1)   # gradients that it takes on each mini-batch of a step: here one on each of two
        keeps = ()        # what it remembers that becomes a private model of the client, by name
        moves = False     # what `step` returns is a gradient, which the optimizer steps along; True: the next model
        alpha: float

        @property
        def remembers(self):
            return {}     # by name: references, what it remembers at the beginning of the training

        def step(self, model, memory, gradient):
            return gradient(model - self.alpha * gradient(model, 0), 1), memory

`step` is a function of its arguments: vectors of the trainable parameters, which it must not write to, and numbers.
So it is the same for one client and for many at once (`torch.func.vmap`). Running statistics of BatchNorm move with
every gradient. The objective that is reported is that of a step's first gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from archipelago.strategies.references import Reference

Memory = dict[str, Tensor]  # vectors of parameters, or numbers, by name


class Gradient(Protocol):
    """The gradient of the local objective at a point, on a mini-batch of the step."""

    def __call__(self, point: Tensor, batch: int = 0, /) -> Tensor: ...


class Rule(Protocol):
    """How a local step follows from gradients."""

    @property
    def passes(self) -> tuple[int, ...]:
        """Gradients that a step takes on each of its mini-batches."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """What of its memory becomes a private model, with the running statistics of the client's model."""

    @property
    def moves(self) -> bool:
        """Whether `step` gives the next model, past the optimizer; else the gradient that it steps along."""

    @property
    def remembers(self) -> dict[str, Reference]:
        """What its memory begins with."""

    def step(self, model: Tensor, memory: Memory, gradient: Gradient) -> tuple[Tensor, Memory]:
        """(gradient or next model, what it remembers then)."""
