"""The engine `stacked`: every client of a device in one batched model, in chunks that fit memory.

It takes jobs as every engine does. A block of clients whose engine is this one keeps models, optimizer states and
samples on the device and asks for `Work` directly (`actors/stacked_block.py`): the job form is for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archipelago.core.settings import setting
from lightning_modules.engines.base import ENGINES, Engine
from lightning_modules.engines.loop import LoopEngine
from lightning_modules.engines.objective import TrainJob, TrainResult, outputs_of
from lightning_modules.engines.stacked.batched import (
    Anchors,
    BatchedModel,
    frozen_and_augmented,
    is_per_sample,
    reason_against,
)
from lightning_modules.engines.stacked.device_memory import DeviceMemory, Positions
from lightning_modules.engines.stacked.optimizers import SlabOptimizer, Slabs
from lightning_modules.engines.stacked.probe import probe
from lightning_modules.engines.stacked.samples import DeviceSamples
from lightning_modules.engines.stacked.training import StackedTraining
from lightning_modules.engines.stacked.work import Outcome, Work
from lightning_modules.flat import FlatModel, tensor_of
from lightning_modules.samples import Samples

STACKED_TOLERANCE = 1e-4  # to `loop`, relative, for a round of local training
EXACT_CHUNK = 32  # clients of a chunk under determinism=exact, unless local.chunk says otherwise


@dataclass
class StackedOptions:
    """`local.chunk=64`"""

    chunk: int | None = setting(
        None,
        "engine=stacked: clients trained together at most (default: all of an actor's that fit its memory)",
        at_least=1,
    )
    convolution: str = setting(
        "auto",
        "engine=stacked: how convolutions of many clients are done; auto: unfold on GPU, grouped on CPU",
        choices=("auto", "grouped", "unfold"),
    )
    compile: bool = setting(
        False,
        "engine=stacked: gradients by torch.compile, on a GPU as CUDA graphs (a minute at the first step)",
    )


@ENGINES.register(
    "stacked",
    "all clients of a device as one batched model",
    default_on="cuda",
    options=StackedOptions,
    batched=True,
)
class StackedEngine(Engine):
    """All clients at once; a module that torch cannot batch runs in `loop`, and the run says why."""

    Options = StackedOptions
    recipe = ("augment", "clip")

    def __init__(self, model: FlatModel, samples: Samples, options: Any = None) -> None:
        super().__init__(model, samples, options)
        self.loop = LoopEngine(model, samples)
        self.why_not = reason_against(model)
        self.parts: StackedParts | None = None
        self._said: set[str] = set()
        self._ran: set[str] = set()

    def make_parts(
        self, samples: DeviceSamples, *, bf16: bool = False, exact: tuple[int, int] | None = None
    ) -> StackedParts | None:
        """Everything batched over these samples; None, with a note, if the module cannot be batched.

        `exact`, rows of a batch and samples of a pass, makes every shape independent of who is beside whom.
        """
        if not self.why_not:
            options: StackedOptions = self.options
            unfold = options.convolution == "unfold" or (
                options.convolution == "auto" and self.model.device.type == "cuda"
            )
            batch, width = exact or (None, None)
            try:
                batched = BatchedModel(
                    self.model, samples, unfold=unfold, bf16=bf16, exact=width, compiles=options.compile
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a module that cannot be copied, or shown a sample, as it stands
                said = (str(error).strip().splitlines() or [""])[0][:160]
                self.why_not = f"{type(self.model.module).__name__} cannot be copied ({said})"
            else:
                self.why_not = probe(self.model, batched)
            if not self.why_not:
                optimizer = SlabOptimizer(self.model)
                fixed = (options.chunk or EXACT_CHUNK) if exact else None
                memory = DeviceMemory(self.model.device)
                training = StackedTraining(
                    batched, optimizer, batch=batch, samples=width, fixed=fixed, memory=memory
                )
                if options.chunk is not None:
                    training.chunks.most = options.chunk
                self.parts = StackedParts(batched, optimizer, training, memory)
        if self.why_not:
            self.say(self.why_not)
        return self.parts

    def ran(self) -> set[str]:
        """Its own name, "loop", both, or (nothing was trained yet) neither."""
        return self._ran | ({self.name} if self.parts is not None and self.parts.training.ran else set())

    def say(self, why: str) -> None:
        """Note once that something runs client by client."""
        if why not in self._said:
            self._said.add(why)
            self.notes.append(f"local.engine=stacked runs client by client (loop): {why}.")

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[TrainResult]:
        """Run the jobs; results come in the order of the jobs."""
        frozen = any(
            job.on_top_of or any(term.outputs or term.features for term in job.penalties) for job in jobs
        )
        why = self.why_not or reason_against_jobs(jobs) or frozen_and_augmented(self.model, frozen=frozen)
        if not why:
            used = np.unique(np.concatenate([np.concatenate(job.batches) for job in jobs]))
            raw = self.samples.given
            held = DeviceSamples(
                raw.x,
                raw.y,
                used=used,
                mean=raw.mean,
                std=raw.std,
                classes=raw.classes,
                device=self.model.device,
            )
            if self.make_parts(held) is not None:
                yield from self._train_stacked(jobs, held)
                return
        else:
            self.say(why)
        self._ran.add("loop")
        yield from self.loop.train(jobs)

    def _train_stacked(self, jobs: Sequence[TrainJob], held: DeviceSamples) -> Iterator[TrainResult]:
        assert self.parts is not None
        optimizer = self.parts.optimizer
        work = _work_of(jobs, self.model, self.samples, held, optimizer)
        self.model.touch()
        outcome = self.parts.training.run(work)
        self.notes += self.parts.training.chunks.notes + self.parts.memory.notes
        models = outcome.models.on_host()
        slabs = {name: slab.on_host() for name, slab in outcome.slabs.items()}
        for row, job in enumerate(jobs):
            model = models[row].copy()
            model.flags.writeable = False
            rows = {name: slab[row].copy() for name, slab in slabs.items()}
            state = optimizer.to_state(rows, int(outcome.steps[row]))
            yield TrainResult(job.client, model, state, float(outcome.measured[row, 0]))


@dataclass(frozen=True)
class StackedParts:
    """What a stacked block works with."""

    model: BatchedModel
    optimizer: SlabOptimizer
    training: StackedTraining
    memory: DeviceMemory

    def train(self, work: Work) -> Outcome:
        """All clients of `work`."""
        return self.training.run(work)


def reason_against_jobs(jobs: Sequence[TrainJob]) -> str:
    """Why these jobs cannot be trained together; empty if they can."""
    for job in jobs:
        if job.rule is not None:
            return f"its steps follow a rule of their own ({type(job.rule).__name__})"
        for term in job.penalties:
            if term.features:
                return f"{type(term.penalty).__name__} is a penalty of features"
            if not is_per_sample(term.penalty):
                return (
                    f"{type(term.penalty).__name__} is a penalty of outputs that does not declare per_sample"
                )
    forms = {
        (
            len(job.on_top_of),
            tuple(type(t.penalty) for t in job.penalties),
            job.sample_weights is None,
            job.only,
            job.rate,
        )
        for job in jobs
    }
    return "clients have objectives of different forms" if len(forms) > 1 else ""


def _work_of(
    jobs: Sequence[TrainJob],
    model: FlatModel,
    samples: Samples,
    held: DeviceSamples,
    optimizer: SlabOptimizer,
) -> Work:
    """Jobs as tables; every distinct sample of a job has a place of its own."""
    device = model.device
    distinct = [np.unique(np.concatenate(job.batches)) for job in jobs]
    offsets = np.cumsum([0, *(len(each) for each in distinct)])
    batches = [
        [offsets[row] + np.searchsorted(distinct[row], batch) for batch in job.batches]
        for row, job in enumerate(jobs)
    ]
    start = torch.stack([tensor_of(job.start) for job in jobs]).to(device)
    states = [job.optimizer_state or {} for job in jobs]
    slabs: Slabs = {}
    for name in optimizer.names:
        rows = np.zeros((len(jobs), optimizer.width), np.float32)
        for row, state in enumerate(states):
            optimizer.from_state(state, name, rows[row])
        slabs[name] = torch.from_numpy(rows).to(device)

    def sent(at: Positions) -> Tensor:
        return torch.from_numpy(at).to(device)

    scales = [job.scale for job in jobs]
    return Work(
        start=lambda at: start.index_select(0, sent(at)),
        batches=batches,
        rows=torch.from_numpy(held.rows(np.concatenate(distinct))).to(held.rows_device),
        seeds=[job.seed for job in jobs],
        slabs=lambda at: {name: slab.index_select(0, sent(at)) for name, slab in slabs.items()},
        steps=np.array([optimizer.steps_of(state) for state in states]),
        tables=_tables_of(jobs, distinct, model, samples),
        scale=None if set(scales) == {1.0} else torch.tensor(scales, dtype=torch.float32, device=device),
        penalties=[term.penalty for term in jobs[0].penalties],
        anchors=lambda at: _anchors_of([jobs[i] for i in at], device),
        only=jobs[0].only,
        rate=jobs[0].rate,
    )


def _tables_of(
    jobs: Sequence[TrainJob], distinct: Sequence[Any], model: FlatModel, samples: Samples
) -> dict[str, Tensor]:
    """Frozen outputs, outputs for penalties and sample weights of every place."""
    tables: dict[str, list[Tensor]] = {}
    for job, index in zip(jobs, distinct, strict=True):
        if job.on_top_of:
            total = outputs_of(model, samples, job.on_top_of[0], index)
            for vector in job.on_top_of[1:]:
                total = total + outputs_of(model, samples, vector, index)
            tables.setdefault("frozen", []).append(total)
        for number, term in enumerate(job.penalties):
            for name, models in term.outputs.items():
                rows = [outputs_of(model, samples, vector, index) for vector in np.atleast_2d(models)]
                table = rows[0] if models.ndim == 1 else torch.stack(rows, dim=1)
                tables.setdefault(f"{number}.{name}", []).append(table)
        if job.sample_weights is not None:
            order = np.argsort(job.sample_weights[0])
            at = order[np.searchsorted(job.sample_weights[0][order], index)]
            weights = torch.from_numpy(job.sample_weights[1][at]).to(model.device)
            tables.setdefault("sample_weights", []).append(weights)
    return {name: torch.cat(parts) for name, parts in tables.items()}


def _anchors_of(jobs: Sequence[TrainJob], device: torch.device) -> Anchors:
    return [
        {
            name: (torch.stack([job.penalties[number].anchors[name] for job in jobs]).to(device), False)
            for name in term.anchors
        }
        for number, term in enumerate(jobs[0].penalties)
    ]
