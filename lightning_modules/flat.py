"""One live module per process, whose state is one flat tensor: models go in and out as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archipelago.core.errors import UserError
from archipelago.core.plugins import is_ours
from archipelago.core.randomness import seeded_globals, seeded_torch
from archipelago.strategies.parameters import ModelEntry, ModelSpec, Vector
from lightning_modules.recipe import Recipe

OptimizerState = dict[str, npt.NDArray[Any]]


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over an array without copying, also where the array is read-only (the object store's are).

    Nobody writes to such a tensor: models are copied into the module, samples are indexed out.
    """
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns about read-only memory once per process; a writable view of the same memory avoids that.
    view = np.lib.stride_tricks.as_strided(array, writeable=False)
    interface = dict(view.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    holder = _ArrayInterface(interface, array)
    return torch.from_numpy(np.asarray(holder))


def is_value(array: npt.NDArray[Any]) -> bool:
    """Whether nobody can write to the memory of an array: neither through it nor through what it is a view of.

    Such memory is known by its address for as long as somebody keeps the array.
    """
    below: Any = array
    while isinstance(below, np.ndarray):
        if below.flags.writeable:
            return False
        below = below.base
    if below is None:
        return True
    try:
        return memoryview(below).readonly  # the object store's
    except TypeError:  # a tensor's, for example
        return False


def value_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that nobody can write to."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


class _ArrayInterface:
    def __init__(self, interface: dict[str, Any], owner: npt.NDArray[Any]) -> None:
        self.__array_interface__ = interface
        self.owner = owner  # keeps the memory alive as long as the view


class FlatModel:
    """A module whose parameters and floating-point buffers are views of one flat tensor.

    Loading a model is one copy, reading it out another. Integer buffers (BatchNorm's step counter) are not
    part of a model value: they start from the module's own values whenever a model is loaded. Values are float32
    whatever `precision` its forward passes have.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu", precision: str = "32") -> None:
        self.precision = precision
        self.module = module.to(device)
        self.of_users = any(_of_users(type(each)) for each in module.modules())
        self.device = torch.device(device)
        head, classifier = _head_of(module)
        tensors: list[tuple[str, Tensor, str]] = [(n, p, "parameter") for n, p in module.named_parameters()]
        floats = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        self._integers = [(n, b.clone()) for n, b in module.named_buffers() if not b.is_floating_point()]
        tensors += [(n, b, "buffer") for n, b in floats]
        entries, start = [], 0
        for name, tensor, kind in tensors:
            if tensor.dtype != torch.float32:
                raise UserError(
                    f"Expected a model of float32 tensors, got {tensor.dtype} for '{name}': "
                    "use local.engine=trainer with a precision option for mixed precision.",
                    code="wrong-dtype", dtype=tensor.dtype,
                )  # fmt: skip
            stop = start + tensor.numel()
            part = "head" if any(name.startswith(f"{h}.") or name == h for h in head) else "backbone"
            is_classifier = name == f"{classifier}.weight"
            entries.append(ModelEntry(name, tuple(tensor.shape), start, stop, kind, part, is_classifier))
            start = stop
        self.spec = ModelSpec(tuple(entries))
        self.flat = torch.empty(start, dtype=torch.float32, device=self.device)
        self._views: list[tuple[Tensor, Tensor]] = []
        self._owners: list[tuple[nn.Module, str] | None] = []  # of buffers, which a Trainer may replace
        for entry, (name, tensor, kind) in zip(entries, tensors, strict=True):
            view = self.flat[entry.start : entry.stop].view(tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            self._views.append((tensor, view))
            path, _, own = name.rpartition(".")
            self._owners.append((module.get_submodule(path), own) if kind == "buffer" else None)
        self.optimizer = _only_optimizer(module)
        self._slots = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._rates = [group["lr"] for group in self.optimizer.param_groups if "lr" in group]
        self._fresh = self.optimizer_state()  # what an optimizer holds before its first step (Adagrad does)
        self.recipe = Recipe()
        self._loaded: Vector | None = None
        # (model, samples) -> outputs in evaluation mode, where an engine has a way of its own; None: torch's.
        self.forward_pass: Callable[[Vector, npt.NDArray[np.int64]], Tensor | None] | None = None

    def tensors(self) -> list[tuple[ModelEntry, Tensor]]:
        """Every tensor of the live model and where it stands in the vector."""
        return [(entry, tensor) for entry, (tensor, _) in zip(self.spec.entries, self._views, strict=True)]

    def load(self, vector: Vector) -> None:
        """Make this model the live one; loading the same read-only memory again costs nothing."""
        held = self._loaded
        if held is not None and held.ctypes.data == vector.ctypes.data and held.size == vector.size:
            return  # the same memory, which `held` keeps alive and nobody can write to
        with torch.no_grad():
            self._reattach(keep=False)
            self.flat.copy_(tensor_of(vector))
            for name, start in self._integers:
                self.module.get_buffer(name).copy_(start)
        # Only memory that nobody can write to can be recognised again: any other may have changed since.
        self._loaded = vector if is_value(vector) else None

    def _reattach(self, *, keep: bool) -> None:
        """Make every tensor a view of the flat one again, where a module or a Trainer replaced it."""
        for (tensor, view), owner in zip(self._views, self._owners, strict=True):
            live = tensor if owner is None else owner[0]._buffers[owner[1]]
            if live is tensor and live.data_ptr() == view.data_ptr():
                continue
            if keep and live is not None:
                view.copy_(live.detach())
            tensor.data = view
            if owner is not None:
                owner[0]._buffers[owner[1]] = tensor

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward passes run in: bf16 arithmetic where the experiment asks for it."""
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def frozen_outputs(self, vector: Vector, x: Tensor) -> Tensor:
        """What another model says of some inputs, in evaluation mode, while the live one stays as it is."""
        values, training = tensor_of(vector).to(self.device), self.module.training
        tensors = {each.name: values[each.start : each.stop].view(each.shape) for each in self.spec.entries}
        self.module.eval()
        try:
            with torch.no_grad(), self.autocast():
                outputs: Tensor = torch.func.functional_call(self.module, tensors, (x,))
        finally:
            self.module.train(training)
        return outputs.float()

    def touch(self) -> None:
        """Say that the live model is about to change."""
        self._loaded = None

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """The global generators that the module may draw from, seeded; modules of torch and of ours use torch's."""
        return seeded_globals(seed) if self.of_users else seeded_torch(seed)

    @contextmanager
    def training_only(self, names: Sequence[str] | None) -> Iterator[None]:
        """Only these tensors are trained in this context, of those that are at all; None: no change."""
        if names is None:
            yield
            return
        chosen = set(names)
        held = [
            tensor
            for entry, tensor in self.tensors()
            if entry.kind == "parameter" and tensor.requires_grad and entry.name not in chosen
        ]
        try:
            for tensor in held:
                tensor.requires_grad_(False)
            yield
        finally:
            for tensor in held:
                tensor.requires_grad_(True)

    def refuse_added(self) -> None:
        """Refuse a user's module that has got parameters or buffers since it was made: nobody would average them."""
        if not self.of_users:
            return
        known = {entry.name for entry in self.spec.entries} | {name for name, _ in self._integers}
        live = [name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())]
        if added := [name for name in live if name not in known]:
            raise UserError(
                f"Expected {type(self.module).__name__} to make all parameters and buffers in its constructor, got "
                f"'{added[0]}' added later: it would be neither averaged nor kept; make it in __init__.",
                code="added-later", names=added,
            )  # fmt: skip

    def vector(self) -> Vector:
        """The live model as a value of its own, which nobody can write to."""
        self.refuse_added()
        self._reattach(keep=True)
        value = self.flat.detach().cpu().numpy().copy()
        value.flags.writeable = False
        return value

    def set_optimizer_state(self, state: OptimizerState | None) -> None:
        """Give the optimizer a client's state (None: a fresh start)."""
        self.optimizer.state.clear()
        for key, value in (state or self._fresh).items():
            index, _, name = key.partition(".")
            parameter = self._slots[int(index)]
            tensor = torch.from_numpy(value.copy())
            on_device = name != "step" and (tensor.ndim > 0 or tensor.shape == parameter.shape)
            self.optimizer.state[parameter][name] = tensor.to(self.device) if on_device else tensor

    def optimizer_state(self) -> OptimizerState:
        """The optimizer's state as plain arrays."""
        state = {}
        for index, parameter in enumerate(self._slots):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"{index}.{name}"] = torch.as_tensor(value).detach().cpu().numpy().copy()
        return state

    @contextmanager
    def rate(self, factor: float) -> Iterator[None]:
        """The learning rates of a round: those of the optimizer, times a factor."""
        groups = [group for group in self.optimizer.param_groups if "lr" in group]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate

    def clip(self) -> None:
        """Limit the live gradients as the recipe says."""
        if self.recipe.clip is None:
            return
        if self.recipe.clip_by == "norm":
            nn.utils.clip_grad_norm_(self._slots, self.recipe.clip)
        else:
            nn.utils.clip_grad_value_(self._slots, self.recipe.clip)

    def zero_grad(self) -> None:
        """Forget gradients, as the optimizer would, without its book-keeping (a tenth of its time)."""
        for parameter in self._slots:
            parameter.grad = None

    def flat_gradient(self) -> Vector:
        """The gradients of the live parameters as a vector (buffers and untouched parameters: zero)."""
        out = torch.zeros_like(self.flat)
        for entry, tensor in self.tensors():
            if entry.kind == "parameter" and tensor.grad is not None:
                out[entry.start : entry.stop] = tensor.grad.reshape(-1)
        value = out.cpu().numpy()
        value.flags.writeable = False
        return value


def _of_users(kind: type) -> bool:
    """Whether a class of a module is neither the platform's nor torch's: what it does is not known."""
    return not (is_ours(kind.__module__) or kind.__module__.split(".")[0] in ("torch", "torchvision"))


def _head_of(module: nn.Module) -> tuple[tuple[str, ...], str]:
    """(head submodules, last layer): what `model.head` or the module says, else derived from its layers."""
    chosen: tuple[str, ...] = getattr(module, "chosen_head", ())
    derived = chosen or derived_head(module)
    says: Any = module  # what it says of itself, if it has these methods
    head = says.head_modules() if not chosen and hasattr(module, "head_modules") else derived
    last = derived[-1] if derived else ""
    own_word = not chosen and hasattr(module, "classifier_module")
    return tuple(head), says.classifier_module() if own_word else last


def derived_head(module: nn.Module) -> tuple[str, ...]:
    """The fully-connected layers at the end: those after the last layer of another kind with parameters.

    >>> derived_head(nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2)))
    ('3', '4')
    """
    head: list[str] = []
    for name, layer in module.named_modules():
        if not any(True for _ in layer.parameters(recurse=False)):
            continue
        head = [*head, name] if isinstance(layer, nn.Linear) else []
    return tuple(head)


def _only_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    made = module.configure_optimizers()  # type: ignore[operator]
    if isinstance(made, torch.optim.Optimizer):
        return made
    raise UserError(
        f"Expected {type(module).__name__}.configure_optimizers to return one torch optimizer, got "
        f"{type(made).__name__}: schedulers and several optimizers are not supported in local training.",
        code="wrong-result", name="configure_optimizers",
    )  # fmt: skip
