"""One client of a federation as a LightningDataModule, for use outside the platform.

The platform itself hands indices to its executors and never builds data loaders. This file is not
imported by the package's `__init__`: importing lightning takes seconds.
"""

from __future__ import annotations

from typing import Any

import archipelago.core.torchvision_operators  # noqa: F401  (before lightning, which imports torchvision)

# isort: split
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from archipelago.core.errors import UserError
from archipelago.core.randomness import torch_seed
from archipelago.data.apportion import Integers
from archipelago.data.datasets import normalised
from archipelago.data.federation import Federation


class FederationDataModule(lightning.LightningDataModule):
    """Normalised batches (x, y) of the chosen client; training batches are shuffled by the seed."""

    def __init__(self, federation: Federation, *, client: int, batch_size: int, seed: int) -> None:
        super().__init__()
        if not 0 <= client < len(federation.clients):
            raise UserError(
                f"There is no client {client}: this federation has clients 0..{len(federation.clients) - 1}.",
                code="unknown-client", client=client,
            )  # fmt: skip
        self.federation = federation
        self.client = client
        self.batch_size = batch_size
        self.seed = seed

    def train_dataloader(self) -> DataLoader[Any]:
        """Training samples, in another order every epoch."""
        shuffle = torch.Generator().manual_seed(torch_seed(self.seed, "data module", client=self.client))
        return self._loader(self.federation.clients[self.client].train, shuffle)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Validation samples; an empty list, which Lightning reads as none, where none were kept aside."""
        kept = self.federation.clients[self.client].validation
        return self._loader(kept) if len(kept) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """Test samples."""
        return self._loader(self.federation.clients[self.client].test)

    def _loader(self, indices: Integers, shuffle: torch.Generator | None = None) -> DataLoader[Any]:
        x = normalised(self.federation.x[indices], self.federation.mean, self.federation.std)
        samples = TensorDataset(torch.from_numpy(x), torch.from_numpy(self.federation.y[indices]))
        return DataLoader(samples, batch_size=self.batch_size, shuffle=shuffle is not None, generator=shuffle)
