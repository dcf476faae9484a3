"""What a client minimises: mean of weight * loss(scale * (own + frozen outputs)), plus penalties.

A `TrainJob` says it in values, `prepare` makes a `LocalObjective` of it, and an engine gives a `TrainResult` back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty, features_of
from archipelago.strategies.rules import Rule
from lightning_modules.features import classifier_of, inputs_of
from lightning_modules.flat import FlatModel, OptimizerState
from lightning_modules.samples import Samples

Rows = dict[str, Tensor]  # what belongs to the samples of one batch, by name
Seen = dict[str, npt.NDArray[Any]]  # frozen models by name: one, or (K, P)


@dataclass(frozen=True)
class Term:
    """A penalty and what its references are for one client."""

    penalty: Penalty
    anchors: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # a model, or (K, P) models
    features: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # a model each


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
    only: tuple[str, ...] | None = None  # tensors that are trained, by name; None: all
    rule: Rule | None = None  # how a step follows from gradients; None: along the gradient at the model
    memory: dict[str, Tensor] = field(default_factory=dict)  # what the rule remembers at the beginning
    # Of each step: its mini-batches after the first, where the rule takes several.
    more: Sequence[Sequence[npt.NDArray[np.int64]]] = ()
    rate: float = 1.0  # what learning rates are multiplied with in this round

    @property
    def is_plain(self) -> bool:
        """Whether the objective is the mean loss and nothing else."""
        added = self.on_top_of or self.penalties or self.sample_weights is not None or self.rule is not None
        return not added and self.scale == 1.0

    def work(self) -> tuple[int, int]:
        """(samples that go backward, samples that frozen models see)."""
        frozen = len(self.on_top_of)
        frozen += sum(len(np.atleast_2d(each)) for term in self.penalties for each in term.outputs.values())
        frozen += sum(len(term.features) for term in self.penalties)
        distinct = len(np.unique(np.concatenate(self.everything()))) if frozen else 0
        passes = (1,) if self.rule is None else self.rule.passes
        backward = passes[0] * sum(len(batch) for batch in self.batches)
        for others in self.more:
            backward += sum(each * len(batch) for each, batch in zip(passes[1:], others, strict=True))
        return backward, frozen * distinct

    @property
    def several(self) -> int:
        """Mini-batches of a step."""
        return 1 + max(map(len, self.more), default=0)

    def everything(self) -> list[npt.NDArray[np.int64]]:
        """All mini-batches: the first of every step, then the others of every step."""
        return [*self.batches, *(batch for others in self.more for batch in others)]


@dataclass(frozen=True)
class TrainResult:
    """What came out of it; `objective` is the mean of the local objective over the steps."""

    client: int
    model: Vector
    optimizer_state: OptimizerState
    objective: float
    kept: dict[str, Vector] = field(default_factory=dict)  # private models that the rule made, by name

    @property
    def is_finite(self) -> bool:
        """Whether what the rule made is."""
        return all(bool(np.isfinite(model).all()) for model in self.kept.values())


def default_losses(
    outputs: Tensor, y: Tensor, classes: int | None, reduction: str = "none", smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy, of smoothed labels if asked for, or squared error where there are no classes."""
    if classes is None:
        return nn.functional.mse_loss(outputs.reshape(y.shape), y, reduction=reduction)
    return nn.functional.cross_entropy(outputs, y, reduction=reduction, label_smoothing=smoothing)


def training_loss(module: Any) -> Callable[..., Tensor]:
    """The loss that local training minimises: the module's own for it, if it has one, else its loss."""
    found: Callable[..., Tensor] = getattr(module, "training_loss", None) or module.loss
    return found


def follows_contract(module: nn.Module) -> bool:
    """Whether a module has per-sample losses and logits, which penalties and additive models need."""
    return callable(getattr(module, "loss", None)) and hasattr(module, "local_objective")


def widened(outputs: Tensor) -> Tensor:
    """Outputs of lower precision (autocast) as float32: the loss and what is added to it are computed in no less."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


@dataclass
class LocalObjective:
    """The objective of a job, batch by batch."""

    terms: list[Term]
    tables: Rows  # one row per distinct sample of the job
    positions: list[Tensor]  # row of each sample of each batch
    scale: Tensor | None
    classifier: nn.Module | None = None  # of the live module, where a term asks for features
    # Frozen models that must see augmented inputs, step by step: for their outputs, and for their features.
    seen: Seen = field(default_factory=dict)
    seen_features: Seen = field(default_factory=dict)
    model: FlatModel | None = None

    def __call__(self, module: Any, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, y = batch
        features = {}
        if self.classifier is None:
            own = widened(module(x))
        else:
            with inputs_of(self.classifier) as entering:
                own = widened(module(x))
            features = {"own_features": widened(entering[-1]).flatten(1)}
        rows = {**self.rows(step), **self._of_frozen(x)}
        outputs = own
        if "frozen" in rows:
            outputs = outputs + rows["frozen"]
        if "scale" in rows:
            outputs = outputs * rows["scale"]
        losses = training_loss(module)(outputs, y, reduction="none")
        if "weights" in rows:
            losses = (losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses) * rows["weights"]
        value: Tensor = losses.mean()
        if self.terms:
            live = torch.cat([p.reshape(-1) for p in module.parameters()])
            for number, term in enumerate(self.terms):
                needed = (*term.penalty.outputs, *features_of(term.penalty))
                seen = {name: rows[f"{number}.{name}"] for name in needed}
                value = value + term.penalty.value(
                    live, {**term.anchors, **seen, "own_outputs": own, **features}
                )
        return value

    def _of_frozen(self, x: Tensor) -> Rows:
        """What frozen models say of a batch whose inputs nobody has seen before."""
        found: Rows = {}
        for name, models in self.seen.items():
            assert self.model is not None
            outputs = [self.model.frozen_outputs(vector, x) for vector in np.atleast_2d(models)]
            if name == "frozen":
                found[name] = functools.reduce(torch.add, outputs)
            else:
                found[name] = outputs[0] if models.ndim == 1 else torch.stack(outputs, dim=1)
        for name, vector in self.seen_features.items():
            assert self.model is not None and self.classifier is not None
            with inputs_of(self.classifier) as entering:
                self.model.frozen_outputs(vector, x)
            found[name] = entering[-1].detach().float().flatten(1)
        return found

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


def features_on(model: FlatModel, samples: Samples, vector: Vector, index: npt.NDArray[np.int64]) -> Tensor:
    """What enters a frozen model's classifier on some samples, in evaluation mode; computed once in a round."""
    found = samples.remembered.get(vector, index, "features")
    if found is None:
        with inputs_of(classifier_of(model.module, model.spec)) as seen:
            _outputs_by_torch(model, samples, vector, index)
        made = torch.cat([each.detach().float().flatten(1) for each in seen])
        found = samples.remembered.put(vector, index, made, "features")
    return found


def _outputs_by_torch(
    model: FlatModel, samples: Samples, vector: Vector, index: npt.NDArray[np.int64]
) -> Tensor:
    model.load(vector)
    model.module.eval()
    with torch.no_grad(), model.autocast():
        return torch.cat([model.module(x).float() for x in samples.inputs(index)])


def prepare(job: TrainJob, model: FlatModel, samples: Samples) -> LocalObjective:
    """The objective of a job; each frozen model is evaluated once per distinct sample, not once per step.

    Where inputs are augmented, every step has inputs of its own, and frozen models see what the live one sees.
    """
    tables: Rows = {}
    positions: list[Tensor] = []
    seen = {
        f"{n}.{name}": models for n, term in enumerate(job.penalties) for name, models in term.outputs.items()
    }
    features = {
        f"{n}.{name}": vector
        for n, term in enumerate(job.penalties)
        for name, vector in term.features.items()
    }
    classifier = classifier_of(model.module, model.spec) if features else None
    fresh: Seen = {}
    fresh_features: Seen = {}
    if model.recipe.augment:
        fresh = {**({"frozen": np.stack(job.on_top_of)} if job.on_top_of else {}), **seen}
        fresh_features = features
        job, seen, features = dataclasses.replace(job, on_top_of=()), {}, {}
    if job.on_top_of or seen or features or job.sample_weights is not None:
        batches = job.everything()
        distinct, inverse = np.unique(np.concatenate(batches), return_inverse=True)
        stops = np.cumsum([len(batch) for batch in batches])[:-1]
        positions = [torch.from_numpy(part).to(model.device) for part in np.split(inverse, stops)]
        for vector in job.on_top_of:
            outputs = outputs_of(model, samples, vector, distinct)
            tables["frozen"] = tables["frozen"] + outputs if "frozen" in tables else outputs
        for name, models in seen.items():
            rows = [outputs_of(model, samples, vector, distinct) for vector in np.atleast_2d(models)]
            tables[name] = rows[0] if models.ndim == 1 else torch.stack(rows, dim=1)
        for name, vector in features.items():
            tables[name] = features_on(model, samples, vector, distinct)
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
    return LocalObjective(terms, tables, positions, scale, classifier, fresh, fresh_features, model)
