"""Run by a test in a process with AddressSanitizer preloaded: trains, then proves that a stray access is caught."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import torch
from torch import nn

from tests.support.compiled import Bench, network

SHAPES = {
    "mlp": ((1, 5, 5), {"hidden": [7, 33]}),
    "cnn_cifar": ((3, 17, 19), {}),
    "cnn_fashion": ((1, 9, 30), {}),
    "resnet_slim": ((3, 25, 27), {}),
    "cnn_celeba": ((3, 17, 18), {}),
}


def odd() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 9, (4, 3), stride=(3, 2), padding=(2, 5)), nn.GroupNorm(3, 9), nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), nn.Conv2d(9, 5, (1, 2)), nn.AvgPool2d(2, 1, padding=1),
        nn.Flatten(), nn.LazyLinear(5),
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        wide = odd()(torch.zeros(1, 3, 14, 11)) is not None and odd()
        size = wide[:-1](torch.zeros(1, 3, 14, 11)).shape[1]
    makers = {name: (network(name, shape, 5, **options), shape) for name, (shape, options) in SHAPES.items()}
    makers["odd"] = (lambda: nn.Sequential(*list(odd())[:-1], nn.Linear(size, 5)), (3, 14, 11))
    for name, (make, shape) in makers.items():
        optimizer = None if name == "odd" else lambda p: torch.optim.Adam(p, lr=0.01)
        bench = Bench(make, shape, optimizer=optimizer)
        assert not bench.engine.notes, bench.engine.notes
        weights = (np.arange(60), np.linspace(0.5, 2, 60, dtype=np.float32))
        job = bench.job([16, 33, 5], sample_weights=weights, on_top_of=[bench.model.vector()])
        result = bench.engine.train_one(job)
        outputs = bench.engine.outputs(result.model, np.arange(59))
        assert np.isfinite(result.model).all() and outputs.isfinite().all()


def stray() -> None:
    """A kernel is handed a tensor that is one pixel too wide: what the check would refuse."""
    bench = Bench(network("cnn_digits", (1, 8, 8), 5), (1, 8, 8))
    arena = bench.engine.passes().arena(16)
    arena.tensors[0].channels = 2
    arena.library.forward(arena.pointer, bench.model.vector().ctypes.data, 16, True)


if __name__ == "__main__":
    if sys.argv[1:] == ["stray"]:
        stray()
        sys.exit(0)
    main()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_sanitized", "stray"],
        env=os.environ, capture_output=True, text=True,
    )  # fmt: skip
    print(
        "caught"
        if done.returncode and "AddressSanitizer: use-after-poison" in done.stderr
        else done.stderr[-2000:]
    )
    print("fine")
