"""One client after the other, each through a `lightning.Trainer`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from archipelago.core.causes import cause_of
from archipelago.core.errors import UserError
from archipelago.core.targets import load_class
from lightning_modules.engines.base import ENGINES, Engine, loss_of
from lightning_modules.engines.objective import TrainJob, TrainResult


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
    recipe = ("augment", "clip")

    @classmethod
    def check(cls, options: TrainerOptions) -> None:
        """Whether a Trainer can be made with these arguments."""
        if not options.trainer:
            return
        try:
            with _quiet():
                _made(dict(options.trainer), "cpu", 1, [])
        except UserError:
            raise
        except Exception as error:  # whatever Lightning raises about its arguments
            given = ", ".join(f"local.trainer.{name}={value}" for name, value in options.trainer.items())
            raise UserError(
                f"lightning.Trainer cannot be made with {given}: {cause_of(error)}.",
                code="cannot-be-made", name="lightning.Trainer",
            ) from error  # fmt: skip

    def train_one(self, job: TrainJob) -> TrainResult:
        """One client's `Trainer.fit`."""
        with self.ready(job):
            return self.result(job, self._fit(job))

    def _fit(self, job: TrainJob) -> float:
        module: Any = self.model.module
        optimizer, losses = self.model.optimizer, _collected_losses()
        options = dict(self.options.trainer)
        if self.model.precision == "bf16":
            options.setdefault("precision", "bf16-mixed")
        if self.model.recipe.clip is not None:
            options |= {
                "gradient_clip_val": self.model.recipe.clip,
                "gradient_clip_algorithm": self.model.recipe.clip_by,
            }
        own = module.configure_optimizers
        module.configure_optimizers = lambda: optimizer
        try:
            with _quiet():
                trainer = _made(options, self.model.device.type, len(job.batches), [losses])
                trainer.fit(module, _batches(self, job))
        finally:
            module.configure_optimizers = own
            module.trainer = None
        return float(losses.total)


def _made(options: dict[str, Any], device: str, steps: int, listening: list[Any]) -> Any:
    """A Trainer with a user's own arguments."""
    import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)

    # isort: split
    import lightning

    paths = options.pop("callbacks", [])
    callbacks = [load_class("local.trainer.callbacks", path, lightning.Callback)() for path in paths]
    return lightning.Trainer(
        max_steps=steps,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*listening, *callbacks],
        **options,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's advice on workers, devices and loggers does not apply to ten steps in memory."""
    with warnings.catch_warnings(), _hushed("lightning.pytorch"):
        warnings.simplefilter("ignore")
        yield


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


def _batches(engine: Engine, job: TrainJob) -> Any:
    # A generator of its own: a loader draws a seed, which must not come from the client's (Dropout's) draws.
    own = torch.Generator()
    return torch.utils.data.DataLoader(_BatchList(engine, job), batch_size=None, shuffle=False, generator=own)


class _BatchList(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, engine: Engine, job: TrainJob) -> None:
        self.engine, self.job = engine, job

    def __len__(self) -> int:
        return len(self.job.batches)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.engine.batch(self.job, step)
