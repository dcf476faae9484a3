"""How the kernels are compiled, wherever that is done: here at first use, or into a wheel (`recipes/kernels/`).

Only the standard library is imported: a wheel is built where nothing else is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = ("kernels.c", "lanes.h", "plan.h", "tiles.h", "contract.h", "layers.h")
# No contraction and no fast-math: lanes.h says why. The headers cast between float and integer memory.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
INSTRUCTIONS = {"avx512": ("-mavx512f",), "avx2": ("-mavx2", "-mfma")}
PREBUILT = "archipelago_kernels"  # the package that such a wheel installs
DIGEST = "sources.sha256"  # its file that says which sources it was built from


def digest(folder: Path, *words: str) -> str:
    """What tells kernels of other sources, flags or (`words`) compilers apart."""
    content = hashlib.sha256("\0".join(words).encode())
    for name in SOURCES:
        content.update((folder / name).read_bytes())
    return content.hexdigest()


def sources_digest(folder: Path) -> str:
    """The sources and flags of all instruction sets."""
    return digest(folder, *FLAGS, *(flag for flags in INSTRUCTIONS.values() for flag in flags))
