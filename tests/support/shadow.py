"""A GPU that is not there: CPU tensors whose storages carry a device label, and a count of what a GPU would do.

    with ShadowDevice() as device:
        model.to("cuda:0")
        with device.stage("train"):
            ...
    device.counts                  # Counts(operations, h2d_copies, h2d_bytes, d2h_copies, d2h_bytes, synchronisations)
    device.stages["train"]         # the same of one stage
    print(device.table())          # by line of the project
    assert not device.mixed        # operations that a GPU would have refused

Code under it is unmodified: `.to("cuda:0")`, `device=`, `.device`, `torch.cuda.is_available()` and its kin work and
say what they would say on a machine with one GPU. A torch function mode answers what Python asks of devices; a
dispatch mode below torch.func and autograd carries labels from inputs to outputs and counts:

- an *operation*: one ATen operation that is not a view and not an empty allocation, with an input on the device;
- a *copy* to or from the device, with its bytes: `.to`, `.cpu`, `copy_` between devices, `torch.tensor(device=)`, an
  index of the CPU in `x[index]`, `.item()` (one value);
- a *synchronisation*: `.item()`, `float()`, `.tolist()`, `nonzero` and masks as indices, sizes that depend on values,
  a copy to the CPU that is not `non_blocking`, `torch.cuda.synchronize()`; never a copy *to* the device.

What it cannot see:

- time, and how many kernels an ATen operation is (a convolution's backward is up to three, here one; an LSTM is one
  on a GPU and many here); what cuDNN or cuBLAS choose; the random numbers and the bits of a GPU;
- other threads: modes belong to the thread that entered them. Tensors that cross over keep their labels, but what
  another thread does to them is not counted, and its `.to("cuda:0")` fails;
- `.device`, `.to` and `.cpu` inside functions of torch that are written in Python (this mode is off in there);
- streams and events (everything is in order here), CUDA graphs, autocast (computed and counted in float32);
- the copy back of a gradient that flows through `.to(...)`: it arrives with the device's label;
- memory of the allocator beyond what tensors hold: fragmentation, caches, workspaces, the CUDA context.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tests.support.shadow_book import DEVICE, Book, Copy, Counts, Kernel, Mixed, where
from tests.support.shadow_devices import Devices
from tests.support.shadow_operations import Calls, Operations

__all__ = ["DEVICE", "Copy", "Counts", "Kernel", "Mixed", "ShadowDevice"]


class ShadowDevice:
    """A context manager; one at a time. `memory` is its size: beyond it, `torch.OutOfMemoryError`, as on a GPU.

    `trace=True` keeps every operation with the bytes and floating-point operations it needs (`kernels`).
    `dry=True` spares the arithmetic: results of floating-point numbers are zeros that take no memory, so that
    networks and batches of any size can be counted. Whatever depends on such a value is then counted for zeros, and
    where the CPU's kernels choose other strides than said, a copy more or less is counted (up to a tenth of ResNet-18).
    """

    def __init__(self, memory: int = 80 * 2**30, *, trace: bool = False, dry: bool = False) -> None:
        self.book, self.dry = Book(memory, trace), dry
        self._stack = ExitStack()

    def __enter__(self) -> ShadowDevice:
        with ExitStack() as stack:
            calls = Calls()
            for target, name, value in _answers(self.book):
                stack.enter_context(mock.patch.object(target, name, value))
            devices = Devices(self.book, calls)
            run_backward = torch.autograd._engine_run_backward

            def watched(*args: Any, **kwargs: Any) -> Any:
                """Hooks and backward functions written in Python ask for devices, too."""
                with devices:
                    return run_backward(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", watched))
            stack.enter_context(Operations(self.book, calls, dry=self.dry))
            stack.enter_context(devices)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def counts(self) -> Counts:
        """Everything so far."""
        return self.book.total()

    @property
    def stages(self) -> dict[str, Counts]:
        """The same by stage; what belongs to none is under ''."""
        names = dict.fromkeys(stage for (stage, _, _), _ in self.book.rows())
        return {name: self.book.total(name) for name in names}

    @property
    def mixed(self) -> list[Mixed]:
        """Operations whose tensors were on different devices."""
        return self.book.mixed

    @property
    def copies(self) -> list[Copy]:
        """Every transfer with its shape, bytes and line (`.item()` aside)."""
        return self.book.copies

    @property
    def kernels(self) -> list[Kernel]:
        """Every operation, with `trace=True`."""
        return self.book.kernels or []

    @property
    def peak(self) -> int:
        """The most bytes that tensors on the device have had."""
        return self.book.storages.peak

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside under this name."""
        before, self.book.stage = self.book.stage, name
        try:
            yield
        finally:
            self.book.stage = before

    def by_line(self, stage: str | None = None) -> dict[str, Counts]:
        """Counts by `file:line` of the project, most operations first."""
        found: dict[str, Counts] = {}
        for (own, line, _), counts in self.book.rows():
            if stage in (None, own):
                found[line] = found.get(line, Counts()) + counts
        return dict(sorted(found.items(), key=lambda item: (-item[1].operations, item[0])))

    def by_operation(self, stage: str | None = None) -> dict[str, Counts]:
        """Counts by ATen operation, most operations first."""
        found: dict[str, Counts] = {}
        for (own, _, operation), counts in self.book.rows():
            if stage in (None, own):
                found[operation] = found.get(operation, Counts()) + counts
        return dict(sorted(found.items(), key=lambda item: (-item[1].operations, item[0])))

    def table(self, stage: str | None = None, lines: int = 40) -> str:
        """The lines that cost most, for a terminal."""
        rows = [f"{'operations':>10} {'h2d':>7} {'MB':>8} {'d2h':>7} {'MB':>8} {'syncs':>7}  line"]
        for line, each in list(self.by_line(stage).items())[:lines]:
            rows.append(
                f"{each.operations:>10,} {each.h2d_copies:>7,} {each.h2d_bytes / 1e6:>8.2f} {each.d2h_copies:>7,} "
                f"{each.d2h_bytes / 1e6:>8.2f} {each.synchronisations:>7,}  {line}"
            )
        return "\n".join(rows)


class _Stream:
    """Everything is in order: a stream has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device(DEVICE)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return torch.cuda.Event() if event is None else event

    def query(self) -> bool:
        """Everything is done."""
        return True


class _Generator(torch.Generator):
    """The CPU's generator, whatever device it is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device="cpu")

    def __init__(self, device: Any = "cpu") -> None:
        pass


def _answers(book: Book) -> Iterator[tuple[Any, str, Any]]:
    """What torch.cuda says on a machine with one GPU."""
    storages = book.storages

    def synchronise(*args: Any, **kwargs: Any) -> None:
        book.add("synchronize", where(), synchronisations=1)

    class Stream(_Stream):
        synchronize = synchronise

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, stream: Any = None) -> None: ...

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 0.0

        synchronize = synchronise

    properties = types.SimpleNamespace(
        name="shadow", total_memory=storages.memory, major=8, minor=0, multi_processor_count=108
    )
    constants = {
        "is_available": True, "device_count": 1, "current_device": 0, "_lazy_init": None, "set_device": None,
        "empty_cache": None, "set_per_process_memory_fraction": None, "reset_peak_memory_stats": None,
        "get_device_properties": properties, "get_device_name": "shadow", "get_device_capability": (8, 0),
        "is_bf16_supported": True, "manual_seed": None, "manual_seed_all": None,
    }  # fmt: skip
    for name, value in constants.items():
        yield torch.cuda, name, lambda *_, value=value, **__: value
    yield torch.cuda, "synchronize", synchronise
    yield torch.cuda, "mem_get_info", lambda *_: (storages.memory - storages.live(), storages.memory)
    yield torch.cuda, "memory_allocated", lambda *_: storages.live()
    yield torch.cuda, "memory_reserved", lambda *_: storages.live()
    yield torch.cuda, "get_per_process_memory_fraction", lambda *_: 1.0
    yield torch.cuda, "max_memory_allocated", lambda *_: storages.peak
    yield torch.cuda, "Stream", Stream
    yield torch.cuda, "Event", Event
    yield torch.cuda, "current_stream", lambda *_: Stream()
    yield torch.cuda, "default_stream", lambda *_: Stream()
    yield torch.cuda, "stream", lambda stream: stream if stream is not None else Stream()
    yield torch, "Generator", _Generator
    yield torch.Tensor, "record_stream", lambda self, stream: None
