"""Which block hosts clients: one that goes client by client, or one that computes them together."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from actors.block import ClientBlock
from actors.requests import BlockSetup, ClientSamples
from archipelago.core.plugins import load_plugins
from lightning_modules.engines import engine_entry


def make_block(
    setup: BlockSetup,
    clients: dict[int, ClientSamples],
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    device: str = "cpu",
) -> ClientBlock:
    """A block for these clients on a device, as the engine of its local training asks for (`batched=True`)."""
    load_plugins(setup.plugins)  # the engine may be one of theirs
    entry = engine_entry(setup.local.engine, torch.device(device).type)
    if entry.capabilities.get("batched"):
        from actors.stacked_block import StackedBlock

        return StackedBlock(setup, clients, x, y, device)
    return ClientBlock(setup, clients, x, y, device)
