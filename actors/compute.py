"""What a session computes on: devices, engine, precision and determinism, in one line and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BlockDevice:
    """What one block of clients computes on."""

    device: str = "cpu"
    name: str = "CPU"
    identity: str = ""  # of the GPU in the cluster: two blocks may share one
    engine: str = "loop"
    tier: str = "exact"
    mps: bool = False  # whether NVIDIA's Multi-Process Service runs there
    cuda: bool = True  # whether torch is built for GPUs there


@dataclass(frozen=True)
class Committed:
    """What one block of clients says when a round commits."""

    notes: Sequence[str] = ()  # for the user
    engines: Collection[str] = ()  # that trained there so far, as `Engine.ran` says
    host: str = ""  # where it is; empty in this process


@dataclass(frozen=True)
class Compute:
    """What a session computes on."""

    devices: dict[str, int]  # how many different ones, by name; of the CPU, how many blocks compute on it
    blocks: int
    gpus_per_actor: float
    engine: str
    precision: str
    determinism: str  # the tier that holds, not what was asked for
    notes: tuple[str, ...] = ()  # GPUs that stay idle and why, shares that take turns

    @property
    def sentence(self) -> str:
        """One line.

        >>> Compute({"NVIDIA T4": 2}, 8, 0.25, "stacked", "32", "seeded").sentence
        '2 x NVIDIA T4, 0.25 per actor; engine stacked, precision 32, determinism seeded'
        >>> idle = "1 of 1 GPU stays idle: fleet.gpus=0 was set."
        >>> Compute({"CPU": 8}, 8, 0.0, "loop", "32", "exact", (idle,)).sentence
        'CPU; engine loop, precision 32, determinism exact. 1 of 1 GPU stays idle: fleet.gpus=0 was set'
        """
        names = [name if name == "CPU" else f"{count} x {name}" for name, count in self.devices.items()]
        each = ""
        if set(self.devices) != {"CPU"}:
            each = ", one per actor" if self.gpus_per_actor == 1 else f", {self.gpus_per_actor:g} per actor"
        how = f"engine {self.engine}, precision {self.precision}, determinism {self.determinism}"
        return " ".join([f"{' and '.join(names)}{each}; {how}.", *self.notes]).rstrip(".")

    def to_json(self) -> dict[str, Any]:
        """As `environment.json` holds it."""
        return {**asdict(self), "notes": list(self.notes), "sentence": self.sentence}


def compute_of(
    blocks: Sequence[BlockDevice], gpus: float, precision: str, idle: str = "", ran: Collection[str] = ()
) -> Compute:
    """What these blocks compute on; `idle` says which GPUs of the cluster they leave alone.

    `ran`: the engines that trained, once they have; an engine may leave clients to another one.
    """
    found: dict[str, set[str]] = {}
    for number, block in enumerate(blocks):
        found.setdefault(block.name, set()).add(block.identity or str(number))
    notes = [idle] if idle else []
    if 0 < gpus < 1 and any(block.device != "cpu" and not block.mps for block in blocks):
        notes.append(
            "Actors that share a GPU take turns on it: NVIDIA's MPS (`nvidia-cuda-mps-control -d`) lets them "
            "run together."
        )
    weakest = max((block.tier for block in blocks), key=("exact", "seeded", "fast").index, default="exact")
    return Compute(
        devices={name: len(which) for name, which in sorted(found.items())},
        blocks=len(blocks),
        gpus_per_actor=gpus,
        engine=" and ".join(sorted(ran or {block.engine for block in blocks})),
        precision=precision,
        determinism=weakest,
        notes=tuple(notes),
    )


def without_gpu(blocks: Sequence[BlockDevice], gpus: float) -> str:
    """Said, never passed over: a GPU was reserved, and torch cannot use it. Empty if all is well."""
    missed = [block for block in blocks if block.device == "cpu"] if gpus else []
    if not missed:
        return ""
    whose = f"{len(missed)} of {len(blocks)} blocks of clients" if len(blocks) > 1 else "The block of clients"
    verb = "compute" if len(blocks) > 1 else "computes"
    why = "torch sees no GPU there" if missed[0].cuda else "torch is a CPU build there"
    return f"{whose} {verb} on the CPU although fleet.gpus={gpus:g}: {why}."
