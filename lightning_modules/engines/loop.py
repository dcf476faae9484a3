"""One client after the other, by the module's own step and optimizer: the reference of all engines."""

from __future__ import annotations

import torch

from lightning_modules.engines.base import ENGINES, Engine, loss_of
from lightning_modules.engines.objective import TrainJob, TrainResult


@ENGINES.register("loop", "one client after the other, plain steps", exact=True, default_on="cpu")
class LoopEngine(Engine):
    """0.99 to 1.04 times the time of a bare PyTorch loop."""

    recipe = ("augment", "clip")

    def train_one(self, job: TrainJob) -> TrainResult:
        """One client's steps."""
        with self.ready(job):
            total = torch.zeros((), dtype=torch.float64, device=self.model.device)
            for step in range(len(job.batches)):
                self.model.zero_grad()
                batch = self.batch(job, step)
                with self.model.autocast():
                    loss = loss_of(self.model.module.training_step(batch, step))  # type: ignore[operator]
                loss.backward()
                self.clip()
                self.model.optimizer.step()
                total += loss.detach()
            return self.result(job, float(total))
