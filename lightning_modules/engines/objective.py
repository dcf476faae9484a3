"""What a client minimises: mean of weight * loss(scale * (own + frozen outputs)), plus penalties.

A `TrainJob` says it in values, `prepare` makes a `LocalObjective` of it, and an engine gives a `TrainResult` back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty
from lightning_modules.flat import FlatModel, OptimizerState
from lightning_modules.samples import Samples

Rows = dict[str, Tensor]  # what belongs to the samples of one batch, by name


@dataclass(frozen=True)
class Term:
    """A penalty and what its references are for one client."""

    penalty: Penalty
    anchors: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # a model, or (K, P) models


@dataclass(frozen=True)
class TrainJob:
    """One client's local training."""

    client: int
    start: Vector
    batches: Sequence[npt.NDArray[np.int64]]
    seed: int
    optimizer_state: OptimizerState | None = None
    on_top_of: Sequence[Vector] = ()
    penalties: Sequence[Term] = ()
    # One weight per training sample, as (samples, weights); the loss of a batch is mean(weight * loss).
    sample_weights: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    scale: float = 1.0  # what the summed outputs are multiplied with before the loss

    @property
    def is_plain(self) -> bool:
        """Whether the objective is the mean loss and nothing else."""
        added = self.on_top_of or self.penalties or self.sample_weights is not None
        return not added and self.scale == 1.0

    def work(self) -> tuple[int, int]:
        """(samples that go backward, samples that frozen models see)."""
        frozen = len(self.on_top_of)
        frozen += sum(len(np.atleast_2d(each)) for term in self.penalties for each in term.outputs.values())
        distinct = len(np.unique(np.concatenate(self.batches))) if frozen else 0
        return sum(len(batch) for batch in self.batches), frozen * distinct


@dataclass(frozen=True)
class TrainResult:
    """What came out of it; `objective` is the mean of the local objective over the steps."""

    client: int
    model: Vector
    optimizer_state: OptimizerState
    objective: float


def default_losses(outputs: Tensor, y: Tensor, classes: int | None, reduction: str = "none") -> Tensor:
    """Cross-entropy, or squared error where there are no classes."""
    if classes is None:
        return nn.functional.mse_loss(outputs.reshape(y.shape), y, reduction=reduction)
    return nn.functional.cross_entropy(outputs, y, reduction=reduction)


def follows_contract(module: nn.Module) -> bool:
    """Whether a module has per-sample losses and logits, which penalties and additive models need."""
    return callable(getattr(module, "loss", None)) and hasattr(module, "local_objective")


def objective_of(
    module: Any, own: Tensor, y: Tensor, live: Tensor | None, terms: Sequence[Term], rows: Rows
) -> Tensor:
    """The objective of one batch; `own` are the live outputs, `live` the live parameters (None without terms)."""
    outputs = own
    if "frozen" in rows:
        outputs = outputs + rows["frozen"]
    if "scale" in rows:
        outputs = outputs * rows["scale"]
    losses = module.loss(outputs, y, reduction="none")
    if "weights" in rows:
        losses = (losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses) * rows["weights"]
    value: Tensor = losses.mean()
    for number, term in enumerate(terms):
        seen = {name: rows[f"{number}.{name}"] for name in term.penalty.outputs}
        given = {**term.anchors, **seen, "own_outputs": own}
        value = value + term.penalty.value(live, given)  # type: ignore[arg-type]  # a tensor where there are terms
    return value


@dataclass
class LocalObjective:
    """The objective of a job, batch by batch."""

    terms: list[Term]
    tables: Rows  # one row per distinct sample of the job
    positions: list[Tensor]  # row of each sample of each batch
    scale: Tensor | None

    def __call__(self, module: Any, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, y = batch
        live = torch.cat([p.reshape(-1) for p in module.parameters()]) if self.terms else None
        # Outputs of lower precision (autocast) are widened: the loss and what is added to it stay float32.
        return objective_of(module, module(x).float(), y, live, self.terms, self.rows(step))

    def rows(self, step: int) -> Rows:
        """What belongs to the samples of one batch."""
        found = {name: table[self.positions[step]] for name, table in self.tables.items()}
        if self.scale is not None:
            found["scale"] = self.scale
        return found


def outputs_of(model: FlatModel, samples: Samples, vector: Vector, index: npt.NDArray[np.int64]) -> Tensor:
    """A frozen model's outputs on some samples, in evaluation mode; computed once in a round.

    CAM asks three times for the same ones: to assign, and under each of its two trainings.
    """
    found = samples.remembered.get(vector, index)
    if found is None:
        own = None if model.forward_pass is None else model.forward_pass(vector, index)
        made = _outputs_by_torch(model, samples, vector, index) if own is None else own
        found = samples.remembered.put(vector, index, made)
    return found


def _outputs_by_torch(
    model: FlatModel, samples: Samples, vector: Vector, index: npt.NDArray[np.int64]
) -> Tensor:
    model.load(vector)
    model.module.eval()
    with torch.no_grad(), model.autocast():
        return torch.cat([model.module(x).float() for x in samples.inputs(index)])


def prepare(job: TrainJob, model: FlatModel, samples: Samples) -> LocalObjective:
    """The objective of a job; each frozen model is evaluated once per distinct sample, not once per step."""
    tables: Rows = {}
    positions: list[Tensor] = []
    seen = {
        f"{n}.{name}": models for n, term in enumerate(job.penalties) for name, models in term.outputs.items()
    }
    if job.on_top_of or seen or job.sample_weights is not None:
        distinct, inverse = np.unique(np.concatenate(job.batches), return_inverse=True)
        stops = np.cumsum([len(batch) for batch in job.batches])[:-1]
        positions = [torch.from_numpy(part).to(model.device) for part in np.split(inverse, stops)]
        for vector in job.on_top_of:
            outputs = outputs_of(model, samples, vector, distinct)
            tables["frozen"] = tables["frozen"] + outputs if "frozen" in tables else outputs
        for name, models in seen.items():
            rows = [outputs_of(model, samples, vector, distinct) for vector in np.atleast_2d(models)]
            tables[name] = rows[0] if models.ndim == 1 else torch.stack(rows, dim=1)
        if job.sample_weights is not None:
            order = np.argsort(job.sample_weights[0])
            at = order[np.searchsorted(job.sample_weights[0][order], distinct)]
            tables["weights"] = torch.from_numpy(job.sample_weights[1][at]).to(model.device)
    terms = [
        dataclasses.replace(
            term, anchors={name: value.to(model.device) for name, value in term.anchors.items()}
        )
        for term in job.penalties
    ]
    scale = None if job.scale == 1.0 else torch.tensor(job.scale, dtype=torch.float32, device=model.device)
    return LocalObjective(terms, tables, positions, scale)
