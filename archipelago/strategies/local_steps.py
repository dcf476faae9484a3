"""What local steps add up to, for methods that read gradients off the way a client went."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.settings import LocalSettings
from archipelago.strategies.base import Context

Numbers = npt.NDArray[np.float64]


def accumulated_steps(steps: Numbers, momentum: float = 0.0) -> Numbers:
    """How many learning rates of gradient so many SGD steps add up to, with momentum that starts from zero.

    The gradient of step k of T counts 1 + m + ... + m^(T - 1 - k) times: their sum is FedNova's ||a||_1.

    >>> accumulated_steps(np.array([1.0, 3.0])).tolist(), accumulated_steps(np.array([1.0, 3.0]), 0.5).tolist()
    ([1.0, 3.0], [1.0, 4.25])
    """
    if not momentum:
        return steps
    left = 1.0 - momentum
    return (steps - momentum * (1.0 - momentum**steps) / left) / left


def optimizer_of(local: LocalSettings) -> tuple[str, float]:
    """The clients' optimizer as `accumulated_steps` knows it: ("sgd", its momentum), or what it is instead.

    >>> optimizer_of(LocalSettings(momentum=0.5)), optimizer_of(LocalSettings(optimizer="adam"))
    (('sgd', 0.5), ('adam', 0.0))
    >>> optimizer_of(LocalSettings(optimizer_options={"nesterov": True}))
    ('sgd with nesterov', 0.0)
    """
    if local.optimizer not in ("sgd", "torch.optim.SGD"):
        return local.optimizer, 0.0
    odd = [name for name in ("nesterov", "dampening", "maximize") if local.optimizer_options.get(name)]
    return (f"sgd with {odd[0]}", 0.0) if odd else ("sgd", local.momentum)


def refuse_other_optimizers(context: Context, what: str, instead: str = "use sgd") -> None:
    """Refuse a local optimizer whose steps are no sum of gradients."""
    if context.optimizer != "sgd":
        raise UserError(
            f"Expected local.optimizer=sgd as it is for {what}, got {context.optimizer}, whose steps are no sum of "
            f"gradients: {instead}.",
            code="local-optimizer",
            optimizer=context.optimizer,
        )
