"""Run by a test in a process with AddressSanitizer preloaded: trains, then proves that a stray access is caught."""

from __future__ import annotations

import os
import tempfile

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
        nn.Flatten(), nn.Linear(120, 5),
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    makers = {name: (network(name, shape, 5, **options), shape) for name, (shape, options) in SHAPES.items()}
    makers["odd"] = (odd, (3, 14, 11))
    for name, (make, shape) in makers.items():
        optimizer = None if name == "odd" else lambda p: torch.optim.Adam(p, lr=0.01)
        bench = Bench(make, shape, optimizer=optimizer)
        assert not bench.engine.notes, bench.engine.notes
        weights = (np.arange(60), np.linspace(0.5, 2, 60, dtype=np.float32))
        job = bench.job([16, 33, 5], sample_weights=weights, on_top_of=[bench.model.vector()])
        result = bench.engine.train_one(job)
        outputs = bench.engine.outputs(result.model, np.arange(59))
        assert np.isfinite(result.model).all() and outputs.isfinite().all()


def caught() -> bool:
    """Whether a stray access is: a kernel is handed a tensor with a row too many, which the check would refuse."""
    bench = Bench(network("cnn_digits", (1, 8, 8), 5), (1, 8, 8))
    arena, vector = bench.engine.passes().arena(16), bench.model.vector()
    arena.tensors[1].height = 9
    assert arena.library.check(arena.pointer)
    with tempfile.TemporaryFile() as said:
        child = os.fork()  # importing torch again takes longer than everything else
        if child == 0:
            os.dup2(said.fileno(), 2)
            arena.library.forward(arena.pointer, vector.ctypes.data, 16, True)
            os._exit(0)
        code = os.waitpid(child, 0)[1]
        said.seek(0)
        return code != 0 and b"AddressSanitizer: use-after-poison" in said.read()


if __name__ == "__main__":
    main()
    print("caught" if caught() else "missed")
    print("fine")
