"""Which device a client actor computes on, and how much of it."""

from __future__ import annotations

import torch


def claim_device(gpus: float) -> str:
    """The device of a process that was given `gpus` GPUs, its memory capped to that share.

    Ray shows the process only the devices it may use, so the first visible one is the right one.
    """
    if gpus <= 0 or not torch.cuda.is_available():
        return "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(0)
    if gpus < 1:
        # A share that is only declared would let one greedy client crash its neighbours.
        torch.cuda.set_per_process_memory_fraction(gpus, 0)
    return "cuda:0"
