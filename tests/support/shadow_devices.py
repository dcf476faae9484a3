"""What Python code asks and says about devices, answered for the shadow device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.shadow_book import CPU, DEVICE, Book, where
from tests.support.shadow_operations import Calls, is_shadow


class Devices(TorchFunctionMode):
    """Answers what Python code asks and says about devices."""

    def __init__(self, book: Book, calls: Calls) -> None:
        super().__init__()
        self.book, self.calls = book, calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = ANSWERS.get(func)
        self.calls.stack.append((func, args, kwargs))
        try:
            return func(*args, **kwargs) if answer is None else answer(self, func, *args, **kwargs)
        finally:
            self.calls.stack.pop()

    def label(self, tensor: Tensor) -> str:
        """Where a tensor is."""
        return self.book.storages.label(tensor)

    def move(
        self, x: Tensor, to: str, *, non_blocking: bool = False, dtype: Any = None, **how: Any
    ) -> Tensor:
        """A copy on another device. To the device, the host changes the type; from it, the host does so too."""
        if to == DEVICE and dtype is not None and dtype != x.dtype:
            x = x.to(dtype)
        if to == CPU and not _dense(x):  # a kernel brings it together first
            self.book.add("contiguous", where(), operations=1)
        self.calls.transfer = to
        try:
            out = torch.clone(x, **how)
        finally:
            self.calls.transfer = None
        if to == CPU and not non_blocking:
            self.book.add("to", where(), synchronisations=1)
        return out.to(dtype) if to == CPU and dtype is not None and dtype != x.dtype else out


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _device(mode: Devices, func: Any, x: Tensor, *rest: Any) -> torch.device:
    return torch.device(mode.label(x))


def _is_cuda(mode: Devices, func: Any, x: Tensor, *rest: Any) -> bool:
    return mode.label(x) == DEVICE


def _is_cpu(mode: Devices, func: Any, x: Tensor, *rest: Any) -> bool:
    return mode.label(x) == CPU


def _get_device(mode: Devices, func: Any, x: Tensor) -> int:
    return 0 if mode.label(x) == DEVICE else -1


def _to(mode: Devices, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`x.to(device, dtype, non_blocking, copy)`, `x.to(dtype, ...)`, `x.to(other, ...)`."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags = []
    for each in args:
        if isinstance(each, bool):
            flags.append(each)
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            device, dtype = mode.label(each), each.dtype
        elif each is not None:
            device = each
    other = kwargs.get("other")
    if other is not None:
        device, dtype = mode.label(other), other.dtype
    non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
    copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    how = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    to = mode.label(x) if device is None else DEVICE if is_shadow(device) else str(torch.device(device))
    if to == mode.label(x):
        return func(x, x.dtype if dtype is None else dtype, copy=copy, **how)
    return mode.move(x, to, non_blocking=non_blocking, dtype=dtype, **how)


def _cpu(mode: Devices, func: Any, x: Tensor, memory_format: Any = None) -> Tensor:
    return _to(mode, Tensor.to, x, "cpu", memory_format=memory_format)


def _cuda(
    mode: Devices,
    func: Any,
    x: Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    return _to(mode, Tensor.to, x, DEVICE, non_blocking=non_blocking, memory_format=memory_format)


def _type_as(mode: Devices, func: Any, x: Tensor, other: Tensor) -> Tensor:
    return _to(mode, Tensor.to, x, other)


def _numpy(mode: Devices, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if mode.label(x) == DEVICE and not kwargs.get("force"):
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )
    if mode.label(x) == DEVICE:
        return mode.move(x.detach(), CPU).numpy()
    return func(x, *args, **kwargs)


def _tolist(mode: Devices, func: Any, x: Tensor) -> Any:
    return func(mode.move(x.detach(), CPU) if mode.label(x) == DEVICE else x)


def _made(mode: Devices, func: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """`torch.tensor` and its kin: made on the host, then copied."""
    base = args[0] if args and isinstance(args[0], Tensor) else None
    if device is None and base is not None:
        device = mode.label(base)  # new_tensor and as_tensor follow a tensor
    if device is None or not is_shadow(device):
        if base is not None and func is not Tensor.new_tensor and mode.label(base) == DEVICE:
            base = mode.move(base, CPU)
            args = (base, *args[1:])
        return func(*args, **kwargs)
    if base is not None and func is not Tensor.new_tensor and mode.label(base) == DEVICE:
        return func(*args, **kwargs)
    kwargs.pop("pin_memory", None)
    made = func(*args, **kwargs)
    return mode.move(made.detach(), DEVICE).requires_grad_(made.requires_grad)


def _deepcopy(mode: Devices, func: Any, x: Tensor, memo: dict[int, Any]) -> Tensor:
    if mode.label(x) == CPU:
        return func(x, memo)
    if id(x) in memo:
        return memo[id(x)]
    with torch.no_grad():
        made = x.detach().clone()
    if isinstance(x, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=x.requires_grad)
    else:
        made.requires_grad_(x.requires_grad)
    memo[id(x)] = made
    return made


def _one_hot(mode: Devices, func: Any, x: Tensor, num_classes: int = -1) -> Tensor:
    """The CPU's code looks at every value, a GPU's does not where the number of classes is given."""
    mode.calls.checks = num_classes > 0
    try:
        return func(x, num_classes)
    finally:
        mode.calls.checks = False


def _getters(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        yield getattr(Tensor, name).__get__


ANSWERS: dict[Any, Callable[..., Any]] = {
    **dict(zip(_getters(("device", "is_cuda", "is_cpu")), (_device, _is_cuda, _is_cpu), strict=True)),
    Tensor.get_device: _get_device,
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.cuda: _cuda,
    Tensor.type_as: _type_as,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.tolist: _tolist,
    Tensor.__deepcopy__: _deepcopy,
    Tensor.new_tensor: _made,
    torch.tensor: _made,
    torch.as_tensor: _made,
    torch.asarray: _made,
    torch.nn.functional.one_hot: _one_hot,
}
