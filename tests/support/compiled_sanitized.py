"""Run by a test in a process with AddressSanitizer preloaded: trains, then proves that a stray access is caught."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.lightning_modules import test_compiled as numerical
from tests.support.compiled import Bench, digest, network

# Of these, and in the full suite of all, the same bits are trained as everywhere, in a sanitized build.
NETWORKS = ("mlp", "cnn_digits", "cnn_celeba", "resnet_slim", "cnn_cifar", "linear_regression")
DIGESTS = ("mlp", "cnn_fashion", "cnn_celeba", "nesterov", "squared_error", "clipped_by_norm")


def main(everything: bool) -> None:
    """The numerical tests, fuzzed shapes among them, and digests."""
    torch.set_num_threads(1)
    numerical.test_random_shapes_agree_with_float64()
    numerical.test_pools_with_padding_and_overlap_agree_with_float64()
    numerical.test_branches_add_their_gradients()
    numerical.test_a_job_gives_the_same_bits_alone_and_after_others()
    for raw in ("bytes", "floats"):
        numerical.test_samples_are_normalised_to_the_bits_of_samples(raw)
    numerical.test_a_regression_agrees_with_float64()  # with weights, which `linear_regression` has not
    for name in numerical.NETWORKS if everything else NETWORKS:
        numerical.test_networks_of_the_papers_agree_with_float64(name)
    for option in numerical.OPTIONS:
        numerical.test_options_agree_with_float64("cnn_digits", option)
    stored = json.loads((Path(__file__).parent / "compiled_digests.json").read_text())
    for name in stored if everything else DIGESTS:
        assert digest(name) == stored[name], name


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
    main("everything" in sys.argv[1:])
    print("caught" if caught() else "missed")
    print("fine")
