"""A LightningDataModule that you have already, as a federation.

python examples/own_data/my_datamodule.py

On the command line, in this folder:  archipelago data=datamodule data.target=my_datamodule.Digits partition=n_class
"""

from __future__ import annotations

import archipelago.core.torchvision_operators  # isort: skip
import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import archipelago as ar


class Digits(lightning.LightningDataModule):
    """Nothing in it knows of federated learning."""

    def setup(self, stage: str) -> None:
        x, y = load_digits(return_X_y=True)
        every = TensorDataset(torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(y))
        self.training, self.testing = random_split(every, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=32, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.testing, batch_size=32)


def main() -> ar.Run:
    """Ten clients with samples of two classes each."""
    return ar.run(
        data={"name": "datamodule", "target": "my_datamodule.Digits"}, partition={"name": "n_class", "classes": 2},
        clients=10, method="ditto", model="mlp", rounds=5, local={"lr": 0.05}, fleet={"backend": "in_process"},
        name="my-datamodule",
    )  # fmt: skip


if __name__ == "__main__":
    print(main())
