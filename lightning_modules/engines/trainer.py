"""One client after the other, each through a `lightning.Trainer`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.targets import load_class
from lightning_modules.engines.base import ENGINES, Engine, loss_of
from lightning_modules.engines.objective import TrainJob, TrainResult
from lightning_modules.samples import Samples


@dataclass
class TrainerOptions:
    """`local.trainer.precision=...`: the Trainer's own arguments."""

    trainer: dict[str, Any] = field(
        default_factory=dict,
        metadata={"about": "engine=trainer: arguments of lightning.Trainer; callbacks as import paths"},
    )


@ENGINES.register(
    "trainer", "a lightning.Trainer for each client: its callbacks, precision, strategies", exact=True
)
class TrainerEngine(Engine):
    """The options go to the Trainer (`precision`, `gradient_clip_val`, ...); `callbacks` is a list of import paths.

    The optimizer's state enters and leaves through the module.
    """

    Options = TrainerOptions

    def train_one(self, job: TrainJob) -> TrainResult:
        """One client's `Trainer.fit`."""
        with self.ready(job):
            return self.result(job, self._fit(job))

    def _fit(self, job: TrainJob) -> float:
        import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)

        # isort: split
        import lightning

        module: Any = self.model.module
        optimizer, losses = self.model.optimizer, _collected_losses()
        options = dict(self.options.trainer)
        if self.model.precision == "bf16":
            options.setdefault("precision", "bf16-mixed")
        paths = options.pop("callbacks", [])
        callbacks = [load_class("local.trainer.callbacks", path, lightning.Callback)() for path in paths]
        own = module.configure_optimizers
        module.configure_optimizers = lambda: optimizer
        try:
            with warnings.catch_warnings(), _hushed("lightning.pytorch"):
                # Lightning's advice on workers, devices and loggers does not apply to ten steps in memory.
                warnings.simplefilter("ignore")
                trainer = lightning.Trainer(
                    max_steps=len(job.batches),
                    accelerator="gpu" if self.model.device.type == "cuda" else "cpu",
                    devices=1,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    callbacks=[losses, *callbacks],
                    **options,
                )
                trainer.fit(module, _batches(self.samples, job.batches))
        finally:
            module.configure_optimizers = own
            module.trainer = None
        return float(losses.total)


@contextmanager
def _hushed(logger: str) -> Iterator[None]:
    chosen = logging.getLogger(logger)
    level = chosen.level
    chosen.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chosen.setLevel(level)


def _collected_losses() -> Any:
    """A callback whose `total` is the sum of the steps' losses; Lightning is imported by then."""
    import lightning

    class CollectedLosses(lightning.Callback):
        total = 0.0

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.total += float(loss_of(outputs).detach())

    return CollectedLosses()


def _batches(samples: Samples, batches: Sequence[npt.NDArray[np.int64]]) -> Any:
    # A generator of its own: a loader draws a seed, which must not come from the client's (Dropout's) draws.
    own = torch.Generator()
    return torch.utils.data.DataLoader(
        _BatchList(samples, batches), batch_size=None, shuffle=False, generator=own
    )


class _BatchList(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: Samples, batches: Sequence[npt.NDArray[np.int64]]) -> None:
        self.samples, self.batches = samples, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.samples.batch(self.batches[step])
