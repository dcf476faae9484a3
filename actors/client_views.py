"""A client as its own code sees it: `archipelago.strategies.interface.ClientView`, where the samples are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from actors.forward import Forward, Index
from actors.requests import ClientSamples
from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.strategies.parameters import Vector


@dataclass
class Work:
    """Samples that went through a model, of one client function; views of the same client share it."""

    forwards: int = 0


class LocalView:
    """One client of a block, for one call of a client function."""

    def __init__(
        self,
        client: int,
        samples: ClientSamples,
        forward: Forward,
        key: tuple[int, str, int] = (0, "", 0),  # seed, stage and round: of what it draws
        split: str = "train",
        labelled: bool = True,
        work: Work | None = None,
    ) -> None:
        self.id, self._samples, self._forward, self._key = client, samples, forward, key
        self._split, self._labelled = split, labelled
        self._index: Index = getattr(samples, split)
        self._work = Work() if work is None else work

    @property
    def size(self) -> int:
        """n_i."""
        return len(self._index)

    @property
    def classes(self) -> int | None:
        """Number of classes of the data set."""
        return self._forward.classes

    @property
    def forwards(self) -> int:
        """Samples that went through a model so far."""
        return self._work.forwards

    def samples(self) -> npt.NDArray[np.float32]:
        """(n, ...) inputs, as a network sees them."""
        x, _ = self._forward.samples.batch(self._index)
        return x.contiguous(memory_format=torch.contiguous_format).cpu().numpy()

    def labels(self) -> npt.NDArray[np.generic]:
        """(n,) targets."""
        self._refuse_labels()
        return self._forward.samples.host_targets(self._index).numpy()

    def label_counts(self) -> npt.NDArray[np.int64]:
        """(classes,) samples of each class."""
        if self.classes is None:
            raise UserError(
                "Expected data with classes to count labels, got a regression: use another method.",
                code="needs-classes",
            )
        return np.bincount(self.labels().astype(np.int64), minlength=self.classes).astype(np.int64)

    def outputs(self, model: Vector) -> npt.NDArray[np.float32]:
        """(n, outputs) of a model, in evaluation mode."""
        self._work.forwards += self.size
        return self._forward.outputs(model, self._index).cpu().numpy()

    def features(self, model: Vector, layer: str = "") -> npt.NDArray[np.float32]:
        """(n, d): what enters the classifier of a model, or what one of its layers puts out."""
        self._work.forwards += self.size
        return self._forward.features(model, self._index, layer).cpu().numpy()

    def sample_losses(self, models: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(n, K) losses under each model."""
        self._refuse_labels()
        forward, index = self._forward, self._index
        y = forward.samples.targets(index)
        self._work.forwards += len(index) * len(models)
        columns = [forward.losses(forward.outputs(models[k], index), y) for k in range(len(models))]
        return torch.stack(columns, dim=1).cpu().numpy()

    def generator(self, purpose: str) -> np.random.Generator:
        """Draws of this client's own: the same for the same seed, stage, round and purpose, wherever it lives."""
        seed, stage, round = self._key
        return generator(seed, purpose, slot=stage, round=round, client=self.id)

    def unlabelled(self, split: str = "train") -> LocalView:
        """The same client by its samples alone, also those of another split: nothing that needs a label works."""
        return LocalView(self.id, self._samples, self._forward, self._key, split, False, self._work)

    def _refuse_labels(self) -> None:
        if not self._labelled:
            raise PermissionError(f"client {self.id}: this view has no labels")
