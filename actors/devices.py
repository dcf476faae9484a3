"""Which device a block of clients computes on, how much of it, and the one place that sets torch's flags for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from archipelago.core.errors import UserError

# What a process takes of a GPU beside PyTorch's allocator: CUDA's context, the libraries' handles and kernels. Not
# measured: asking CUDA makes the context first, and neighbours on the same device start at the same moment.
CONTEXT = 512 * 2**20
LEAST = 128 * 2**20  # bytes of a share below which nothing can be trained
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NOT_DETERMINISTIC = "does not have a deterministic implementation"


def effective_tier(determinism: str, device: str, exact_engine: bool = True) -> str:
    """The promise that holds: `auto` is exact on a CPU and seeded on a GPU; a CPU keeps the strongest anyway.

    >>> [effective_tier(asked, "cpu") for asked in ("auto", "exact", "seeded", "fast")]
    ['exact', 'exact', 'exact', 'exact']
    >>> [effective_tier(asked, "cuda:0") for asked in ("auto", "exact", "seeded", "fast")]
    ['seeded', 'exact', 'seeded', 'fast']
    """
    on_cpu = device == "cpu"
    if determinism == "auto" or (on_cpu and exact_engine):
        return "exact" if on_cpu else "seeded"
    return determinism


@dataclass
class Claim:
    """A device that this process may use; `release` gives back what was changed in the process for it."""

    device: str = "cpu"
    name: str = "CPU"
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def release(self) -> None:
        """Put the flags back that were set for a GPU."""
        while self._undo:
            self._undo.pop()()


def claim_device(gpus: float, precision: str = "32", determinism: str = "auto") -> Claim:
    """The device of a process that was given `gpus` GPUs, its memory capped to that share, torch's flags set for it.

    Ray shows the process only the devices it may use, so the first visible one is the right one. On a CPU nothing is
    touched.
    """
    if gpus <= 0 or not torch.cuda.is_available():
        return Claim()
    claim = Claim("cuda:0")
    try:
        # Before the first call of CUDA: cuBLAS reads its variable once.
        _set_flags(claim._undo, precision, effective_tier(determinism, "cuda:0"))
        torch.cuda.set_device(0)
        properties = torch.cuda.get_device_properties(0)
        claim.name = str(properties.name)
        if gpus < 1:
            # A share that is only declared would let one greedy client crash its neighbours.
            fraction = allocator_fraction(gpus, int(properties.total_memory), claim.name)
            torch.cuda.set_per_process_memory_fraction(fraction, 0)
            claim._undo.append(lambda: torch.cuda.set_per_process_memory_fraction(1.0, 0))
    except BaseException:
        claim.release()
        raise
    return claim


def allocator_fraction(share: float, total: int, name: str = "GPU") -> float:
    """The part of a device's memory that PyTorch may allocate in a process with this share of the device.

    >>> round(allocator_fraction(0.25, 80 * 2**30), 4)
    0.2437
    """
    left = share * total - CONTEXT
    if left < LEAST:
        least = (CONTEXT + LEAST) / total
        raise UserError(
            f"Expected fleet.gpus >= {least:.2g} on {name} with {total / 2**30:.1f} GB, got {share:g}: of its "
            f"{share * total / 2**30:.2f} GB a process needs {CONTEXT / 2**30:.1f} GB for CUDA itself; give each actor "
            "a larger share, and fewer actors to a device (fleet.actors, fleet.clients_per_actor).",
            code="too-little-memory", setting="fleet.gpus", given=share,
        )  # fmt: skip
    return left / total


def _set_flags(undo: list[Callable[[], None]], precision: str, tier: str) -> None:
    deterministic = tier != "fast"
    wanted: list[tuple[Any, str, bool]] = [
        (torch.backends.cuda.matmul, "allow_tf32", precision == "tf32"),
        (torch.backends.cudnn, "allow_tf32", precision == "tf32"),
        (torch.backends.cudnn, "benchmark", not deterministic),
        (torch.backends.cudnn, "deterministic", deterministic),
        # Filling memory that is overwritten anyway costs a kernel for each new tensor.
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
    ]
    for owner, name, value in wanted:
        undo.append(_setter(owner, name, getattr(owner, name)))
        setattr(owner, name, value)
    mode, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    undo.append(lambda: torch.use_deterministic_algorithms(mode, warn_only=warn))
    torch.use_deterministic_algorithms(deterministic)
    if deterministic and _WORKSPACE not in os.environ:
        os.environ[_WORKSPACE] = ":4096:8"
        undo.append(_forget_workspace)


def _forget_workspace() -> None:
    os.environ.pop(_WORKSPACE, None)


def _setter(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def refused_by_tier(error: BaseException, determinism: str) -> UserError | None:
    """The sentence for an operation that torch has no deterministic kernel for; None for every other error."""
    if not isinstance(error, RuntimeError) or _NOT_DETERMINISTIC not in str(error):
        return None
    operation = str(error).split()[0]
    return UserError(
        f"Expected only deterministic operations with determinism={effective_tier(determinism, 'cuda:0')}, got "
        f"{operation}, which torch has no deterministic kernel for: set determinism=fast, or use another layer.",
        code="not-deterministic", operation=operation,
    )  # fmt: skip


def torch_has_cuda() -> bool:
    """Whether this process's torch was built for GPUs at all."""
    return torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None


def machine_gpus() -> int:
    """How many GPUs this machine has, whether or not torch can use them."""
    if torch_has_cuda():
        return torch.cuda.device_count()
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    return 0


def device_names(nodes: Sequence[Mapping[str, float]]) -> str:
    """Which GPUs there are: as Ray calls them, or as torch does on this machine; empty where nobody knows.

    >>> device_names([{"GPU": 4, "accelerator_type:A100": 1}, {"GPU": 1, "accelerator_type:T4": 1}, {"CPU": 2}])
    'A100, T4'
    """
    found = {
        name.partition(":")[2]
        for node in nodes
        for name in node
        if node.get("GPU") and name.startswith("accelerator_type:")
    }
    if not found and torch.cuda.is_available():
        found = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return ", ".join(sorted(found))


def mps_directory() -> Path | None:
    """Where NVIDIA's Multi-Process Service listens on this machine; None if it does not run."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    return folder if (folder / "control").exists() else None
