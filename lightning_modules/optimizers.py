"""The clients' optimizer: any of torch's by its name in small letters, or any subclass of Optimizer by import path.

    local.optimizer=rmsprop local.optimizer_options.alpha=0.9
    local.optimizer=my_module.Lion local.optimizer_options.betas=[0.9,0.99]

`local.lr` and `local.weight_decay` go to every one, `local.momentum` to sgd; all other arguments are
`local.optimizer_options`. One of your own may be registered with a name (`@OPTIMIZERS.register("lion", "...")`). Its
state, whatever tensors it keeps for each parameter, stays with a client from round to round and in checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from archipelago.core.errors import UserError
from archipelago.core.registry import Registry
from archipelago.core.settings import LocalSettings

OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer", section="local", base=Optimizer)

# Local training is steps of dense gradients: no closures, no sparse ones.
NOT_FOR_STEPS = {
    "LBFGS": "evaluates the loss several times in a step",
    "SparseAdam": "takes sparse gradients alone",
}


def _register_all() -> None:
    for name in sorted(set(torch.optim.__all__)):
        found = getattr(torch.optim, name)
        if (
            isinstance(found, type)
            and issubclass(found, Optimizer)
            and found is not Optimizer
            and name not in NOT_FOR_STEPS
        ):
            OPTIMIZERS.register(name.lower(), f"torch.optim.{name}", label=name)(found)


_register_all()


def arguments_of(local: LocalSettings, kind: type[Optimizer]) -> dict[str, Any]:
    """What an optimizer is made with: what it has parameters for, and all of `local.optimizer_options`."""
    takes = inspect.signature(kind.__init__).parameters
    given = {name: _tuples(value) for name, value in local.optimizer_options.items()}
    for name in given:
        if name in ("lr", "weight_decay") or (name == "momentum" and kind is torch.optim.SGD):
            raise UserError(
                f"Expected local.{name}, got local.optimizer_options.{name}: that is the same for every optimizer.",
                code="wrong-place", setting=f"local.optimizer_options.{name}", meant=f"local.{name}",
            )  # fmt: skip
    plain: dict[str, Any] = {"lr": local.lr}
    if kind is torch.optim.SGD:
        plain["momentum"] = local.momentum
    if "weight_decay" in takes:
        plain["weight_decay"] = local.weight_decay
    elif local.weight_decay:
        raise UserError(
            f"Expected local.weight_decay=0 beside local.optimizer={local.optimizer}, which takes none, got "
            f"{local.weight_decay:g}: leave it out, or choose another optimizer.",
            code="incompatible", settings=("local.weight_decay", "local.optimizer"),
        )  # fmt: skip
    return plain | given


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def make_optimizer(local: LocalSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer that `local.*` describes."""
    kind = OPTIMIZERS.find(local.optimizer)
    arguments: Any = arguments_of(local, kind)
    trained = list(parameters)
    if not trained:  # no fault of the optimizer, which would be blamed for it
        raise ValueError("the network has no parameters to train")
    try:
        return kind(trained, **arguments)
    except Exception as error:  # whatever torch or the user's own class says of its arguments
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise UserError(
            f"local.optimizer={local.optimizer} cannot be made with {shown}: {cause} "
            "(local.optimizer_options.NAME=VALUE gives its arguments).",
            code="cannot-be-made", name=local.optimizer,
        ) from error  # fmt: skip


def check_optimizer(local: LocalSettings) -> None:
    """Refuse an optimizer that is unknown, cannot be made, or needs more than a gradient."""
    kind = OPTIMIZERS.find(local.optimizer)
    for each in kind.__mro__:
        if each.__module__.startswith("torch.optim") and each.__name__ in NOT_FOR_STEPS:
            raise UserError(
                f"Expected local.optimizer to step by one gradient, got '{local.optimizer}', which "
                f"{NOT_FOR_STEPS[each.__name__]}: choose another one.",
                code="unfit-optimizer", setting="local.optimizer", given=local.optimizer,
            )  # fmt: skip
    make_optimizer(local, [nn.Parameter(torch.zeros(2, 2))])
