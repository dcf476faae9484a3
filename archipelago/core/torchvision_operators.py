"""Make `import torchvision` (hence lightning, torchmetrics, medmnist) work beside a CPU-only torch.

PyPI's torchvision wheel is compiled for CUDA torch. Beside a CPU-only build its compiled library does not
load, and its Python code then fails on two operators that nobody declared (`nms`, `qnms`). Declaring
their schemas is enough: nothing here calls them. Where the compiled library does load, nothing is touched.

Import this module before the first import of lightning, torchmetrics, torchvision or medmnist.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> bool:
    """Declare torchvision's operators if its compiled library cannot; returns whether that was needed."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return False
    for library in Path(package.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        if hasattr(torch.ops.torchvision, "nms"):
            return False
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", _SCHEMA)
    return True


declared = declare_missing_operators()
