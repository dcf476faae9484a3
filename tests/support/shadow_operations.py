"""What operations do on the shadow device: labels from inputs to outputs, mixed devices, counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from tests.support.shadow_book import CPU, DEVICE, Book, Kernel, Mixed, where

aten = torch.ops.aten
NO_KERNEL = {  # memory without a kernel, or a new name for the same memory
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten.is_pinned, aten._local_scalar_dense, aten.is_same_size,
}  # fmt: skip
# The host waits for a size or a value (for `.item()` too).
SYNCHRONISING = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
    aten.equal, aten.is_nonzero, aten.multinomial, aten._local_scalar_dense, aten.histc,
}  # fmt: skip
RENAMING = {  # views that do not say so, or that change a tensor's own shape
    aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.squeeze_, aten.unsqueeze_, aten.transpose_,
    aten.t_, aten.as_strided_, aten.set_, aten.resize_, aten.detach_,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
LIKE = {  # new memory after an example, which the call may want elsewhere
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided,
}  # fmt: skip
STRICT = {aten.cat, aten.stack}  # a zero-dimensional tensor of the CPU is not welcome here


class Calls:
    """The Python call that operations belong to: it says where memory is made that nobody gave a device."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.transfer: str | None = None  # what the next clone is made for
        self.checks = False  # inside checks of values that only the CPU's code makes


class Operations(TorchDispatchMode):
    """Carries labels from inputs to outputs, finds mixed devices, counts."""

    def __init__(self, book: Book, calls: Calls, *, dry: bool = False) -> None:
        super().__init__()
        self.book, self.calls, self.dry = book, calls, dry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        book, packet = self.book, func.overloadpacket
        inputs = list(tensors((args, kwargs)))
        given = kwargs.get("device")
        if given is not None and is_shadow(given):
            kwargs["device"] = torch.device("cpu")
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs["pin_memory"] = False
        labels = [book.storages.label(tensor) for tensor in inputs]
        known = {tensor.untyped_storage()._cdata for tensor in inputs if not tensor.is_sparse}
        if packet is aten._pin_memory:
            out = args[0].clone()
            book.storages.pin(out)
            return out
        if packet is aten.is_pinned:
            return book.storages.is_pinned(args[0])
        if self.dry and self._on_device(packet, inputs, labels, given):
            out = without_arithmetic(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        outputs = list(tensors(out))
        if pinned:
            for tensor in outputs:
                book.storages.pin(tensor)
        if packet is aten.clone and self.calls.transfer is not None:
            return self._transferred(args[0], out)
        here = self._device(func, packet, inputs, labels, args, kwargs, given)
        if here == DEVICE:
            for tensor in outputs:
                book.storages.put(tensor)
            self._count(func, packet, inputs, outputs, known, args, kwargs)
        return out

    def _on_device(self, packet: Any, inputs: list[Tensor], labels: list[str], given: Any) -> bool:
        """Whether an operation is the device's own, hence needs no result in a dry run."""
        if self.calls.transfer is not None or packet is aten._local_scalar_dense:
            return False
        if packet in (aten.copy_, aten._to_copy):  # a copy between devices has values to bring
            return bool(inputs) and CPU not in labels and not (given is not None and is_shadow(given))
        if inputs:
            return DEVICE in labels
        return (given is not None and is_shadow(given)) or self._of_call() == DEVICE

    def _transferred(self, source: Tensor, out: Tensor) -> Tensor:
        to, self.calls.transfer = self.calls.transfer, None
        if to == DEVICE:
            self.book.storages.put(out)
        assert to is not None
        size = source.numel() * source.element_size()
        # A copy that waits is counted by who asked for it, see `move`.
        self.book.copied(source, to, "to", blocking=False, size=size)
        return out

    def _device(
        self,
        func: Any,
        packet: Any,
        inputs: list[Tensor],
        labels: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Any,
    ) -> str:
        """Where an operation runs; reports one that mixes devices."""
        if given is not None and is_shadow(given):
            if packet is aten._to_copy and labels[0] == CPU:  # from C++: as_tensor of an array, for one
                size = inputs[0].numel() * (kwargs.get("dtype") or inputs[0].dtype).itemsize
                self.book.copied(inputs[0], DEVICE, str(packet), blocking=False, size=size)
                self.calls.transfer = None
                return "copied"
            return DEVICE
        if not inputs or (packet in LIKE and self._named()):
            return self._of_call()
        if DEVICE not in labels:
            return CPU
        if packet is aten.copy_ and labels[0] != labels[1]:
            self._copy_in_place(args, kwargs, labels)
            return "copied"
        if packet in INDEXING and labels[0] == DEVICE:
            labels = self._index_copies(packet, inputs, labels, args)
        first = func._schema.is_mutable or packet in STRICT  # what is written to has no excuse
        wrong = [
            position
            for position, (tensor, label) in enumerate(zip(inputs, labels, strict=True))
            if label == CPU and (tensor.dim() > 0 or (first and position == 0) or packet in STRICT)
        ]
        if wrong:
            shapes = tuple((label, tuple(t.shape)) for t, label in zip(inputs, labels, strict=True))
            self.book.mixed.append(Mixed(str(packet), where(), shapes))
        return DEVICE

    def _named(self) -> bool:
        """Whether the Python call names a device."""
        return bool(self.calls.stack) and self.calls.stack[-1][2].get("device") is not None

    def _of_call(self) -> str:
        """New memory: on the device that the Python call names, else where its tensors are."""
        if not self.calls.stack:
            return CPU
        _, args, kwargs = self.calls.stack[-1]
        if self._named():
            return DEVICE if is_shadow(kwargs["device"]) else CPU
        return DEVICE if any(self.book.storages.label(t) == DEVICE for t in tensors((args, kwargs))) else CPU

    def _copy_in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any], labels: list[str]) -> None:
        """`dst.copy_(src)` between devices: to the device in the target's type, from it in the source's."""
        target, source = args[0], args[1]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        kind = target if labels[0] == DEVICE else source
        size = source.numel() * kind.element_size()
        self.book.copied(source, labels[0], "copy_", blocking=blocking, size=size)

    def _index_copies(
        self, packet: Any, inputs: list[Tensor], labels: list[str], args: tuple[Any, ...]
    ) -> list[str]:
        """Indices of the CPU are welcome in `x[index]`, and cost a copy each."""
        indices = {id(tensor) for tensor in tensors(args[1])}
        found = list(labels)
        for position, tensor in enumerate(inputs):
            if position and id(tensor) in indices and labels[position] == CPU:
                size = tensor.numel() * tensor.element_size()
                self.book.copied(tensor, DEVICE, f"{packet} (index)", blocking=False, size=size)
                found[position] = DEVICE
        return found

    def _count(
        self,
        func: Any,
        packet: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        known: set[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self.calls.checks and packet in (aten.aminmax, aten.min, aten.max, aten._local_scalar_dense):
            return
        name, at = str(packet).removeprefix("aten."), where()
        repeats = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in SYNCHRONISING or repeats or _selects(packet, args):
            self.book.add(name, at, synchronisations=1)
        if packet is aten._local_scalar_dense:
            self.book.add(name, at, d2h_copies=1, d2h_bytes=inputs[0].element_size())
        view = (
            outputs
            and not func._schema.is_mutable
            and all(tensor.untyped_storage()._cdata in known for tensor in outputs)
        )
        if view or packet in NO_KERNEL or packet in RENAMING:
            return
        self.book.add(name, at, operations=1)
        if self.book.kernels is not None:
            moved = sum(_bytes(tensor) for tensor in (*inputs, *outputs))
            self.book.kernels.append(Kernel(self.book.stage, name, moved, _flops(packet, args, outputs)))


def without_arithmetic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros of the shape, type and strides that results would have; integers of integers, and truths, are computed.

    Zeros that nobody writes to take no memory. What an operation writes to stays as it is.
    """
    if func.overloadpacket in RENAMING:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        written = [
            given[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
        ]
        if not all(tensor.is_floating_point() for tensor in tensors(written)):
            return func(*args, **kwargs)
        # The schema's own word for what is written is also what is returned.
        return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
    if func.overloadpacket in RENAMING or any(
        result.alias_info is not None for result in func._schema.returns
    ):
        return func(*args, **kwargs)  # a view

    key = (func, tree_map(_signature, (args, tuple(sorted(kwargs.items())))))
    try:
        shapes = _SHAPES[key] if key in _SHAPES else _SHAPES.setdefault(key, _shapes(func, args, kwargs))
    except TypeError:  # an argument that cannot be a key
        shapes = _shapes(func, args, kwargs)
    return func(*args, **kwargs) if shapes is None else tree_map(_zeros, shapes)


_SHAPES: dict[Any, Any] = {}


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (Tensor, value.shape, value.stride(), value.dtype)
    return (type(value), value)


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors without memory, in the shape of the results; None if they must be computed."""

    def shape_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    elsewhere = tree_map(shape_of, kwargs)
    if "device" in elsewhere or not any(True for _ in tensors((args, kwargs))):
        elsewhere["device"] = torch.device("meta")
    try:
        shapes = func(*tree_map(shape_of, args), **elsewhere)
    except (NotImplementedError, RuntimeError):  # sizes that depend on values, or no such kernel
        return None
    floating = any(tensor.is_floating_point() for tensor in tensors((args, kwargs, shapes)))
    # Whether something is finite, or equal, is looked at: that is cheap, and zero would be the wrong answer.
    return shapes if floating and not any(tensor.dtype == torch.bool for tensor in tensors(shapes)) else None


def _zeros(like: Any) -> Any:
    if not isinstance(like, Tensor):
        return like
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = torch.from_numpy(np.zeros(extent * like.element_size(), np.uint8)).view(like.dtype)
    return memory.as_strided(like.shape, like.stride())


def _bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())  # an expanded one is read once


def _flops(packet: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    out = outputs[0] if len(outputs) == 1 else tuple(outputs)
    if packet is aten.convolution_backward:
        mask = args[-1]
        given = iter(outputs)
        out = tuple(next(given) if wanted else None for wanted in mask)
    return int(formula(*args, out_val=out))


def _selects(packet: Any, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, whose number of true values the host must know."""
    if packet not in INDEXING:
        return False
    masks = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(args[1]))
    return masks and not (len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def is_shadow(device: Any) -> bool:
    """Whether a device's name, number or value means the shadow device."""
    return isinstance(device, int) or torch.device(device).type == "cuda"
