"""Local training: one job per client in, one result per client out. Three ways to run the same steps.

- `loop`: the module's own step and optimizer, no Trainer. The default on CPU.
- `vmap`: clients with equal batch shapes trained as one batched model. The default on GPU.
- `trainer`: a real `lightning.Trainer`, for its callbacks, precision plugins and strategies.

loop and trainer give the same bits on CPU; vmap the same numbers to VMAP_TOLERANCE (relative, per round of
local training), because batched kernels add up in another order.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import lightning
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.errors import UserError
from archipelago.core.randomness import seeded_torch
from archipelago.core.targets import load_class
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty
from lightning_modules.base import follows_contract
from lightning_modules.flat import FlatModel, OptimizerState, tensor_of
from lightning_modules.samples import Samples

VMAP_TOLERANCE = 1e-4


@dataclass(frozen=True)
class PenaltyJob:
    """A penalty and what its references are for one client."""

    penalty: Penalty
    anchors: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
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
    penalties: Sequence[PenaltyJob] = ()
    # One weight per training sample, as (samples, weights); the loss of a batch is mean(weight * loss).
    sample_weights: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    scale: float = 1.0  # what the summed outputs are multiplied with before the loss


@dataclass(frozen=True)
class TrainResult:
    """What came out of it; `objective` is the mean of the local objective over the steps."""

    client: int
    model: Vector
    optimizer_state: OptimizerState
    objective: float


Term = tuple[Penalty, dict[str, Tensor]]
Rows = dict[str, Tensor]  # what belongs to the samples of one batch, by name


def objective_of(
    module: Any, own: Tensor, y: Tensor, live: Tensor | None, terms: Sequence[Term], rows: Rows
) -> Tensor:
    """mean of weight * loss(scale * (own + frozen outputs)), plus penalties."""
    outputs = own
    if "frozen" in rows:
        outputs = outputs + rows["frozen"]
    if "scale" in rows:
        outputs = outputs * rows["scale"]
    losses = module.loss(outputs, y, reduction="none")
    if "weights" in rows:
        losses = losses * rows["weights"]
    value = losses.mean()
    for number, (penalty, anchors) in enumerate(terms):
        seen = {name: rows[f"{number}.{name}"] for name in penalty.outputs}
        value = value + penalty.value(live, {**anchors, **seen, "own_outputs": own})  # type: ignore[arg-type]
    return value


@dataclass
class LocalObjective:
    """What one client minimises: the objective of a job, batch by batch."""

    terms: list[Term]
    tables: Rows  # one row per distinct sample of the job
    positions: list[Tensor]  # row of each sample of each batch
    scale: Tensor | None

    def __call__(self, module: Any, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, y = batch
        live = torch.cat([p.reshape(-1) for p in module.parameters()]) if self.terms else None
        return objective_of(module, module(x), y, live, self.terms, self.rows(step))

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
    key = samples.remembered.key(vector, index)
    found = samples.remembered.get(key)
    if found is None:
        model.load(vector)
        model.module.eval()
        with torch.no_grad():
            chunks = [model.module(x) for x in samples.inputs(index)]
        found = samples.remembered.put(key, torch.cat(chunks))
    return found


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
        (
            term.penalty,
            {name: tensor_of(np.asarray(value)).to(model.device) for name, value in term.anchors.items()},
        )
        for term in job.penalties
    ]
    scale = None if job.scale == 1.0 else torch.tensor(job.scale, dtype=torch.float32, device=model.device)
    return LocalObjective(terms, tables, positions, scale)


@dataclass
class LoopExecutor:
    """One client after the other, the module's own step and optimizer."""

    model: FlatModel
    samples: Samples
    notes: list[str] = field(default_factory=list)

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[TrainResult]:
        """Run the jobs in order."""
        for job in jobs:
            yield self.train_one(job)

    def train_one(self, job: TrainJob) -> TrainResult:
        """One client's steps."""
        with _ready(job, self.model, self.samples):
            total = torch.zeros((), dtype=torch.float64, device=self.model.device)
            for step, index in enumerate(job.batches):
                self.model.zero_grad()
                loss = _loss_of(self.model.module.training_step(self.samples.batch(index), step))  # type: ignore[operator]
                loss.backward()
                self.model.optimizer.step()
                total += loss.detach()
            return _result(job, self.model, float(total))


@dataclass
class TrainerExecutor:
    """One client after the other, each through a `lightning.Trainer`.

    `options` are the Trainer's own arguments (`precision`, `gradient_clip_val`, ...); `callbacks` a list of
    import paths. The optimizer's state enters and leaves through the module.
    """

    model: FlatModel
    samples: Samples
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[TrainResult]:
        """Run the jobs in order."""
        for job in jobs:
            with _ready(job, self.model, self.samples):
                total = self._fit(job)
                yield _result(job, self.model, total)

    def _fit(self, job: TrainJob) -> float:
        module, optimizer = self.model.module, self.model.optimizer
        losses = _CollectLosses()
        options = dict(self.options)
        paths = options.pop("callbacks", [])
        callbacks = [load_class("local.trainer.callbacks", path, lightning.Callback)() for path in paths]
        own = module.configure_optimizers
        module.configure_optimizers = lambda: optimizer  # type: ignore[assignment,method-assign]
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
                trainer.fit(module, _batches(self.samples, job.batches))  # type: ignore[arg-type]
        finally:
            module.configure_optimizers = own  # type: ignore[method-assign]
            module.trainer = None  # type: ignore[assignment]
        return losses.total


@contextmanager
def _hushed(logger: str) -> Iterator[None]:
    chosen = logging.getLogger(logger)
    level = chosen.level
    chosen.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chosen.setLevel(level)


class _CollectLosses(lightning.Callback):
    def __init__(self) -> None:
        self.total = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += float(_loss_of(outputs).detach())


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


class VmapExecutor:
    """Clients with equal batch shapes as one batched model; the rest falls back to the loop, and says so."""

    ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam)

    def __init__(self, model: FlatModel, samples: Samples, group: int = 32) -> None:
        self.model, self.samples, self.group = model, samples, group
        self.loop = LoopExecutor(model, samples)
        self.notes: list[str] = []
        self._why_not = self._reason_against()
        if self._why_not:
            self.notes.append(f"local.executor=vmap falls back to loop: {self._why_not}.")

    def _reason_against(self) -> str:
        module, optimizer = self.model.module, self.model.optimizer
        if not follows_contract(module):
            return f"{type(module).__name__} has no per-sample loss"
        if type(optimizer) not in self.ELEMENTWISE or len(optimizer.param_groups) != 1:
            return f"{type(optimizer).__name__} is not a plain SGD or Adam over one group"
        parameters = list(module.parameters())
        optimized = optimizer.param_groups[0]["params"]
        same = len(parameters) == len(optimized) and all(
            a is b for a, b in zip(parameters, optimized, strict=True)
        )
        if not same or not all(parameter.requires_grad for parameter in parameters):
            return "some parameters are frozen or left out of the optimizer"
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.modules.dropout._DropoutNd):
                return f"'{name}' draws random numbers (Dropout)"
        return ""

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[TrainResult]:
        """Run the jobs; results come in the order of the jobs."""
        if self._why_not:
            yield from self.loop.train(jobs)
            return
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, job in enumerate(jobs):
            groups.setdefault(_signature(job), []).append(position)
        done: dict[int, TrainResult] = {}
        for positions in groups.values():
            for start in range(0, len(positions), self.group):
                chosen = positions[start : start + self.group]
                if len(chosen) == 1:
                    done[chosen[0]] = self.loop.train_one(jobs[chosen[0]])
                else:
                    done.update(zip(chosen, self._train_together([jobs[p] for p in chosen]), strict=True))
        for position in range(len(jobs)):
            yield done.pop(position)

    def _train_together(self, jobs: list[TrainJob]) -> list[TrainResult]:
        """A group as one model; what torch cannot batch (random draws in `forward`, odd layers) in the loop."""
        try:
            with torch.no_grad():  # gradients come from torch.func; a second graph would only cost
                return self._train_group(jobs)
        except RuntimeError as error:
            self._why_not = f"torch cannot batch this module ({str(error).strip().splitlines()[0][:120]})"
            self.notes.append(f"local.executor=vmap falls back to loop: {self._why_not}.")
            return list(self.loop.train(jobs))

    def _train_group(self, jobs: list[TrainJob]) -> list[TrainResult]:
        model, module = self.model, self.model.module
        objectives = [prepare(job, model, self.samples) for job in jobs]
        model.touch()
        module.train()
        stacked = torch.stack([tensor_of(job.start) for job in jobs]).to(model.device)
        parameters, buffers = self._unstack(stacked, len(jobs))
        leaves = [torch.nn.Parameter(tensor) for tensor in parameters.values()]
        optimizer = self._stacked_optimizer(leaves, jobs)
        terms = [penalty for penalty, _ in objectives[0].terms]
        gradient = torch.func.vmap(torch.func.grad_and_value(self._objective(terms)))
        anchors = _stack_anchors(objectives)
        total = torch.zeros(len(jobs), dtype=torch.float64, device=model.device)
        for step in range(len(jobs[0].batches)):
            batches = [self.samples.batch(job.batches[step]) for job in jobs]
            x = torch.stack([x for x, _ in batches])
            y = torch.stack([y for _, y in batches])
            rows = [objective.rows(step) for objective in objectives]
            stacked_rows = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            live = dict(zip(parameters, leaves, strict=True))
            gradients, losses = gradient(live, buffers, x, y, stacked_rows, anchors)
            for name, leaf in live.items():
                leaf.grad = gradients[name]
            optimizer.step()
            total += losses.detach()
        return self._collect(jobs, leaves, buffers, optimizer, total)

    def _objective(self, penalties: list[Penalty]) -> Any:
        module = self.model.module

        def objective(
            parameters: dict[str, Tensor],
            buffers: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
            rows: Rows,
            anchors: list[dict[str, Tensor]],
        ) -> Tensor:
            own = torch.func.functional_call(module, (parameters, buffers), (x,))
            live = torch.cat([p.reshape(-1) for p in parameters.values()]) if penalties else None
            return objective_of(module, own, y, live, list(zip(penalties, anchors, strict=True)), rows)

        return objective

    def _unstack(self, stacked: Tensor, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        parameters, buffers = {}, {}
        for entry in self.model.spec.entries:
            part = stacked[:, entry.start : entry.stop].reshape(count, *entry.shape).clone()
            (parameters if entry.kind == "parameter" else buffers)[entry.name] = part
        for name, buffer in self.model.module.named_buffers():
            if not buffer.is_floating_point():
                buffers[name] = buffer.expand(count, *buffer.shape).clone()
        return parameters, buffers

    def _stacked_optimizer(self, leaves: list[Tensor], jobs: list[TrainJob]) -> torch.optim.Optimizer:
        """The module's optimizer over stacked parameters: its updates are element by element."""
        own = self.model.optimizer
        settings = {name: value for name, value in own.param_groups[0].items() if name in own.defaults}
        optimizer = type(own)(leaves, **settings)
        for index, leaf in enumerate(leaves):
            states = [job.optimizer_state or {} for job in jobs]
            for key in [k for k in states[0] if k.partition(".")[0] == str(index)]:
                values = [torch.from_numpy(state[key].copy()) for state in states]
                name = key.partition(".")[2]
                # A step counter is one number for the group: jobs of a group agree on it (see _signature).
                stacked = values[0] if name == "step" else torch.stack(values).to(leaf.device)
                optimizer.state[leaf][name] = stacked
        return optimizer

    def _collect(
        self,
        jobs: list[TrainJob],
        leaves: list[Tensor],
        buffers: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        total: Tensor,
    ) -> list[TrainResult]:
        floats = [
            buffers[entry.name].reshape(len(jobs), -1)
            for entry in self.model.spec.entries
            if entry.kind == "buffer"
        ]
        flat = (
            torch.cat([leaf.detach().reshape(len(jobs), -1) for leaf in leaves] + floats, dim=1).cpu().numpy()
        )
        results = []
        for row, job in enumerate(jobs):
            state: OptimizerState = {}
            for index, leaf in enumerate(leaves):
                for name, value in optimizer.state[leaf].items():
                    if value is not None:
                        one = value if name == "step" else value[row]
                        state[f"{index}.{name}"] = one.detach().cpu().numpy().copy()
            model = flat[row].copy()
            model.flags.writeable = False
            results.append(TrainResult(job.client, model, state, float(total[row]) / len(job.batches)))
        return results


def _signature(job: TrainJob) -> tuple[Any, ...]:
    """What must agree for clients to be trained as one batched model."""
    state = job.optimizer_state or {}
    counters = tuple((key, float(value)) for key, value in state.items() if key.endswith(".step"))
    shapes = tuple(len(batch) for batch in job.batches)
    extras = (bool(job.on_top_of), len(job.penalties), job.sample_weights is not None, job.scale == 1.0)
    return (shapes, tuple(state), counters, extras)


def _stack_anchors(objectives: list[LocalObjective]) -> list[dict[str, Tensor]]:
    return [
        {name: torch.stack([objective.terms[i][1][name] for objective in objectives]) for name in anchors}
        for i, (_, anchors) in enumerate(objectives[0].terms)
    ]


def _loss_of(returned: Any) -> Tensor:
    return returned["loss"] if isinstance(returned, dict) else returned


class _ready:
    """Everything a client's steps need in place, and everything put back afterwards."""

    def __init__(self, job: TrainJob, model: FlatModel, samples: Samples) -> None:
        self.job, self.model, self.samples = job, model, samples
        self._seeded = seeded_torch(job.seed)

    def __enter__(self) -> None:
        module, job = self.model.module, self.job
        self._seeded.__enter__()
        if follows_contract(module):
            module.local_objective = prepare(job, self.model, self.samples)  # type: ignore[assignment]
        elif job.on_top_of or job.penalties or job.sample_weights is not None or job.scale != 1.0:
            raise UserError(
                f"This method adds to the local objective, and {type(module).__name__} has only a "
                "training_step: give it forward(x), loss(outputs, y, reduction) and the attribute "
                "local_objective (see lightning_modules/base.py), or choose another method."
            )
        self.model.load(job.start)
        self.model.touch()
        self.model.set_optimizer_state(job.optimizer_state)
        module.train()

    def __exit__(self, *error: Any) -> None:
        if follows_contract(self.model.module):
            self.model.module.local_objective = None  # type: ignore[assignment]
        self._seeded.__exit__(*error)


def _result(job: TrainJob, model: FlatModel, total: float) -> TrainResult:
    return TrainResult(job.client, model.vector(), model.optimizer_state(), total / max(len(job.batches), 1))


Executor = LoopExecutor | VmapExecutor | TrainerExecutor


def make_executor(
    name: str, model: FlatModel, samples: Samples, trainer_options: dict[str, Any] | None = None
) -> Executor:
    """The executor a setting names; auto is loop on CPU and vmap on GPU."""
    if name == "auto":
        name = "vmap" if model.device.type == "cuda" else "loop"
    if name == "loop":
        return LoopExecutor(model, samples)
    if name == "vmap":
        return VmapExecutor(model, samples)
    return TrainerExecutor(model, samples, dict(trainer_options or {}))
