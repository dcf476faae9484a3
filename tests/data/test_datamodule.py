from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from archipelago.data import Federation, build_federation, normalised
from archipelago.data.datamodule import FederationDataModule
from tests.support.settings import data_settings, partition_settings

import lightning  # isort: skip  (after the data module, which makes it importable)
from tests.support.errors import refused


def build(data: str = "digits", validation: float = 0.2) -> Federation:
    settings = data_settings(name=data, samples=200)
    return build_federation(settings, partition_settings(validation=validation), clients=4, seed=0)


def test_loaders_give_the_clients_own_normalised_samples() -> None:
    made = build()
    module = FederationDataModule(made, client=2, batch_size=16, seed=0)
    for loader, indices in (
        (module.val_dataloader(), made.clients[2].validation),
        (module.test_dataloader(), made.clients[2].test),
    ):
        x, y = (torch.cat(column).numpy() for column in zip(*loader, strict=True))
        assert (x == normalised(made.x[indices], made.mean, made.std)).all()
        assert (y == made.y[indices]).all()


def test_training_batches_are_shuffled_by_the_seed() -> None:
    made = build()

    def labels(seed: int) -> Any:
        loader = FederationDataModule(made, client=1, batch_size=8, seed=seed).train_dataloader()
        return torch.cat([y for _, y in loader]).numpy()

    assert (labels(0) == labels(0)).all()
    assert (labels(0) != labels(1)).any()
    assert (np.sort(labels(0)) == np.sort(made.y[made.clients[1].train])).all()


def test_client_that_does_not_exist() -> None:
    with refused("unknown-client", client=4, says="0..3"):
        FederationDataModule(build(), client=4, batch_size=8, seed=0)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 1, bias=False)

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x)[:, 0], y)

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("validation", self.training_step(batch, batch_index))

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.log("test", self.training_step(batch, batch_index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on worker processes, for a run of a second
@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_trainer_learns_a_ground_truth_model(tmp_path: Any, validation: float) -> None:
    module = FederationDataModule(build("synthetic", validation), client=0, batch_size=8, seed=0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=20, accelerator="cpu", enable_model_summary=False, default_root_dir=tmp_path, **quiet
    )
    model = Regression()
    trainer.fit(model, datamodule=module)
    (result,) = trainer.test(model, datamodule=module, verbose=False)
    assert result["test"] < 10  # targets have a variance of a thousand, the noise of one
