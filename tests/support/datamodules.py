"""LightningDataModules of users, for tests: good ones, and ones that cannot be used."""

from __future__ import annotations

from pathlib import Path

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def numbered(count: int) -> TensorDataset:
    x = torch.arange(count, dtype=torch.float32)[:, None, None, None].expand(count, 1, 4, 4)
    return TensorDataset(x, torch.arange(count) % 2)


class Pixels(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.parts = numbered(12), numbered(4)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=5, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.parts[1], batch_size=3)


class Owned(lightning.LightningDataModule):
    """Samples with owners, and a validation part only."""

    def __init__(self, root: str) -> None:
        super().__init__()
        assert root in ("somewhere", str(Path.home() / "data"))

    def train_dataloader(self):
        return DataLoader([(torch.zeros(1, 4, 4, dtype=torch.uint8), 1, owner) for owner in "aabb"])

    def val_dataloader(self):
        return DataLoader([(torch.zeros(1, 4, 4, dtype=torch.uint8), 0, owner) for owner in "bc"])


class Drawn(Pixels):
    def setup(self, stage: str) -> None:
        made = TensorDataset(torch.randn(6, 3), torch.arange(6) % 2)
        self.parts = made, made


class Nothing(lightning.LightningDataModule):
    pass


class _Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3), 0


class Streamed(Pixels):
    def train_dataloader(self):
        return DataLoader(_Stream())


class Ragged(Pixels):
    def train_dataloader(self):
        return DataLoader([(torch.zeros(3), 0), (torch.zeros(4), 1)])


class Single(Pixels):
    def train_dataloader(self):
        return DataLoader(torch.zeros(3, 4))


class NoModule:
    pass


class Needy(Pixels):
    def __init__(self, root: str, side: int) -> None:
        super().__init__()
